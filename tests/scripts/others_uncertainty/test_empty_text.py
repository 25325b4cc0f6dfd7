"""Distance to the embedding of the empty text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ambiguous_pairs import few, points

from studies.uncertainty.baselines import EmptyText


def test_it_is_the_distance_to_the_empty_text_for_both_sides():
    pairs = few()
    fitted, angle = EmptyText.fit(pairs), torch.tensor([0.0, 1e-4, 1.0])
    across = torch.nn.functional.normalize(points(1, 6)[0] - points(1, 6)[0] @ pairs.empty * pairs.empty, dim=0)
    asked = angle.cos().unsqueeze(1) * pairs.empty + angle.sin().unsqueeze(1) * across
    for score in (fitted.image(asked), fitted.text(asked)):
        torch.testing.assert_close(score, -2 * (angle / 2).sin(), rtol=1e-2, atol=1e-6)


def test_pairs_without_the_empty_text_say_what_to_give():
    with pytest.raises(ValueError, match="no embedding of the empty text: give Pairs empty="):
        EmptyText.fit(replace(few(), empty=None))
    with pytest.raises(ValueError, match=r'empty is \(1, 6\), want the mean of "", \(6,\)'):
        EmptyText.fit(replace(few(), empty=points(1, 6)))
