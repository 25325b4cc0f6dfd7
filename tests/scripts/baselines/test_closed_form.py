"""The uncertainties without training against their formulas: in tiles as at once, the gain against the divergence."""

from __future__ import annotations

import math

import pytest
import torch
from ambiguous_pairs import few, points

from prolip.embeddings import Pairs
from studies.uncertainty.baselines import EmptyText, InformationGain, NearestNeighbours, TopScore, closed_form


def test_it_is_the_best_cosine_with_what_occurs_in_the_pairs_in_tiles_too(monkeypatch):
    image, text, asked = points(6, 4), points(3, 4, seed=1), points(5, 4, seed=2)
    some = {"image_of": torch.tensor([0, 4, 4]), "text_of": torch.tensor([2, 2, 0])}
    fitted = TopScore.fit(Pairs(image=image, text=text, scale=10.0, **some))
    torch.testing.assert_close(fitted.text(asked), -(asked @ image[[0, 4]].T).amax(1))
    monkeypatch.setattr(closed_form, "TILE", 4)
    torch.testing.assert_close(fitted.image(asked), -(asked @ text[[0, 2]].T).amax(1))


def test_it_is_the_fifth_largest_cosine_with_what_occurs_in_the_pairs_in_tiles_too(monkeypatch):
    image, text, asked = points(9, 4), points(12, 4, seed=1), points(5, 4, seed=2)
    some = {"image_of": torch.tensor([0, 4, 4, 1, 8, 2, 3]), "text_of": torch.tensor([2, 2, 0, 2, 2, 0, 2])}
    fitted = NearestNeighbours.fit(Pairs(image=image, text=text, scale=10.0, **some))
    wanted = -(asked @ image[[0, 1, 2, 3, 4, 8]].T).sort(1, descending=True).values[:, 4]
    torch.testing.assert_close(fitted.image(asked), wanted)
    monkeypatch.setattr(closed_form, "TILE", 12)
    torch.testing.assert_close(fitted.image(asked), wanted)
    farthest = -(asked @ text[[0, 2]].T).amin(1)  # of two
    torch.testing.assert_close(fitted.text(asked), farthest)


def test_it_is_the_distance_to_the_empty_text_for_both_sides():
    pairs = few()
    fitted, angle = EmptyText.fit(pairs), torch.tensor([0.0, 1e-4, 1.0])
    across = torch.nn.functional.normalize(points(1, 6)[0] - points(1, 6)[0] @ pairs.empty * pairs.empty, dim=0)
    asked = angle.cos().unsqueeze(1) * pairs.empty + angle.sin().unsqueeze(1) * across
    for score in (fitted.image(asked), fitted.text(asked)):
        torch.testing.assert_close(score, -2 * (angle / 2).sin(), rtol=1e-2, atol=1e-6)


def divergence(mean: torch.Tensor, bank: torch.Tensor, scale: float) -> torch.Tensor:
    """KL of the bank tilted by exp(a m.m_k) from the bank itself."""
    logits = scale * mean @ bank.T
    log_share = logits.log_softmax(1)
    return (log_share.exp() * (log_share + math.log(len(bank)))).sum(1)


def drawn(dtype: torch.dtype, scale: float) -> Pairs:
    """Images that occur more and less often, against texts; own means centred, where the expansion is made."""
    text = points(20, 5, seed=1, dtype=dtype)
    some = {"image_of": torch.arange(40) % 7, "text_of": torch.arange(40)}
    return Pairs(image=points(12, 5, dtype=dtype), text=torch.cat([text, -text]), scale=scale, **some)


@pytest.mark.parametrize("scale", [1e-3, 1e-2])
def test_it_is_the_gain_for_small_scales(scale):
    pairs = drawn(torch.float64, scale)
    gain = -InformationGain.fit(pairs).text(pairs.text)
    torch.testing.assert_close(gain, divergence(pairs.text, pairs.image[pairs.image_of], scale), rtol=3 * scale, atol=0)
