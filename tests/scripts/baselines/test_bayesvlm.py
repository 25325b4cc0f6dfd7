"""Curvature against autograd, variance against the whole covariance, and what it is large for."""

from __future__ import annotations

import torch
from ambiguous_pairs import points
from scipy.stats import spearmanr

from prolip.embeddings import Pairs
from studies.uncertainty.baselines import BayesVLM
from studies.uncertainty.baselines.bayesvlm import infonce_curvature, with_prior


def test_curvature_is_the_gauss_newton_matrix_of_the_loss_by_the_embedding_before_its_length_is_taken():
    mean, bank = points(3, 5, dtype=torch.float64), points(7, 5, seed=1, dtype=torch.float64)

    def logits(embedding):
        return 6.0 * bank @ (embedding / embedding.norm())

    wanted = torch.zeros(5, 5, dtype=torch.float64)
    for m in mean:
        jacobian = torch.autograd.functional.jacobian(logits, m)
        wanted += jacobian.T @ torch.autograd.functional.hessian(lambda z: z.logsumexp(0), logits(m)) @ jacobian
    torch.testing.assert_close(infonce_curvature(mean, bank, 6.0), wanted)


def test_variance_is_that_of_an_embedding_under_the_kronecker_covariance():
    hidden, text = torch.randn(40, 3, dtype=torch.float64), points(40, 4, dtype=torch.float64)
    pairs = Pairs.in_rows(points(40, 4, seed=1, dtype=torch.float64), text, 5.0, text_hidden=hidden)
    scorer = BayesVLM.fit(pairs).scorers["text"]
    a = with_prior(hidden.T @ hidden / 40**0.5)
    b = with_prior(infonce_curvature(text, pairs.image, 5.0) / 40**0.5)
    covariance = torch.kron(torch.linalg.inv(a), torch.linalg.inv(b))  # of the columns of P
    asked = torch.randn(6, 3, dtype=torch.float64)
    wanted = []
    for h in asked:
        jacobian = torch.kron(h.unsqueeze(0), torch.eye(4, dtype=torch.float64))  # d(P h) / d(columns of P)
        wanted.append((jacobian @ covariance @ jacobian.T).diagonal().mean())
    torch.testing.assert_close(scorer(asked), torch.stack(wanted))


def test_it_sees_what_is_rare_and_so_the_reverse_of_ambiguity_where_the_general_is_common(world):
    torch.manual_seed(0)
    spread = torch.tensor([3.0, 2.0, 1.0, 0.5, 0.3, 0.2])
    hidden = torch.randn(2000, 6) * spread
    pairs = Pairs.in_rows(points(2000, 8), points(2000, 8, seed=1), 10.0, text_hidden=hidden)
    asked = torch.randn(500, 6)
    assert spearmanr(BayesVLM.fit(pairs).text(points(500, 8), asked), (asked / spread).square().sum(1))[0] > 0.95
    assert world.correlation(BayesVLM.fit(world.pairs).text(world.pairs.text)) < -0.6
