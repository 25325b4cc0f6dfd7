"""Strong changes: each is one, in range, the same for equal seeds, and what its name says."""

from __future__ import annotations

import pytest
import torch

from prolip.data.augment.shifts import CHANGES, background, changed


@pytest.fixture(scope="module")
def picture() -> torch.Tensor:
    """A red disc with a dark bar on white, (3, 40, 48)."""
    y, x = torch.meshgrid(torch.arange(40.0), torch.arange(48.0), indexing="ij")
    inside = (y - 20) ** 2 + (x - 24) ** 2 < 15**2
    out = torch.where(inside, torch.tensor([0.9, 0.2, 0.1]).view(3, 1, 1), torch.ones(3, 1, 1))
    out[:, 18:22, 14:34] = 0.1
    return out


def test_every_change_is_one_and_equal_seeds_give_equal_bits(picture):
    found = changed(picture, 3)
    assert found.shape == (len(CHANGES), 3, 40, 48) and found.min() >= 0 and found.max() <= 1
    assert torch.equal(found, changed(picture, 3)) and not torch.equal(found, changed(picture, 4))
    assert all((x - picture).abs().mean() > 0.01 for x in found)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    changed(picture, 3)
    assert torch.equal(before, torch.get_rng_state())


def test_changes_are_what_they_are_called(picture):
    found = dict(zip(CHANGES, changed(picture, 5)))
    assert background(picture).flatten().tolist() == [1.0, 1.0, 1.0]  # the colour of most of the edge
    assert torch.equal(found["grey"][0], found["grey"][1])
    assert set(found["posterise"].unique().tolist()) <= {0.0, 0.5, 1.0}
    assert found["pixelate"].flatten(1).unique(dim=1).shape[1] <= 17**2
    hue = found["hue"][:, 10, 24]
    assert hue.argmax() != 0 and hue.amax() == pytest.approx(0.9, abs=0.01)
    assert found["edges"].mean() > 0.8 and found["edges"][:, 18, 24].mean() < 0.7
    cut = found["cut"]
    assert sum(half.min() == 1 for half in (cut[:, :20], cut[:, 20:], cut[..., :24], cut[..., 24:])) == 1
    names = ("stretch", "rotate", "bend", "crumple")
    ink = {name: float((found[name].mean(0) < 0.9).double().mean()) for name in names}
    whole = float((picture.mean(0) < 0.9).double().mean())
    assert 0.35 * whole < ink["stretch"] < 0.7 * whole and ink["rotate"] == pytest.approx(whole, rel=0.2)
    assert all(0.3 * whole < ink[name] < 2 * whole for name in ("bend", "crumple"))


@pytest.mark.parametrize("side", [2, 7, 224])
def test_a_picture_of_any_size_and_of_one_colour_has_them(side):
    found = changed(torch.full((3, side, side), 0.5), 1)
    assert found.isfinite().all() and found.shape[-2:] == (side, side)
