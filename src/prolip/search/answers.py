"""Questions to an index, and answers that say how sure they are."""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from prolip.evaluation.model import Embedder
from prolip.gaussian import Gaussian, concatenate, mixture
from prolip.scores import Score
from prolip.search.exact import Found, other_side
from prolip.search.index import SearchIndex
from prolip.search.risk import Threshold, find_threshold
from prolip.search.sources import question_images
from prolip.search.store import Item
from prolip.uncertainty.units import Units, in_words
from prolip.utils.documents import loads

#: Answers that are looked at to tell how sure the first one is.
COMPARED = 20


class Question(NamedTuple):
    """A text, the path of a picture, or both."""

    text: str | None = None
    image: str | None = None

    def __str__(self) -> str:
        return " + ".join(part for part in (self.text, self.image) if part)


@dataclass(frozen=True)
class Answer:
    """One item that was found. probability: that it matches, None where the score has none or none of such a pair;
    bits, share: what its trace means, None where it has no unit: what it says about which of the other side is meant,
    and how much of the other side it fits.
    """

    item: Item
    similarity: float
    probability: float | None
    trace: float
    bits: float | None
    share: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**self.item, "similarity": self.similarity, "probability": self.probability, "trace": self.trace,
                "bits": self.bits, "share": self.share}  # fmt: skip

    def __str__(self) -> str:
        parts = [self.item["key"], f"similarity {self.similarity:.4f}"]
        if self.probability is not None:
            parts.append(f"match {self.probability:.1%}")
        parts.append(f"trace {self.trace:.4g}")
        if self.bits is not None and self.share is not None:
            parts.append(f"{self.bits:.1f} bits, fits {in_words(self.share)}")
        if captions := self.item.get("captions"):
            parts.append(repr(captions[0]))
        return "  ".join(parts)


def embed(questions: Sequence[Question], embedder: Embedder) -> Gaussian:
    """Questions as Gaussians, (Q, D).

    Of a text and a picture the mixture of both, N(the mean of the means brought to unit length, the mean of the
    variances), as a class is that of its prompts (ProLIP 4.2): what is near to both, as wide as either.
    """
    parts = []
    for text, image in questions:
        own = [embedder.embed_texts([text])] if text is not None else []
        own += [embedder.encode_image(question_images([image], embedder))] if image is not None else []
        if not own:
            raise ValueError("a question without a text and a picture: give --text or --image")
        both = concatenate(own)
        parts.append(both if len(own) == 1 else mixture(Gaussian(both.mean.unsqueeze(0), both.log_var.unsqueeze(0))))
    return concatenate(parts)


def are_pairs(questions: Sequence[Question], index: SearchIndex) -> list[bool]:
    """Whether each is of the other side than the gallery, so that its score was trained to be that of a pair."""
    return [(q.image is None) if index.side == "image" else (q.text is None) for q in questions]


def answers_of(index: SearchIndex, found: Found, pairs: Sequence[bool], by_score: bool = True) -> list[list[Answer]]:
    """What was found of each question. by_score: whether it was found by the score, of which a probability may be."""
    units, uncertainty = meaning(index)
    probability = index.score.match_probability(found.scores) if by_score else None
    out = []
    for i, rows in enumerate(found.rows.tolist()):
        rows = [row for row in rows if row >= 0]
        own: list[Answer] = []
        if rows:
            z, items = index.gaussians(rows), index.items(rows)
            trace, side = uncertainty.uncertainty(z), other_side(index.side)
            fits = None if units is None else units.share(z.trace, f"{side}s")
            bits = None if units is None else units.information(z.trace, f"{side}s", bits=True)
            for j, item in enumerate(items):
                given = None if probability is None or not pairs[i] else float(probability[i, j])
                says, share = (None if x is None else float(x[j]) for x in (bits, fits))
                own.append(Answer(item, float(found.scores[i, j]), given, float(trace[j]), says, share))
        out.append(own)
    return out


def meaning(index: SearchIndex) -> tuple[Units | None, Score]:
    """The units of the model's traces, and the score that reads uncertainty off them."""
    own = index.score if index.card is None else index.card.scored_by()
    return own.units, own


def confidences(index: SearchIndex, queries: Gaussian, found: Found) -> dict[str, np.ndarray]:
    """How sure the first answer of each question is, larger is surer, by name; an index that finds nothing is not.

    similarity: its score; lead: before the second; share: log of its softmax by the trained scale among what was found;
    certainty: minus the uncertainties of question and answer. found: COMPARED answers or so of each, always as many.
    """
    first = found.scores[:, 0]
    out = {"similarity": first}
    if found.scores.shape[1] > 1:
        lead = first - found.scores[:, 1]
        out["lead"] = lead.where(lead.isfinite(), torch.inf).where(first.isfinite(), -torch.inf)
    scaled = index.score.scaled(found.scores)
    if scaled is not None:
        share = scaled[:, 0] - scaled.logsumexp(1)
        out["share"] = share.where(first.isfinite(), -torch.inf)
    _, own = meaning(index)
    rows, has_answer = found.rows[:, 0], found.rows[:, 0] >= 0
    if bool(has_answer.any()) and bool(queries.log_var.isfinite().any()):
        trace: Tensor = own.uncertainty(index.gaussians(rows.clamp(min=0).tolist())) + own.uncertainty(queries)
        out["certainty"] = (-trace.double()).where(has_answer, -torch.inf)
    return {name: x.double().numpy() for name, x in out.items()}


def calibrate(
    index: SearchIndex, questions: Sequence[Question], right: Sequence[Sequence[str]], embedder: Embedder, risk: float,
    delta: float = 0.1, effort: int | None = None,
) -> Threshold:  # fmt: skip
    """The threshold for these questions, whose right answers are the keys `right`; see `prolip.search.risk`."""
    queries = embed(questions, embedder)
    found = index.search(queries, COMPARED, effort)
    wrong = [not rows or rows[0] not in set(keys) for rows, keys in zip(first_keys(index, found), right)]
    return find_threshold(confidences(index, queries, found), np.array(wrong), risk, delta)


def first_keys(index: SearchIndex, found: Found) -> list[list[str]]:
    """The key of the first answer of every question, [] where there is none."""
    return [[item["key"] for item in index.items([row])] if row >= 0 else [] for row in found.rows[:, 0].tolist()]


def read_questions(path: str) -> tuple[list[Question], list[list[str]]]:
    """Questions and the keys that answer them, of a file with a JSON object per line:

        {"text": "a cat", "keys": ["cats/1.jpg", "cats/2.jpg"]}    or "image": a path, or both

    ValueError, with the line's number, for what is not of this form.
    """
    questions, right = [], []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            values = loads(line)
            question, keys = Question(values.get("text"), values.get("image")), values["keys"]
            if question == Question() or not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
                raise ValueError("no text or image, or keys that are no list of texts")
        except (ValueError, KeyError, AttributeError) as error:
            wanted = json.dumps({"text": "a cat", "keys": ["cats/1.jpg"]})
            raise ValueError(f"{path}, line {number}: {error!r}; wanted lines such as {wanted}") from error
        questions.append(question)
        right.append(keys)
    return questions, right
