"""Queries of the page: a text, an image, both, or an item; the nearest items, and a verdict on the first."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from prolip.data.faults import SampleFault
from prolip.data.images import decode_image
from prolip.embedder import Embedded, Embedder
from prolip.explorer.gallery import Captions, cut, number
from prolip.explorer.thumbnails import PIXELS, Gone, decoded
from prolip.gaussian import Gaussian, mixture
from prolip.measures import pairwise_mean_cosine
from prolip.measures.plane import place
from prolip.methods import find_score
from prolip.scores import Score, Side
from prolip.search import exact
from prolip.search.exact import TopK, other_side
from prolip.search.query import COMPARED, NUMBERS, answers_of, confidences, doubts_of, meanings
from prolip.search.risk_control import Threshold
from prolip.uncertainty.doubt import with_doubt
from prolip.uncertainty.novelty import ODDS, refusal

MOST, BESIDE, UPLOADS = 60, 8, 64  # most answers, and answers side by side; images stored for further queries
STRETCHED = 100  # largest ratio of an image's sides
SHORTLIST = 5000  # nearest items ranked by scores without an index, in a gallery of more than NUMBERS numbers
COMPARED_SCORES = ("mean", "csd", "elk")  # scores to compare with the index's score
ENDS = {"first": "low-level features", "mean": "content"}  # description of each end of a tower
WAYS = {
    "units": "the model's confidence in the first answer; equally good answers share it",
    "match": "the match probability by the model's trained scale and bias",
    "share": "the softmax probability of the first answer by the model's trained scale",
}


class PageQuery(NamedTuple):
    """A query as a Gaussian (1, D). sides: of its inputs; novelty: nats by end; row: of an item of the gallery."""

    z: Gaussian
    sides: frozenset[Side]
    label: str
    novelty: Mapping[str, float] = MappingProxyType({})
    row: int | None = None

    @property
    def side(self) -> Side:
        """The side of the query for a score; a text with an image counts as a text."""
        return "image" if self.sides == {"image"} else "text"


class Asker:
    """Search of a gallery; without a model only by its items. threshold: a calibrated refusal, if any."""

    def __init__(self, captions: Captions, threshold: Threshold | None):
        self.gallery, self.embedder = captions.gallery, captions.embedder
        self.captions, self.threshold = captions, threshold
        self.reader = None if captions.embedder is None else captions.embedder.reader
        self._uploads: dict[str, PageQuery] = {}

    def prepare(self, data: bytes) -> tuple[Tensor, tuple[int, int]]:
        """Return the model's pixels of an image file, and its width and height. SampleFault if it is unreadable."""
        return decoded(lambda: (self._pixels(image := decode_image(data, PIXELS)), image.size))

    def upload(self, pixels: Tensor) -> str:
        """Store the Gaussian of an image for queries; return its key. pixels: from `prepare`."""
        key = secrets.token_hex(8)
        self._uploads[key] = self._embed(pixels.unsqueeze(0), "image", "your image")
        if len(self._uploads) > UPLOADS:
            del self._uploads[next(iter(self._uploads))]
        return key

    def read(self, values: Mapping[str, Any]) -> PageQuery:
        """Read a query from JSON values: `text`, `upload`, both, or `row`. ValueError; KeyError for a missing one."""
        text, upload, row = (values.get(name) for name in ("text", "upload", "row"))
        if row is not None:
            return self._item(row)
        if text is not None and (not isinstance(text, str) or len(text) > 2000):
            raise ValueError("a text must be a string of at most 2,000 characters")
        parts = []
        if text:
            parts.append(self._embed(self._model().tokenizer([text]), "text", text))
        if upload is not None:
            if not isinstance(upload, str) or upload not in self._uploads:
                raise KeyError("this image is no longer stored. Drop it again")
            parts.append(self._uploads[upload])
        if not parts:
            raise ValueError("no query: type a text, drop an image, or choose an item")
        if len(parts) == 1:
            return parts[0]
        z = mixture(Gaussian(*(torch.stack(x, 1) for x in zip(*(part.z for part in parts)))))  # as search.query.embed
        return PageQuery(z, frozenset[Side](["image", "text"]), " + ".join(part.label for part in parts))

    def _model(self) -> Embedder:
        if self.embedder is None:
            raise ValueError("texts and images need a model. Start with --model, or choose an item")
        return self.embedder

    def _embed(self, inputs: Tensor, side: Side, label: str) -> PageQuery:
        z, novelty = self._model().encode(inputs, side)
        return PageQuery(z, frozenset[Side]([side]), label, {end: float(nats[0]) for end, nats in novelty.items()})

    def _pixels(self, image: Image.Image) -> Tensor:
        """Return the model's input. SampleFault for a strip, as resizing its short side would make it huge."""
        if max(image.size) > STRETCHED * min(image.size):
            sides = " x ".join(map(str, image.size))
            raise SampleFault("oversized image", f"{sides} pixels; the limit is {STRETCHED} times as long as wide")
        return self._model().preprocess(image)

    def _item(self, row: Any) -> PageQuery:
        item, side = self.gallery.item(row), self.gallery.index.side
        novelty: Mapping[str, float] = {}
        if self.embedder is not None and side == "image" and self.embedder.novelty is not None:
            with suppress(Gone):  # its embedding suffices
                pixels = self.gallery.pictures.of(item, self._pixels)
                novelty = self._embed(pixels.unsqueeze(0), "image", item["key"]).novelty
        return PageQuery(self.gallery.index.gaussians([row]), frozenset[Side]([side]), item["key"], novelty, row)

    def search(self, asked: PageQuery, count: int = 24) -> dict[str, Any]:
        """Return the nearest items, the nearest captions of an image, and the reasons against an answer."""
        count, index, own = max(1, min(count, MOST)), self.gallery.index, self.gallery.own
        near = index.search(asked.z, MOST + 1)
        found = without(asked, near, count)
        pair = asked.sides == {other_side(index.side)}
        informed = self.gallery.units is not None
        (answers,) = answers_of(index, found, [pair], asked.z, self.reader, informed=informed)
        doubts = partial(doubts_of, index, self.reader, own=asked.row is not None or asked.side == "text")
        listed = self.gallery.describe(found.rows[0].tolist())
        for item, answer in zip(listed, answers):
            item |= {"score": number(answer.similarity), "probability": number(answer.probability), "fits": answer.fits}
        captions = self.captions if asked.sides == {"image"} and self.captions.found()[0] else None
        first = None  # the first item of a pair with the gallery, or the first caption of an image among images
        if pair:
            first = first_answer(asked.z, self._candidates(asked), own, asked.side, doubts)
        elif captions is not None:
            first = first_answer(asked.z, [captions.found()[1]], own, "image", doubts)
        map_place = None if len(index) < 2 else place(self.gallery.mapped()[1], asked.z)[0].tolist()
        return {
            "question": self._describe(asked),
            "answers": listed,
            "said": [] if captions is None else captions.nearest(asked.z, 5, doubts(asked.z.mean)),
            "verdict": {**judge(first, asked.novelty), "among": "items" if pair or captions is None else "captions"},
            "by": index.score.in_words,
            "place": map_place and [number(x) for x in map_place],
            "risk": self._risk(asked, near) if pair else None,
        }

    def _describe(self, asked: PageQuery) -> dict[str, Any]:
        trace = float(self.gallery.own.uncertainty(asked.z)[0])
        out: dict[str, Any] = {"label": cut(asked.label), "sides": sorted(asked.sides), "row": asked.row}
        out |= self.gallery.meaning_of(trace, asked.side)
        (means,) = meanings(asked.z, asked.side, self.gallery.units, self.reader)
        if asked.sides == {"text"}:
            out["fits"] = means.fits
        elif self.reader is not None and asked.sides == {"image"}:
            out["ambiguity"] = number(means.ambiguity)
            doubt = getattr(self.gallery.own, "doubt", None)
            out["beyond"] = doubt is not None and bool(doubt.extrapolates(self.reader.evidence(asked.z.mean))[0])
        if asked.sides == {self.gallery.index.side}:  # the share of less uncertain items, or texts
            traces = torch.from_numpy(self.gallery.uncertainty())
            out["rank"] = number(float((traces[~traces.isnan()] < trace).double().mean()))
        elif asked.sides == {"text"} and self.captions.found.done and self.captions.found()[0]:  # it does not wait
            traces = self.gallery.own.uncertainty(self.captions.found()[1])
            out["rank"] = number(float((traces < trace).double().mean()))
        return out

    def _candidates(self, asked: PageQuery) -> Iterator[Gaussian]:
        """Yield all items in batches, or the nearest items if scoring all is slow."""
        index = self.gallery.index
        fast = self.gallery.units is not None or self.gallery.own.factors(asked.z) is not None
        if not fast and len(index) * asked.z.mean.shape[1] > NUMBERS:
            rows = index.search(asked.z, SHORTLIST).rows[0]
            yield index.gaussians(rows[rows >= 0].tolist())
            return
        yield from map(index.store.gallery.gaussian, index.store.gallery.blocks())

    def _risk(self, asked: PageQuery, near: TopK) -> dict[str, Any] | None:
        """Return whether the calibrated threshold, if any, answers a query of its kind; near: as during calibration."""
        if self.threshold is None:
            return None
        novelty = {end: torch.tensor([nats]) for end, nats in asked.novelty.items()}
        sure = confidences(self.gallery.index, Embedded(asked.z, novelty), near.first(COMPARED), [True], self.reader)
        return {
            "answers": bool(self.threshold.answers(sure)[0]),
            "compared": self.threshold.compared(float(sure[self.threshold.by][0])),
            "promise": str(self.threshold),
        }

    def compare(self, asked: PageQuery) -> dict[str, Any]:
        """Return the first items by several scores and their changes of rank; of a large gallery only nearest items."""
        index, count = self.gallery.index, BESIDE + 1
        whole = len(index) * asked.z.mean.shape[1] <= NUMBERS
        near = None if whole else index.search(asked.z, SHORTLIST)
        role, columns = other_side(index.side), []
        order: dict[int, int] = {}
        names = COMPARED_SCORES if self.gallery.probabilistic else COMPARED_SCORES[:1]
        others = {name: find_score(name)() for name in names if name != index.score.name}
        for name, score in {index.score.name: index.score, **others}.items():
            if score is index.score:
                found = index.search(asked.z, count)
            elif near is None:
                found = exact.score_all(score, asked.z, index.store.gallery, count, role)
            else:
                scores = exact.rescored(score, asked.z, near.rows, index.store.gallery.gaussian, role)
                found = exact.top(TopK(near.rows, scores), count)
            found = without(asked, found, BESIDE)
            rows = found.rows[0].tolist()
            order = order or {row: rank for rank, row in enumerate(rows)}
            listed = self.gallery.describe(rows)
            for item, value in zip(listed, found.scores[0].tolist()):
                item |= {"score": number(value), "before": order.get(item["row"])}
            columns.append({"score": name, "own": score is index.score, "answers": listed})
        return {"columns": columns, "among": len(index) if whole else SHORTLIST, "whole": whole}


def without(asked: PageQuery, found: TopK, count: int) -> TopK:
    """Return at most `count` answers to one query, without the querying item."""
    kept = (found.rows[0] >= 0) & (found.rows[0] != (-1 if asked.row is None else asked.row))
    return TopK(found.rows[:, kept][:, :count], found.scores[:, kept][:, :count])


class FirstAnswer(NamedTuple):
    """The best of `among` candidates. code_length: -log p(it is right), nats; way: its derivation, of WAYS."""

    code_length: float
    among: int
    way: str


def first_answer(
    asked: Gaussian, candidates: Iterable[Gaussian], own: Score, side: Side, doubts: Callable = lambda image: None
) -> FirstAnswer | None:
    """Return the confidence of the best of all candidates, batches (N, D), for a query (1, D), if one was trained. For
    a text it is the match probability, as a text matches many images; for an image of a model with units the softmax
    of the cosines (`Units.code_length`), which equally good captions share; else the softmax by the trained scale. The
    last argument: the uncertainty of unit means (1, D), the querying image's or else the best one's.
    """
    first, units, among, best, total = asked, own.units, 0, -math.inf, torch.tensor(-math.inf, dtype=torch.float64)
    way = "match" if own.match_probability(torch.zeros(1)) is not None else "share"
    if units is not None and (side == "image" or way == "share"):
        way = "units"
    for z in candidates:
        if way == "units" and units is not None:
            scores: Tensor | None = pairwise_mean_cosine(asked, z).flatten() * (2 / units.unit)
        else:
            own_scores = own.pairwise(*((asked, z) if side == "image" else (z, asked))).flatten()
            scores = own.match_probability(own_scores) if way == "match" else own.scaled(own_scores)
        if scores is None:
            return None
        if way == "match" and float(scores.max()) > best:
            first = z.select(scores.argmax().unsqueeze(0))
        among, best = among + len(scores), max(best, float(scores.max()))
        total = torch.logaddexp(total, scores.double().logsumexp(0))
    if not among:
        return None
    nats = -math.log(min(1.0, max(best, 1e-300))) if way == "match" else max(0.0, float(total) - best)
    doubt = doubts(first.mean) if side == "image" or way == "match" else None
    if units is not None and doubt is not None:
        other = units.share(asked.trace) if way == "match" else 1 / among
        nats = -float(with_doubt(torch.tensor(math.exp(-nats)), doubt, other).log())
    return FirstAnswer(nats, among, way)


def judge(answer: FirstAnswer | None, novelty: Mapping[str, float]) -> dict[str, Any]:
    """Return the reasons against an answer, and the remaining probability exp(-sum). novelty: nats by tower end."""
    parts, foreign = [], 0.0
    if answer is not None:
        text = f"{math.exp(-answer.code_length):.0%}: {WAYS[answer.way]}, among {answer.among:,}."
        parts.append({"name": "The answer", "nats": number(answer.code_length), "text": text})
    for end, nats in novelty.items():
        alone = float(refusal(torch.zeros(1), {end: torch.tensor([nats])}))
        foreign += alone
        name = f"Novelty: {ENDS.get(end, end)}"
        parts.append({"name": name, "nats": number(alone), "text": rarity(nats)})
    against = foreign + (0.0 if answer is None else answer.code_length)
    probability, familiar = None if answer is None else math.exp(-against), math.exp(-foreign) if novelty else None
    return {"parts": parts, "nats": number(against), "probability": probability, "familiar": familiar}


def rarity(nats: float) -> str:
    if nats < math.log(2):
        return "Not unusual: more than half of training-like inputs are farther away."
    share = "No training-like input would be"
    if nats < 20:
        share = f"1 in {float(f'{math.exp(nats):.2g}'):,.0f} training-like inputs is"
    return f"{share} this far away; before seeing an input, 1 in {ODDS + 1} is assumed foreign."
