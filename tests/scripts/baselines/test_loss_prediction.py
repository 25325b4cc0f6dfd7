"""Losses against the cross entropy over a bank, the ranking loss against a loop, order against the true order."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from ambiguous_pairs import points
from scipy.stats import spearmanr

from prolip.embeddings import Pairs
from studies.uncertainty.baselines import LossPrediction, loss_prediction
from studies.uncertainty.baselines.loss_prediction import contrastive_losses


def test_losses_are_those_of_the_matched_among_the_bank_mean_over_pairs(monkeypatch):
    image, text = points(6, 4, dtype=torch.float64), points(5, 4, seed=1, dtype=torch.float64)
    image_of, text_of = torch.tensor([0, 4, 4, 2]), torch.tensor([3, 3, 0, 1])
    bank = image[[1, 5]]
    monkeypatch.setattr(loss_prediction, "bank_of", lambda *_: bank)
    losses, rows = contrastive_losses(Pairs(image=image, text=text, image_of=image_of, text_of=text_of, scale=7.0))
    among = [7 * torch.cat([image[i, None], bank]) @ text[j] for i, j in zip(image_of, text_of)]
    wanted = [F.cross_entropy(logits, torch.tensor(0)) for logits in among]
    assert rows.tolist() == [0, 1, 3]
    torch.testing.assert_close(losses, torch.stack([wanted[2], wanted[3], (wanted[0] + wanted[1]) / 2]))


def test_the_order_of_losses_is_found_from_hidden_features_that_the_means_do_not_have(small):
    torch.manual_seed(0)
    noise = torch.rand(400)
    image = points(400, 16)
    text = F.normalize(image + noise.unsqueeze(1) * points(400, 16, seed=1), dim=1)
    hidden = torch.stack([noise.square(), torch.randn(400)], 1)
    pairs = Pairs.in_rows(image, text, 10.0, text_hidden=hidden)
    assert spearmanr(LossPrediction.fit(pairs).text(text, hidden), noise)[0] > 0.8
