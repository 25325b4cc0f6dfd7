"""Likelihood and variance against scipy's generalised normal, gradients at no distance, both kinds of likelihood."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from ambiguous_pairs import points
from scipy.stats import gennorm, spearmanr

from prolip.embeddings import Pairs
from studies.uncertainty.baselines import ProbVLM
from studies.uncertainty.baselines.probvlm import gennorm_nll, gennorm_variance


def test_likelihood_and_variance_are_scipys():
    x, mu = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    alpha, beta = torch.rand(6, dtype=torch.float64) + 0.2, torch.tensor([0.5, 0.8, 1, 2, 3.3, 5], dtype=torch.float64)
    scipys = gennorm(beta.numpy(), mu.numpy(), alpha.numpy())
    found = gennorm_nll(x, mu, alpha.log(), beta)
    torch.testing.assert_close(found, -torch.from_numpy(scipys.logpdf(x.numpy())), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gennorm_variance(alpha.log(), beta), torch.from_numpy(scipys.var()))


def test_the_cross_modal_term_is_what_sees_partners_that_scatter(small, monkeypatch):
    torch.manual_seed(0)
    text = points(400, 16)
    scatter = torch.where(text[:, 0] > 0, 1.5, 0.1)
    pairs = Pairs.in_rows(F.normalize(text + scatter.unsqueeze(1) * points(400, 16, seed=1), dim=1), text, 10.0)
    new = points(300, 16, seed=5)
    assert spearmanr(ProbVLM.fit(pairs).text(new), new[:, 0] > 0)[0] > 0.6
    monkeypatch.setattr(ProbVLM, "cross", 0.0)
    assert abs(spearmanr(ProbVLM.fit(pairs).text(new), new[:, 0] > 0)[0]) < 0.3
