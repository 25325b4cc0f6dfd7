"""The cosine of the fifth nearest of the same side, in tiles as at once."""

from __future__ import annotations

import torch
from ambiguous_pairs import points

from prolip.embeddings import Pairs
from studies.uncertainty.baselines import NearestNeighbours, nearest_neighbours


def test_it_is_the_fifth_largest_cosine_with_what_occurs_in_the_pairs_in_tiles_too(monkeypatch):
    image, text, asked = points(9, 4), points(12, 4, seed=1), points(5, 4, seed=2)
    some = {"image_of": torch.tensor([0, 4, 4, 1, 8, 2, 3]), "text_of": torch.tensor([2, 2, 0, 2, 2, 0, 2])}
    fitted = NearestNeighbours.fit(Pairs(image=image, text=text, scale=10.0, **some))
    wanted = -(asked @ image[[0, 1, 2, 3, 4, 8]].T).sort(1, descending=True).values[:, 4]
    torch.testing.assert_close(fitted.image(asked), wanted)
    monkeypatch.setattr(nearest_neighbours, "TILE", 12)
    torch.testing.assert_close(fitted.image(asked), wanted)
    farthest = -(asked @ text[[0, 2]].T).amin(1)  # of two
    torch.testing.assert_close(fitted.text(asked), farthest)
