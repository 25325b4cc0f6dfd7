"""Questions of a page: a text, a picture, both, or an item of the gallery; what is nearest, and what the model says:
whether it would answer, and what speaks against it, in nats that add up.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from prolip.data.faults import SampleFault
from prolip.data.images import decode_image
from prolip.embedder import Embedded, Embedder
from prolip.explorer.gallery import Captions, cut, number
from prolip.explorer.pictures import PIXELS, Gone, decoded
from prolip.gaussian import Gaussian, mixture
from prolip.measures import pairwise_mean_cosine
from prolip.measures.plane import place
from prolip.methods import find_score
from prolip.scores import Score, Side
from prolip.search import exact
from prolip.search.answers import COMPARED, NUMBERS, answers_of, confidences, doubts_of, meanings
from prolip.search.exact import Found, other_side
from prolip.search.risk import Threshold
from prolip.uncertainty.doubt import with_doubt
from prolip.uncertainty.novelty import ODDS, refusal

#: In words, what each end of a tower knows.
ENDS = {"first": "what it is made of", "mean": "what it shows or says"}
#: Answers at most, and those that stand side by side; pictures that are kept for further questions.
MOST, BESIDE, UPLOADS = 60, 8, 64
#: By how much a picture that asks may be longer than it is wide, or wider than long.
STRETCHED = 100
#: Of the nearest that scores without an index rank, where a gallery has more than NUMBERS numbers.
SHORTLIST = 5000
#: Scores that are compared, beside the one that the index ranks by.
COMPARED_SCORES = ("mean", "csd", "elk")


class Answer(NamedTuple):
    """The first of some candidates. code_length: nats, -log p(it is right); among: how many candidates; way: by what
    this is known, in a word that `WAYS` explains.
    """

    code_length: float
    among: int
    way: str


WAYS = {
    "units": "the first one's share of the model's confidence; what is as good shares it",
    "match": "the match probability by the model's trained scale and bias",
    "share": "the first one's share of the softmax by the model's trained scale",
}


def first_answer(
    asked: Gaussian, candidates: Iterable[Gaussian], own: Score, side: Side, doubts: Callable = lambda image: None
) -> Answer | None:
    """How sure the first of all candidates, batches (N, D), is of a question (1, D) of a side; None where nothing was
    trained that says so.

    Of a text the match probability, as a text is true of many images, whose shares of a softmax are small. Of a picture
    with units the softmax of the cosines (`Units.code_length`), in which captions that are as good share what one has:
    too low, not too high, where several are right. Where a score has none of this, the softmax by its trained scale.
    doubts: of unit means (1, D), of the picture that asks or else of the first one.
    """
    first, units, among, best, total = asked, own.units, 0, -math.inf, torch.tensor(-math.inf, dtype=torch.float64)
    way = "match" if own.match_probability(torch.zeros(1)) is not None else "share"
    if units is not None and (side == "image" or way == "share"):
        way = "units"
    for z in candidates:
        if way == "units":
            assert units is not None
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
    return Answer(nats, among, way)


def judge(answer: Answer | None, novelty: dict[str, float]) -> dict[str, Any]:
    """What speaks against answering, a part each, and the probability that is left: exp(-their sum).

    novelty: nats by end of the tower. `prolip.uncertainty.novelty.refusal` is the sum.
    """
    parts, strange = [], 0.0
    if answer is not None:
        sure = f"{math.exp(-answer.code_length):.0%}"
        parts.append(
            {
                "name": "The answer",
                "nats": number(answer.code_length),
                "text": f"{sure}: {WAYS[answer.way]}, among {answer.among:,}.",
            }
        )
    for end, nats in novelty.items():
        alone = float(refusal(torch.zeros(1), {end: torch.tensor([nats])}))
        strange += alone
        name = f"Unlike the training: {ENDS.get(end, end)}"
        parts.append({"name": name, "nats": number(alone), "text": rarity(nats)})
    against = strange + (0.0 if answer is None else answer.code_length)
    return {
        "parts": parts,
        "nats": number(against),
        "probability": None if answer is None else math.exp(-against),
        "familiar": math.exp(-strange) if novelty else None,
    }


def rarity(nats: float) -> str:
    """Novelty in words."""
    if nats < math.log(2):
        return "Nothing unusual: more than half of the training's own kind are further out."
    if nats < 20:
        share = f"1 in {float(f'{math.exp(nats):.2g}'):,.0f} of the training's own kind is"
    else:
        share = "None of the training's own kind would be"
    return f"{share} this far out; 1 input in {ODDS + 1} is taken to be foreign before it is seen."


@dataclass(frozen=True)
class Asked:
    """A question as a Gaussian (1, D). sides: what it was made of; novelty: nats by end; row: of the gallery's item."""

    z: Gaussian
    sides: frozenset[Side]
    label: str
    novelty: dict[str, float] = field(default_factory=dict)
    row: int | None = None

    @property
    def side(self) -> Side:
        """What it counts as where a score asks; a text with a picture as a text."""
        return "image" if self.sides == {"image"} else "text"


class Asker:
    """Answers to one question after another from the gallery of captions; without a model of its items alone.

    threshold: of `prolip.search.risk`, if any.
    """

    def __init__(self, captions: Captions, threshold: Threshold | None):
        self.gallery, self.embedder = captions.gallery, captions.embedder
        self.captions, self.threshold = captions, threshold
        self.reader = None if captions.embedder is None else captions.embedder.reader
        self._uploads: dict[str, Asked] = {}

    # --- questions ---------------------------------------------------------------------------------------------------
    def prepare(self, data: bytes) -> tuple[torch.Tensor, tuple[int, int]]:
        """The picture of a file as the model takes it, and its width and height. SampleFault where that cannot be."""

        def made() -> tuple[torch.Tensor, tuple[int, int]]:
            image = decode_image(data, PIXELS)
            return self._pixels(image), image.size

        return decoded(made)

    def upload(self, pixels: torch.Tensor) -> str:
        """Keep a picture's Gaussian to ask by; what it is called from now on. pixels: as `prepare` has them."""
        key = secrets.token_hex(8)
        self._uploads[key] = self._embed(pixels.unsqueeze(0), "image", "your picture")
        if len(self._uploads) > UPLOADS:
            del self._uploads[next(iter(self._uploads))]
        return key

    def read(self, values: Mapping[str, Any]) -> Asked:
        """A question of JSON values: `text`, `upload`, both, or `row`. ValueError; KeyError for what is not there."""
        text, upload, row = (values.get(name) for name in ("text", "upload", "row"))
        if row is not None:
            return self._item(row)
        if text is not None and (not isinstance(text, str) or len(text) > 2000):
            raise ValueError("a text is a string of at most 2,000 characters")
        parts = []
        if text:
            parts.append(self._embed(self._model().tokenizer([text]), "text", text))
        if upload is not None:
            if not isinstance(upload, str) or upload not in self._uploads:
                raise KeyError("this picture is not kept any more: drop it again")
            parts.append(self._uploads[upload])
        if not parts:
            raise ValueError("no question: type a text, drop a picture, or choose an item")
        if len(parts) == 1:
            return parts[0]
        z = mixture(Gaussian(*(torch.stack(x, 1) for x in zip(*(part.z for part in parts)))))  # as `answers.embed`
        label = " + ".join(part.label for part in parts)
        return Asked(z, frozenset[Side](["image", "text"]), label)

    def _model(self) -> Embedder:
        if self.embedder is None:
            raise ValueError("there is no model to embed texts and pictures: start with --model, or choose an item")
        return self.embedder

    def _embed(self, inputs: torch.Tensor, side: Side, label: str) -> Asked:
        z, novelty = self._model().embed(inputs, side)
        return Asked(z, frozenset[Side]([side]), label, {end: float(nats[0]) for end, nats in novelty.items()})

    def _pixels(self, image: Image.Image) -> torch.Tensor:
        """What the model takes. SampleFault for a strip: resized by its short side, it would have very many pixels."""
        if max(image.size) > STRETCHED * min(image.size):
            sides = " x ".join(map(str, image.size))
            raise SampleFault("oversized image", f"{sides} pixels, at most {STRETCHED} times as long as wide are taken")
        return self._model().preprocess(image)

    def _item(self, row: Any) -> Asked:
        item, novelty, side = self.gallery.item(row), {}, self.gallery.index.side
        if self.embedder is not None and side == "image" and self.embedder.novelty is not None:
            with suppress(Gone):  # its embedding is enough to ask by
                pixels = self.gallery.pictures.of(item, self._pixels)
                novelty = self._embed(pixels.unsqueeze(0), "image", item["key"]).novelty
        z = self.gallery.index.gaussians([row])
        return Asked(z, frozenset[Side]([side]), item["key"], novelty, row)

    # --- answers -----------------------------------------------------------------------------------------------------
    def search(self, asked: Asked, count: int = 24) -> dict[str, Any]:
        """The nearest items, the nearest captions of a picture, and what speaks against answering."""
        count, index = max(1, min(count, MOST)), self.gallery.index
        near = index.search(asked.z, MOST + 1)
        found = without(asked, near, count)
        pair = asked.sides == {other_side(index.side)}
        (answers,) = answers_of(index, found, [pair], asked.z, self.reader)
        doubts = partial(doubts_of, index, self.reader, own=asked.row is not None or asked.side == "text")
        listed = [
            item | {"score": number(answer.similarity), "probability": number(answer.probability), "fits": answer.fits}
            for item, answer in zip(self.gallery.describe(found.rows[0].tolist()), answers)
        ]
        captions = self.captions if asked.sides == {"image"} and self.captions.found().texts else None
        return {
            "question": self._question(asked),
            "answers": listed,
            "said": [] if captions is None else captions.nearest(asked.z, 5, doubts(asked.z.mean)),
            "verdict": self._verdict(asked, pair, captions, doubts),
            "by": index.score.in_words,
            "place": self._place(asked),
            "risk": self._risk(asked, near) if pair else None,
        }

    def _question(self, asked: Asked) -> dict[str, Any]:
        trace = float(self.gallery.own.uncertainty(asked.z)[0])
        out = {
            "label": cut(asked.label),
            "sides": sorted(asked.sides),
            "row": asked.row,
            **self.gallery.meaning_of(trace, asked.side),
        }
        (means,) = meanings(asked.z, asked.side, self.gallery.units, self.reader)
        if asked.sides == {"text"}:
            out["fits"] = means.fits
        elif self.reader is not None and asked.sides == {"image"}:
            out["ambiguity"] = number(means.ambiguity)
            doubt = getattr(self.gallery.own, "doubt", None)
            out["beyond"] = doubt is not None and bool(doubt.extrapolates(self.reader.evidence(asked.z.mean))[0])
        if asked.sides == {self.gallery.index.side}:
            out["rank"] = number(self.gallery.rank(trace))
        elif asked.sides == {"text"} and self.captions.found.done and self.captions.found().texts:  # it does not wait
            out["rank"] = number(self.captions.rank(trace))
        return out

    def _place(self, asked: Asked) -> list[float | None] | None:
        """Where a question is on the map; None where one item makes none."""
        if len(self.gallery.index) < 2:
            return None
        return [number(x) for x in place(self.gallery.mapped().plane, asked.z)[0].tolist()]

    def _verdict(self, asked: Asked, pair: bool, captions: Captions | None, doubts: Callable) -> dict[str, Any]:
        """Of a pair with the gallery its first item is judged, of a picture among pictures the first caption."""
        answer, among = None, "items"
        if pair:
            answer = first_answer(asked.z, self._candidates(asked), self.gallery.own, asked.side, doubts)
        elif captions is not None:
            answer = first_answer(asked.z, [captions.found().z], self.gallery.own, "image", doubts)
            among = "captions"
        return {**judge(answer, asked.novelty), "among": among}

    def _candidates(self, asked: Asked) -> Iterator[Gaussian]:
        """All items in batches, or the nearest where scoring all would take long."""
        index = self.gallery.index
        fast = self.gallery.units is not None or self.gallery.own.factors(asked.z) is not None
        if not fast and len(index) * asked.z.mean.shape[1] > NUMBERS:
            rows = index.search(asked.z, SHORTLIST).rows[0]
            yield index.gaussians(rows[rows >= 0].tolist())
            return
        for block in index.store.gallery.blocks():
            yield index.store.gallery.gaussian(block)

    def _risk(self, asked: Asked, near: Found) -> dict[str, Any] | None:
        """Whether the calibrated threshold answers a question of its kind, where there is one; near: as calibrated."""
        if self.threshold is None:
            return None
        novelty = {end: torch.tensor([nats]) for end, nats in asked.novelty.items()}
        sure = confidences(self.gallery.index, Embedded(asked.z, novelty), near.first(COMPARED), [True], self.reader)
        return {
            "answers": bool(self.threshold.answers(sure)[0]),
            "by": self.threshold.by,
            "confidence": number(float(sure[self.threshold.by][0])),
            "least": number(self.threshold.least),
            "promise": str(self.threshold),
        }

    # --- side by side ------------------------------------------------------------------------------------------------
    def compare(self, asked: Asked) -> dict[str, Any]:
        """The first items by the index's score, by the cosine of the means, csd and elk, and where each moved to.

        Beyond NUMBERS numbers only the SHORTLIST nearest by the index are ranked by the others, which `among` says.
        """
        index, count = self.gallery.index, BESIDE + 1
        whole = len(index) * asked.z.mean.shape[1] <= NUMBERS
        near = None if whole else index.search(asked.z, SHORTLIST)
        role, columns = other_side(index.side), []
        order: dict[int, int] = {}
        for name, score in self._scores().items():
            if score is index.score:
                found = index.search(asked.z, count)
            elif near is None:
                found = exact.score_all(score, asked.z, index.store.gallery, count, role)
            else:
                again = exact.rescored(score, asked.z, near.rows, lambda rows: index.gaussians(rows.tolist()), role)
                found = exact.top(Found(near.rows, again), count)
            found = without(asked, found, BESIDE)
            rows = found.rows[0].tolist()
            order = order or {row: rank for rank, row in enumerate(rows)}
            listed = [
                item | {"score": number(value), "before": order.get(item["row"])}
                for item, value in zip(self.gallery.describe(rows), found.scores[0].tolist())
            ]
            columns.append({"score": name, "own": score is index.score, "answers": listed})
        return {"columns": columns, "among": len(index) if whole else SHORTLIST, "whole": whole}

    def _scores(self) -> dict[str, Score]:
        """The index's own first, then the others that these Gaussians have."""
        found = {self.gallery.index.score.name: self.gallery.index.score}
        names = COMPARED_SCORES if self.gallery.probabilistic else COMPARED_SCORES[:1]
        return found | {name: find_score(name)() for name in names if name not in found}


def without(asked: Asked, found: Found, count: int) -> Found:
    """The answers of one question but for the item that asks, at most so many."""
    kept = (found.rows[0] >= 0) & (found.rows[0] != (-1 if asked.row is None else asked.row))
    return Found(found.rows[:, kept][:, :count], found.scores[:, kept][:, :count])
