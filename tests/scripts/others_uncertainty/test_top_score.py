"""The best cosine with the gallery, in tiles as at once."""

from __future__ import annotations

import torch
from ambiguous_pairs import points

from prolip.embeddings import Pairs
from studies.uncertainty.baselines import TopScore, top_score


def test_it_is_the_best_cosine_with_what_occurs_in_the_pairs_in_tiles_too(monkeypatch):
    image, text, asked = points(6, 4), points(3, 4, seed=1), points(5, 4, seed=2)
    some = {"image_of": torch.tensor([0, 4, 4]), "text_of": torch.tensor([2, 2, 0])}
    fitted = TopScore.fit(Pairs(image=image, text=text, scale=10.0, **some))
    torch.testing.assert_close(fitted.text(asked), -(asked @ image[[0, 4]].T).amax(1))
    monkeypatch.setattr(top_score, "TILE", 4)
    torch.testing.assert_close(fitted.image(asked), -(asked @ text[[0, 2]].T).amax(1))
