"""Traces and inclusion by level of Gaussians whose order is known."""

import numpy as np
import pytest
import torch
from test_entailment import gaussians

from prolip.gaussian import Gaussian
from prolip.hierarchy.levels import inclusion_of_levels, traces_by_level, write_levels
from prolip.measures import log_inclusion
from prolip.scores import CSDScore


def nested(rows=20, levels=4):
    """The same means with variances that fall from level to level."""
    z = gaussians(rows)
    return [Gaussian(z.mean, torch.full_like(z.mean, -2.0 - i)) for i in range(levels)]


def test_the_original_is_in_each_level_above_and_in_none_below():
    found = inclusion_of_levels(nested())
    assert [x.level for x in found] == [0, 1, 2] and all(x.rate == 1 for x in found)
    assert found[0].h.mean() > found[2].h.mean() > 0
    assert all(x.rate == 0 for x in inclusion_of_levels(nested()[::-1]))
    one, last = gaussians(8), gaussians(8, seed=3)
    (mixed,) = inclusion_of_levels([one, last])
    wanted = log_inclusion(last, one) - log_inclusion(one, last)
    assert np.allclose(mixed.h, wanted.numpy(), atol=1e-3) and mixed.rate == float((wanted > 0).float().mean())


def test_traces_by_level_are_correlated_with_it():
    down = traces_by_level([z.trace.numpy() for z in nested()])
    assert down.spearman == pytest.approx(-1) and down.in_order == 1
    up = traces_by_level([z.trace.numpy() for z in nested()[::-1]])
    assert up.spearman == pytest.approx(1) and up.in_order == 0
    assert np.isnan(traces_by_level([np.ones(3)] * 2).spearman)


def test_figures_are_written_as_pixels_and_as_vectors(tmp_path):
    for what, names in (("image", "traces differences inclusion"), ("text", "traces inclusion")):
        text = write_levels(CSDScore(), nested(), what, tmp_path)
        assert "20 chains" in text and text.count("H > 0 for 100.0%") == 3
        for name in names.split():
            assert (tmp_path / f"{what}_{name}.png").read_bytes()[:4] == b"\x89PNG"
            assert b"<svg" in (tmp_path / f"{what}_{name}.svg").read_bytes()
    z = gaussians(3)
    points = Gaussian(z.mean, torch.full_like(z.mean, -torch.inf))
    for levels, words in (([z], "1 levels"), ([points] * 2, "points")):
        with pytest.raises(ValueError, match=words):
            inclusion_of_levels(levels)
