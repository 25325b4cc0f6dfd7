"""The norm against the divergence that it expands."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from ambiguous_pairs import points

from prolip.embeddings import Pairs
from studies.uncertainty.baselines import InformationGain


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


def test_pairs_weigh_inputs_as_they_occur():
    pairs = drawn(torch.float64, 10.0)
    spelled = replace(pairs, image=pairs.image[pairs.image_of], image_of=torch.arange(40))
    asked = points(6, 5, seed=3, dtype=torch.float64)
    for side in ("image", "text"):
        found, wanted = (getattr(InformationGain.fit(p), side)(asked) for p in (pairs, spelled))
        torch.testing.assert_close(found, wanted)
    assert not torch.allclose(wanted, InformationGain.fit(replace(pairs, image_of=torch.arange(40) % 12)).text(asked))
