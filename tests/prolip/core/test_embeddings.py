"""Matched pairs: checked when they are made, kept in tensors, looked at from both sides."""

from __future__ import annotations

import math
from functools import partial

import ambiguous_pairs
import pytest
import torch

from prolip.embeddings import BLOCK, Pairs

points = partial(ambiguous_pairs.points, dim=4)


def some(**changes) -> Pairs:
    given = {"image": points(5), "text": points(3, seed=1), "scale": 10.0}
    given |= {"image_of": torch.tensor([0, 1, 4]), "text_of": torch.tensor([2, 2, 0])}
    return Pairs(**given | changes)


def test_tensors_bring_back_the_same_pairs():
    pairs = some(
        model="0123" * 8,
        image_hidden=torch.randn(5, 7),
        image_first=torch.randn(5, 4),
        empty=points(1)[0],
        text_first=torch.randn(2, 6),
        text_first_of=torch.tensor([0, 2]),
    )
    back = Pairs.from_tensors(pairs.tensors())
    for name in Pairs.__dataclass_fields__:
        one, other = getattr(back, name), getattr(pairs, name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, name
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
        image_of=torch.tensor([0, 0, 1, 1, 1, 4]),
        text_of=torch.tensor([1, 2, 2, 0, 1, 0]),
        weight=torch.tensor([0.2, 0.8, 0.3, 0.4, 0.4, 0.1]),
    )
    assert pairs.likeliest_text.tolist() == [2, 0, -1, -1, 0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": points(5) * 2}, "expected unit means"),
        ({"image": points(5, dim=6)}, "of 6 and 4 dimensions"),
        ({"image_of": torch.tensor([0, 1])}, "2 rows of images and 3 rows of texts"),
        ({"image_of": torch.tensor([0, 1, 5])}, "image_of is .*, expected .F,. int64 from 0 to below 5"),
        ({"text_of": torch.tensor([0.0, 1, 2])}, "expected .F,. int64 from 0 to below"),
        ({"image_of": torch.empty(0, dtype=torch.int64)}, "no pair"),
        ({"scale": -1.0}, "scale=-1.0 is not a valid factor"),
        ({"text_hidden": torch.zeros(2, 7)}, "expected 3 float rows, one per text"),
        ({"image_first": torch.zeros(5)}, "image_first is .*expected 5 float rows, one per image"),
        ({"text": points(3)[0]}, "expected unit means"),
        ({"text_first": torch.zeros(2, 4)}, "text_first is .*expected 3 float rows, one per text"),
        ({"text_first": torch.zeros(2, 4), "text_first_of": torch.tensor([1])}, "expected 1 float rows, one per text"),
        ({"text_first": torch.zeros(1, 4), "text_first_of": torch.tensor([3])}, r"int64 from 0 to below 3"),
        (
            {"image_first": torch.zeros(1, 4), "image_first_of": torch.tensor([-1])},
            r"expected \(F,\) int64 from 0 to below 5",
        ),
        ({"image_first_of": torch.tensor([1])}, "image_first_of is .*without its part"),
        ({"scale": 1e30}, r"scale=1e\+30 is not a valid factor"),
        ({"scale": float("nan")}, "scale=nan is not a valid factor"),
        ({"weight": torch.tensor([1.0, torch.inf, 1.0])}, "expected .* numbers from 1e-09 to 1e\\+09"),
        ({"weight": torch.tensor([1.0, torch.nan, 1.0])}, "numbers from"),
        ({"weight": torch.tensor([1e38, 1e38, 1.0])}, "numbers from"),
        ({"weight": torch.tensor([0.0, 1.0, 1.0])}, "numbers from"),
        ({"weight": torch.ones(2)}, "expected 3 numbers from"),
        ({"text_ids": torch.zeros(3, 4)}, r"text_ids is torch.float32 \(3, 4\), expected \(3, L\) int64"),
        ({"text_ids": torch.zeros(3, 0, dtype=torch.int64)}, r"expected \(3, L\) int64"),
        ({"text_first": torch.zeros(3, 4, dtype=torch.int64)}, "expected 3 float rows, one per text"),
        ({"empty": torch.full((4,), torch.nan)}, "empty has NaN"),
    ],
)
def test_what_is_no_pairs_says_what_to_give(changes, words):
    with pytest.raises(ValueError, match=words):
        some(**changes)


@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["image", "text", "image_hidden", "text_first"])
def test_rows_that_are_not_finite_are_named_by_their_keys_wherever_they_are(part, lost):
    rows = 2 * BLOCK + 3
    given = {"image": points(rows), "text": points(rows, seed=1)}
    given |= {name: torch.zeros(rows, 3) for name in ("image_hidden", "text_first")}
    places = [1, BLOCK, *range(BLOCK + 4, BLOCK + 7), rows - 1]
    given[part][places, 2] = lost
    keys = {f"{side}_keys": [f"{side} {row}" for row in range(rows)] for side in ("image", "text")}
    named = ", ".join(f"'{part.partition('_')[0]} {row}'" for row in places[:5])
    with pytest.raises(ValueError, match=f"{part} has NaN .* in 6 of {rows} rows .{named} and 1 more"):
        Pairs.in_rows(given.pop("image"), given.pop("text"), 10.0, **given, **keys)


def test_few_pairs_images_or_texts_call_for_caution():
    assert Pairs.in_rows(points(300), points(300), 10.0).cautions == []
    assert "299 pairs of 299 images" in Pairs.in_rows(points(299), points(299), 10.0).cautions[0]
    rows = torch.arange(300)
    one = Pairs(image=points(300), text=points(2), image_of=rows, scale=10.0, text_of=0 * rows)
    assert one.cautions == [
        "300 pairs of 300 images and 1 texts are few: variances and probabilities are rough. "
        "Give at least 300 pairs, with at least 30 different images and 30 different texts"
    ]


def test_openclips_initial_logit_scale_is_named():
    scale = torch.tensor(math.log(1 / 0.07)).exp().item()  # float32, as in a model
    said = "the logit scale is OpenCLIP's initial value: are these weights trained?"
    assert Pairs.in_rows(points(300), points(300), scale).cautions == [said]
    assert Pairs.in_rows(points(300), points(300), 1.0001 * scale).cautions == []
