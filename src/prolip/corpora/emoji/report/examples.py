"""Examples of retrieval and uncertainty, chosen by a rule that the page states."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from pydantic import TypeAdapter
from torch import Tensor

from prolip.data.faults import DamagedData, SampleFault
from prolip.evaluation.datasets.base import Dataset
from prolip.evaluation.datasets.webdataset import unique_keys
from prolip.evaluation.embed import Features
from prolip.evaluation.metrics.streaming import Relevance
from prolip.evaluation.tasks.base import own_labels
from prolip.evaluation.tasks.retrieval import relevance_of
from prolip.gaussian import Gaussian
from prolip.scores import Score
from prolip.utils.style import picture

#: Queries to choose examples from, and the most scores of all of them.
QUERIES, SCORES = 512, 2**24
#: Seconds to read the images of the examples, and pixels of their longer side on the page.
PATIENCE, PIXELS = 60.0, 96


class PageItem(NamedTuple):
    """A retrieved item with its score and "right" or "wrong", or an input with its uncertainty."""

    label: str
    number: float
    said: str  # "right" or "wrong"; of an input its uncertainty, or its expected matches if the model has units
    picture: str = ""


class QueryExample(NamedTuple):
    """A query, its first answers, the rank of the first right one, and the number of right ones."""

    label: str
    level: str
    answers: list[PageItem]
    rank: int
    picture: str = ""
    matches: int = 1


class Inputs(NamedTuple):
    """One side of an evaluation: Gaussians (N, D), the label of each input, and its image, "" for none."""

    z: Gaussian
    labels: Sequence[str]
    picture: Callable[[int], str] = lambda row: ""


class SetExamples(NamedTuple):
    """A test set on the page."""

    images: int
    texts: int
    found: list[tuple[str, list[QueryExample], list[QueryExample]]]  # kind of query, best, worst
    # kind of input, meaning of its number, least and most uncertain; none for points
    ends: list[tuple[str, str, list[PageItem], list[PageItem]]]


#: Examples that a run stores, by test set; pydantic 2.9 finds field names only where they are defined.
KEPT = TypeAdapter(dict[str, SetExamples])


def show(image: Inputs, text: Inputs, relevance: Relevance, ranked_by: Score, own: Score | None) -> SetExamples:
    """Choose examples of both directions and both ends of the uncertainty, which `own` computes; None for points."""
    shown = SetExamples(len(image.labels), len(text.labels), [], [])
    sides = (("image", image, text, relevance), ("text", text, image, relevance.transposed()))
    for kind, queries, gallery, relation in sides:
        most = min(QUERIES, max(1, SCORES // len(gallery.labels)), relation.queries)
        rows = torch.linspace(0, relation.queries - 1, most).long().tolist()
        z = queries.z.select(rows)
        scores = ranked_by.pairwise(z, gallery.z) if kind == "image" else ranked_by.pairwise(gallery.z, z).mT
        right = torch.zeros_like(scores, dtype=torch.bool)
        for i, row in enumerate(rows):
            right[i, relation.within(slice(row, row + 1))[1]] = True
        # ordered by the lead of the best right answer over the best wrong one, if both exist
        lead = scores.masked_fill(~right, -torch.inf).amax(1) - scores.masked_fill(right, -torch.inf).amax(1)
        both = lead.isfinite().nonzero().flatten()
        order = both[lead[both].argsort(descending=True, stable=True)].tolist()
        best, worst = (
            [example(scores[i], right[i], gallery, queries.labels[rows[i]], queries.picture(rows[i])) for i in some]
            for some in (order[: min(4, (len(order) + 1) // 2)], order[::-1][: min(4, len(order) // 2)])
        )
        shown.found.append((kind, best, worst))
        if own is None:
            continue
        counts, trace, units = "their uncertainty", own.uncertainty(queries.z), own.units
        said = [f"{x:#.4g}" for x in trace.tolist()]
        if units is not None:
            others = "texts" if kind == "image" else "images"
            counts = f"expected matches among the {others}"
            said = [amount(x) for x in units.matches(queries.z.trace, len(gallery.labels), of=others).tolist()]
        shown.ends.append((kind, counts, *both_ends(queries, trace, said)))
    return shown


def example(
    scores: Tensor, right: Tensor, gallery: Inputs, label: str, picture: str = "", level: str = "", top: int = 5
) -> QueryExample:
    """Return a query with its best answers of scores (G,)."""
    order = scores.argsort(descending=True, stable=True)
    answers = [
        PageItem(gallery.labels[i], float(scores[i]), "right" if right[i] else "wrong", gallery.picture(i))
        for i in order[:top].tolist()
    ]
    return QueryExample(label, level, answers, int(right[order].int().argmax()) + 1, picture, int(right.sum()))


def both_ends(of: Inputs, values: Tensor, said: Sequence[str]) -> tuple[list[PageItem], list[PageItem]]:
    """Return the inputs with the six least values (N,), and with the six largest, none in both."""
    order, count = values.argsort(stable=True).tolist(), min(6, len(values) // 2)
    items = {
        i: PageItem(of.labels[i], float(values[i]), said[i], of.picture(i)) for i in order[:count] + order[-count:]
    }
    return [items[i] for i in order[:count]], [items[i] for i in order[::-1][:count]]


def show_features(features: Features) -> SetExamples | None:
    """Return examples of an evaluated test set, whose images are read again; None for instances of WinoGAViL."""
    dataset, text, keys, card = features.dataset, features.text, features.keys, features.model
    if text is None or dataset.kind == "association":
        return None
    texts = features.captions or dataset.classnames
    if dataset.kind == "retrieval":
        own, complete = relevance_of(features)
        relevance = own if complete is None else complete
    else:
        labels = own_labels(features)
        image_of, text_of = labels.nonzero(as_tuple=True) if labels.ndim == 2 else (torch.arange(len(labels)), labels)
        relevance = Relevance.from_pairs(image_of, text_of, len(labels), len(texts))
    first = dict(zip(reversed(relevance.query.tolist()), reversed(relevance.item.tolist())))
    named = [texts[first[i]] if i in first else key for i, key in enumerate(keys)]
    score = card.scored_by()

    def shown(picture: Callable[[int], str]) -> SetExamples:
        inputs = Inputs(features.image, named, picture), Inputs(text, texts)
        return show(*inputs, relevance, score, score if card.probabilistic else None)

    asked: dict[int, str] = {}
    shown(lambda row: asked.setdefault(row, ""))  # a first pass to find the images to show
    found = pictures_of(dataset, {keys[row] for row in asked})
    return shown(lambda row: found.get(keys[row], ""))


def pictures_of(dataset: Dataset, keys: Collection[str]) -> dict[str, str]:
    """Return small versions of images by key, without those that are unreadable or late by PATIENCE seconds."""
    found: dict[str, str] = {}
    deadline = time.monotonic() + PATIENCE
    with contextlib.suppress(DamagedData, OSError):
        for sample in unique_keys(dataset.samples()):
            if len(found) == len(keys) or time.monotonic() > deadline:
                break
            if sample.key in keys:
                with contextlib.suppress(SampleFault):
                    small = sample.open()
                    small.thumbnail((PIXELS, PIXELS))
                    found[sample.key] = picture(small, quality=80)
    return found


def amount(number: float) -> str:
    """Format an expected number of items: 0.82, 3.4, 28."""
    return f"{number:,.0f}" if number >= 9.95 else f"{number:.1f}" if number >= 0.995 else f"{number:.2f}"
