"""Questions to an index, and answers that say how sure they are."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from prolip.data.images import open_image
from prolip.data.reading.tar import printable
from prolip.embedder import Embedded, Embedder, groups, joined
from prolip.gaussian import Gaussian, mixture
from prolip.scores import Score, Side
from prolip.search.exact import Found, other_side
from prolip.search.index import SearchIndex
from prolip.search.risk import Threshold, find_threshold
from prolip.search.store import Item
from prolip.uncertainty.doubt import with_doubt
from prolip.uncertainty.novelty import refusal
from prolip.uncertainty.readings import Reader
from prolip.uncertainty.units import Units, in_words, range_in_words
from prolip.utils import console
from prolip.utils.documents import check_types, loads, text_lines
from prolip.utils.messages import first_few

log = logging.getLogger(__name__)

#: Answers that are looked at to say how sure the first one is.
COMPARED = 20
#: Texts and pictures that are embedded at a time; questions whose products with a part of the gallery are made at once.
TEXTS, PICTURES, BLOCK = 512, 64, 512
#: Numbers of a gallery (N D) up to which all of it is looked at beside what an index finds.
NUMBERS = 2**26
#: Items whose means say what kind of images an index holds.
SAMPLE = 256


class Question(NamedTuple):
    """A text, the path or URL of a picture, or both. public_only: the URL comes from data: `open_image`."""

    text: str | None = None
    image: str | None = None
    public_only: bool = False

    def __str__(self) -> str:
        return " + ".join(part for part in (self.text, self.image) if part)


@dataclass(frozen=True)
class Meaning:
    """What a model says of one input, each None where the model does not know it.

    bits: about which of the other side is meant; share: of the other side that it fits; share_range: nine of ten texts
    fit a share in it; ambiguity: nats of an image.
    """

    bits: float | None = None
    share: float | None = None
    share_range: tuple[float, float] | None = None
    ambiguity: float | None = None

    @property
    def fits(self) -> str | None:
        """The share in words, as a range where there is one."""
        if self.share_range is not None:
            return range_in_words(*self.share_range)
        return None if self.share is None else in_words(self.share)

    @property
    def words(self) -> list[str]:
        """All of it for people."""
        said = [] if self.bits is None else [f"{self.bits:.1f} bits, fits {self.fits}"]
        return said if self.ambiguity is None else [*said, f"ambiguity {self.ambiguity:.1f} nats"]


@dataclass(frozen=True, kw_only=True)
class Answer(Meaning):
    """One item that was found. probability: that it matches, None where the score has none or none of such a pair."""

    item: Item
    similarity: float
    probability: float | None
    trace: float

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        item = {name: value for name, value in self.item.items() if name not in ("print", "source")}
        return item | {name: value for name, value in vars(self).items() if name != "item"}

    def __str__(self) -> str:
        parts = [self.item["key"], f"similarity {self.similarity:.4f}"]
        if self.probability is not None:
            shown = f"{self.probability:.1%}" if self.probability >= 0.01 else in_words(self.probability)
            parts.append(f"match {shown}")
        parts += [f"trace {self.trace:.4g}", *self.words]
        if captions := self.item.get("captions"):
            parts.append(repr(captions[0]))
        return "  ".join(parts)


def embed(questions: Sequence[Question], embedder: Embedder) -> Embedded:
    """Questions as Gaussians (Q, D), and their novelty where the model knows it of all of them.

    Of a text and a picture the mixture of both, N(the mean of the means brought to unit length, the mean of the
    variances), as a class is that of its prompts (ProLIP 4.2): what is near to both, as wide as either. It is as new as
    the newer of them. ValueError for no question, and for one of nothing.
    """
    if not questions:
        raise ValueError("no question: give texts or pictures")
    for number, question in enumerate(questions, 1):
        if question[:2] == (None, None):
            raise ValueError(f"question {number} has neither a text nor a picture: give one")
    texts, images = ([i for i, question in enumerate(questions) if question[part] is not None] for part in (0, 1))
    parts = []
    if texts:
        asked = groups((questions[i].text for i in texts), TEXTS)
        parts.append((texts, joined([embedder.embed(embedder.tokenizer(group), "text") for group in asked])))
    if images:
        opened = (open_image(questions[i].image or "", questions[i].public_only) for i in images)
        parts.append((images, embedder.embed_images(opened, PICTURES)))
    z = Gaussian(*(torch.empty(len(questions), x.shape[1]) for x in parts[0][1].z))
    for rows, part in parts:
        z.mean[rows], z.log_var[rows] = part.z
    if both := sorted(set(texts) & set(images)):
        own = [part.z.select([rows.index(i) for i in both]) for rows, part in parts]
        z.mean[both], z.log_var[both] = mixture(Gaussian(*(torch.stack(pair, 1) for pair in zip(*own))))
    novelty = {
        end: torch.full((len(questions),), -torch.inf)
        for end in parts[0][1].novelty
        if all(end in part.novelty for _, part in parts)
    }
    for rows, part in parts:
        for end, nats in novelty.items():
            nats[rows] = nats[rows].maximum(part.novelty[end])
    return Embedded(z, novelty)


def answers_of(
    index: SearchIndex, found: Found, pairs: Sequence[bool], asked: Gaussian, reader: Reader | None, scored: bool = True
) -> list[list[Answer]]:
    """What was found of each question (Q, D).

    pairs: whether each is of the other side than the gallery, so that its score was trained to be that of a pair;
    scored: whether it was found by the score, of which a probability may be, with the doubt of the pair's image.
    """
    there, out = found.rows >= 0, list[list[Answer]]([] for _ in pairs)
    rows, places = found.rows[there].unique(return_inverse=True)
    if not len(rows):
        return out
    at = torch.zeros_like(found.rows).masked_scatter(there, places)
    (units, own), z, items = meaning(index), index.gaussians(rows.tolist()), index.items(rows.tolist())
    trace, means, shown = own.uncertainty(z), meanings(z, index.side, units, reader), index.side == "image"
    doubt, share = doubts_of(index, reader, z.mean if shown else asked.mean, shown), torch.zeros(())
    if doubt is not None and units is not None:
        share = units.share((asked if shown else z).trace)
        doubt, share = (doubt[at], share.unsqueeze(1)) if shown else (doubt.unsqueeze(1), share[at])
    probability = index.score.match_probability(found.scores, doubt, share) if scored else None
    for i, j in there.nonzero().tolist():
        row, given = int(at[i, j]), None if probability is None or not pairs[i] else float(probability[i, j])
        out[i].append(
            Answer(
                item=items[row],
                similarity=float(found.scores[i, j]),
                probability=given,
                trace=float(trace[row]),
                **vars(means[row]),
            )
        )
    return out


def meanings(z: Gaussian, side: Side, units: Units | None, reader: Reader | None) -> list[Meaning]:
    """What a model says of each of some inputs of a side (N, D)."""
    columns: list[Sequence[Any]] = [[None] * len(z.mean)] * 4
    if units is not None:
        of = f"{other_side(side)}s"
        columns[:2] = units.information(z.trace, of, bits=True).tolist(), units.share(z.trace, of).tolist()
    if reader is not None and side == "text":
        columns[2] = list(zip(*(x.tolist() for x in reader.shares(z.trace, z.mean))))
    elif reader is not None:
        columns[3] = [None if math.isnan(nats) else nats for nats in reader.ambiguity(z.mean).tolist()]
    return [Meaning(*row) for row in zip(*columns)]


def doubts_of(index: SearchIndex, reader: Reader | None, image: Tensor, own: bool = False) -> Tensor | None:
    """How far not to trust the model on images, unit means (N, D) -> (N,); None where nothing was learnt of that.

    own: whether the images are items of the index, SAMPLE of which then say what kind of images these are.
    """
    if reader is None:
        return None
    rows = np.unique(np.linspace(0, len(index.store) - 1, SAMPLE).astype(int))
    rows = rows[index.store.fates[rows] == 0]
    gallery = reader.evidence(index.gaussians(rows.tolist()).mean) if own and len(rows) else None
    return meaning(index)[1].doubts(reader.evidence(image), gallery)


def meaning(index: SearchIndex) -> tuple[Units | None, Score]:
    """The units of the model's traces, and the score that reads uncertainty off them."""
    own = index.score if index.card is None else index.card.scored_by()
    return own.units, own


def confidences(
    index: SearchIndex, asked: Embedded, found: Found, pairs: Sequence[bool] = (), reader: Reader | None = None
) -> dict[str, np.ndarray]:
    """How sure the first answer of each question is, larger is surer, by name; an index that finds nothing is not.

    similarity: its score; lead: before the second; share: log of its softmax by the trained scale among what was found;
    certainty: minus the uncertainties of question and answer. Where the model has units, log probability: minus the
    code length of the answer among all items, of an index of at most NUMBERS numbers. Where it knows novelty,
    familiarity: log of the probability that the question is of the training's kind. Joint log probability: the sum of
    both (`prolip.uncertainty.novelty.refusal`).
    found: COMPARED answers or so of each, always as many; pairs, reader: as in `answers_of`, for pictures' doubt.
    """
    queries, first = asked.z, found.scores[:, 0]
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
    nats = code_lengths(index, queries, rows)
    doubt = None if index.side == "image" else doubts_of(index, reader, queries.mean)
    if nats is not None and doubt is not None:
        hedged = with_doubt((-nats).exp(), doubt * torch.tensor(pairs), 1 / len(index))
        nats = -hedged.log().where(has_answer, -torch.inf)
    if nats is not None:
        out["log probability"] = -nats
    if asked.novelty:
        out["familiarity"] = -refusal(torch.zeros(len(rows)), asked.novelty)
    if nats is not None and asked.novelty:
        out["joint log probability"] = -refusal(nats, asked.novelty)
    return {name: x.double().numpy() for name, x in out.items()}


def code_lengths(index: SearchIndex, queries: Gaussian, rows: Tensor) -> Tensor | None:
    """`Units.code_length` of a row for each question (Q,) among all items, (Q,) nats, inf for the row -1; None where
    the model has no units, and of an index of more than NUMBERS numbers, which it would read for each batch.
    """
    units, dim = meaning(index)[0], queries.mean.shape[1]
    if units is None or len(index) * dim > NUMBERS or not len(index):
        return None
    logits = 2 / units.unit * queries.mean
    total = torch.full((len(rows),), -torch.inf, dtype=torch.float64)
    for block in index.store.gallery.blocks():
        means = index.store.gallery.gaussian(block).mean
        for part, own in zip(total.split(BLOCK), logits.split(BLOCK)):
            part.copy_(part.logaddexp((own @ means.mT).double().logsumexp(1)))
    answer = (logits * index.gaussians(rows.clamp(min=0).tolist()).mean).double().sum(1)
    return (total - answer).where(rows >= 0, torch.inf)


def ask(
    index: SearchIndex,
    questions: Sequence[Question],
    embedder: Embedder,
    top: int = 10,
    wider: bool | None = None,
    known: tuple[Sequence[Question], Sequence[Sequence[str]]] | None = None,
    risk: float = 0.1,
    delta: float = 0.1,
    **settings: Any,
) -> tuple[list[list[Answer] | None], list[Meaning], Threshold | None]:
    """The `top` answers to each question, None where it is refused; what each means; the threshold of the refusals.

    wider: rank by inclusion, `SearchIndex.search_inclusion`. known: as `read_questions` gives it, asked the same way to
    refuse by; risk, delta: of `calibrate`. settings: of `SearchIndex.search`.
    """
    embedded, threshold, most = embed(questions, embedder), None, top if known is None else max(top, COMPARED)
    pairs, z, reader = are_pairs(index, questions), embedded.z, embedder.reader
    images, texts = (meanings(z, side, meaning(index)[0], reader) for side in get_args(Side))
    means = [
        text if question.image is None else image if question.text is None else Meaning()
        for question, text, image in zip(questions, texts, images)
    ]
    if wider is not None:
        found = index.search_inclusion(z, top, wider, settings.get("shortlist") or 1000)
        return [*answers_of(index, found, pairs, z, reader, scored=False)], means, None
    search: Callable[[Gaussian], Found] = partial(index.search, k=most, **settings)
    found, given = search(z), [True] * len(questions)
    if known is not None:
        threshold = calibrate(index, *known, embedder, risk, delta, search)
        given = threshold.answers(confidences(index, embedded, found.first(COMPARED), pairs, reader)).tolist()
    answers = answers_of(index, found.first(top), pairs, z, reader)
    return [own if is_given else None for own, is_given in zip(answers, given)], means, threshold


def are_pairs(index: SearchIndex, questions: Sequence[Question]) -> list[bool]:
    """Whether each question is of the other side than the gallery."""
    return [(question.image if index.side == "image" else question.text) is None for question in questions]


def calibrate(
    index: SearchIndex,
    questions: Sequence[Question],
    right: Sequence[Sequence[str]],
    embedder: Embedder,
    risk: float,
    delta: float = 0.1,
    search: Callable[[Gaussian], Found] | None = None,
) -> Threshold:
    """The threshold for these questions, whose right answers are the keys `right`; see `prolip.search.risk`.

    search: how the questions are asked that it is for, COMPARED answers or more of each (default: as many, by `search`
    of the index). It holds for first answers that are found so: an approximate index may find others by other settings.
    A warning names keys that are not in the index. ValueError where none is there.
    """
    keys = list(dict.fromkeys(key for some in right for key in some))
    rows = dict(zip(keys, index.find(keys).tolist()))
    missing = [key for key, row in rows.items() if row < 0]
    what = f"{len(missing)} of {len(keys)} keys of the questions are not in the index ({first_few(missing, 3)})"
    if missing and len(missing) == len(keys):
        raise ValueError(f"{what}: give them as query --json prints them")
    if missing:
        log.warning("%s: no answer can be these", console.plain(what))
    asked = embed(questions, embedder)
    found = index.search(asked.z, COMPARED) if search is None else search(asked.z)
    firsts = found.rows[:, 0].tolist()
    wrong = [first < 0 or first not in [rows[key] for key in some] for first, some in zip(firsts, right)]
    sure = confidences(index, asked, found.first(COMPARED), are_pairs(index, questions), embedder.reader)
    return find_threshold(sure, np.array(wrong), risk, delta)


def read_questions(path: str, allow_private_hosts: bool = False) -> tuple[list[Question], list[list[str]]]:
    """Questions and the keys that answer them, of a file with a JSON object per line:

        {"text": "a cat", "keys": ["cats/1.jpg", "cats/2.jpg"]}    or "image": a path, or both

    ValueError, with the line's number, for what is not of this form. allow_private_hosts: whether an image may be a URL
    of a host that is not public.
    """
    questions, right = [], []
    for number, line in enumerate(text_lines(Path(path).read_bytes().decode("utf-8-sig", "surrogateescape")), 1):
        if not line.strip():
            continue
        try:
            values = check_types(loads(line), {"text": str | None, "image": str | None, "keys": list}, "it")
            question = Question(values.get("text"), values.get("image"), not allow_private_hosts)
            keys = values["keys"]
            if question[:2] == (None, None) or not all(isinstance(key, str) for key in keys):
                raise ValueError("no text or image, or keys that are no texts")
        except (ValueError, KeyError) as error:
            wanted = json.dumps({"text": "a cat", "keys": ["cats/1.jpg"]})
            raise ValueError(f"{path}, line {number}: {error!r}; wanted lines such as {wanted}") from error
        questions.append(question)
        right.append([printable(key) for key in keys])
    return questions, right
