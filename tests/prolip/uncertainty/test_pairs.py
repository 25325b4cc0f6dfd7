"""Matched pairs: checked when they are made, kept in tensors, looked at from both sides."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from prolip.uncertainty.pairs import Pairs


def points(rows: int, dim: int = 4, seed: int = 0) -> torch.Tensor:
    return F.normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


def some(**changes) -> Pairs:
    given = {"image": points(5), "text": points(3, seed=1), "scale": 10.0}
    given |= {"image_of": torch.tensor([0, 1, 4]), "text_of": torch.tensor([2, 2, 0])}
    return Pairs(**given | changes)


def test_tensors_bring_back_the_same_pairs():
    pairs = some(image_hidden=torch.randn(5, 7), image_first=torch.randn(5, 4), empty=points(1)[0],
                 text_first=torch.randn(2, 6), text_first_of=torch.tensor([0, 2]))  # fmt: skip
    back = Pairs.from_tensors(pairs.tensors())
    for name in Pairs.__dataclass_fields__:
        torch.testing.assert_close(getattr(back, name), getattr(pairs, name), rtol=0, atol=0)
    with pytest.raises(ValueError, match="got image, text"):
        Pairs.from_tensors({"image": points(2), "text": points(2)})


def test_swapped_exchanges_the_sides_and_rows_make_pairs():
    first = {"text_first": torch.randn(2, 6), "text_first_of": torch.tensor([0, 2])}
    pairs = some(text_hidden=torch.randn(3, 7), **first)
    other = pairs.swapped
    assert other.image_first is pairs.text_first and other.image_first_of is pairs.text_first_of
    assert other.text_first is None and other.swapped.text_first_of is pairs.text_first_of
    assert other.image is pairs.text and other.text_of is pairs.image_of and other.image_hidden is pairs.text_hidden
    assert len(Pairs.in_rows(points(5), points(5, seed=1), 3.0)) == 5


def test_the_likeliest_text_is_the_first_of_the_heaviest():
    pairs = some(
        image_of=torch.tensor([0, 0, 1, 1, 1, 4]), text_of=torch.tensor([1, 2, 2, 0, 1, 0]),
        weight=torch.tensor([0.2, 0.8, 0.3, 0.4, 0.4, 0.1]),
    )  # fmt: skip
    assert pairs.likeliest_text.tolist() == [2, 0, -1, -1, 0]


@pytest.mark.parametrize(("changes", "words"), [
    ({"image": points(5) * 2}, "want unit means"),
    ({"image": points(5, 6)}, "6 dimensions and texts 4"),
    ({"image_of": torch.tensor([0, 1])}, "2 rows of images and 3 rows of texts"),
    ({"image_of": torch.tensor([0, 1, 5])}, "rows from 0 to 5 and there are 5 images"),
    ({"text_of": torch.tensor([0.0, 1, 2])}, "want the rows of the pairs"),
    ({"image_of": torch.empty(0, dtype=torch.int64)}, "no pair"),
    ({"scale": -1.0}, "scale=-1.0 is no factor"),
    ({"text_hidden": torch.zeros(2, 7)}, "want a row for each of the 3 texts"),
    ({"image_first": torch.zeros(5)}, "image_first is .*want a row for each of the 5 images"),
    ({"text": points(3)[0]}, "want unit means"),
    ({"text_first": torch.zeros(2, 4)}, "text_first is .*want a row for each of the 3 texts"),
    ({"text_first": torch.zeros(2, 4), "text_first_of": torch.tensor([1])}, "want a row for each of 1 texts"),
    ({"text_first": torch.zeros(1, 4), "text_first_of": torch.tensor([3])}, r"want \(F,\) int64 below 3"),
    ({"image_first": torch.zeros(1, 4), "image_first_of": torch.tensor([-1])}, r"want \(F,\) int64 below 5"),
    ({"image_first_of": torch.tensor([1])}, "rows of the images that image_first is of"),
])  # fmt: skip
def test_what_is_no_pairs_says_what_to_give(changes, words):
    with pytest.raises(ValueError, match=words):
        some(**changes)


def test_what_is_no_tensor_is_named():
    with pytest.raises(TypeError, match="text is .*list"):
        some(text=[[1.0, 0, 0, 0]])
