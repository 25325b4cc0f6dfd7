"""Queries to an index, and answers with their probabilities, meanings and refusals."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from prolip.data.images import open_image
from prolip.data.reading.tar import printable
from prolip.embedder import Embedded, Embedder
from prolip.gaussian import Gaussian, mixture
from prolip.scores import Score, Side
from prolip.search.exact import TopK, other_side
from prolip.search.risk_control import Threshold, find_threshold
from prolip.search.sources import trained_sources
from prolip.search.store import Item
from prolip.uncertainty.doubt import with_doubt
from prolip.uncertainty.novelty import refusal
from prolip.uncertainty.readings import FittedReader
from prolip.uncertainty.units import Units, in_words, range_in_words
from prolip.utils import console
from prolip.utils.documents import check_types, loads, text_lines
from prolip.utils.messages import first_few

if TYPE_CHECKING:
    from prolip.search.index import SearchIndex

log = logging.getLogger(__name__)

COMPARED = 20  # answers used for the confidence of the first
#: Texts and images embedded at a time; queries multiplied with a block of the gallery at once.
TEXTS, PICTURES, BLOCK = 512, 64, 512
NUMBERS = 2**26  # largest gallery (N D numbers) of which a query is compared with every item
SAMPLE = 256  # items that represent the images of an index


class Query(NamedTuple):
    """A text, the path or URL of an image, or both. public_only: the URL comes from data: `open_image`."""

    text: str | None = None
    image: str | None = None
    public_only: bool = False

    def __str__(self) -> str:
        return " + ".join(part for part in (self.text, self.image) if part)

    @property
    def kind(self) -> str:
        return " and ".join(part for part in ("text", "image") if getattr(self, part) is not None)


Known = tuple[list[Query], list[list[str]]]  # queries, and the keys that answer each


@dataclass(frozen=True)
class Meaning:
    """The meaning of one input according to a model; None for unknown values."""

    bits: float | None = None  # information about which input of the other side is meant
    share: float | None = None  # of the other side that it matches
    share_range: tuple[float, float] | None = None  # contains the share of nine texts in ten
    ambiguity: float | None = None  # of an image, in nats
    share_of: str | None = None  # images or texts

    @property
    def fits(self) -> str | None:
        """The share in words, or a range of shares."""
        if self.share_range is not None:
            return range_in_words(*self.share_range)
        return None if self.share is None else in_words(self.share)

    @property
    def words(self) -> list[str]:
        said = [] if self.bits is None else [f"{self.bits:.1f} bits, matches {self.fits} {self.share_of}"]
        return said if self.ambiguity is None else [*said, f"ambiguity {self.ambiguity:.1f} nats"]


@dataclass(frozen=True, kw_only=True)
class Answer(Meaning):
    """An item that was found. probability: of a match; None if the score gives none for such a pair."""

    item: Item
    similarity: float
    probability: float | None
    trace: float
    ranked_by: str = "similarity"  # printed name of the similarity

    def to_dict(self) -> dict[str, Any]:
        item = {name: value for name, value in self.item.items() if name not in ("print", "source")}
        return item | {name: value for name, value in vars(self).items() if name not in ("item", "ranked_by")}

    @property
    def parts(self) -> list[str]:
        """Key, similarity, match probability, meaning and the start of the first caption, each as a text."""
        parts = [self.item["key"], f"{self.ranked_by} {self.similarity:.4f}"]
        if self.probability is not None:
            shown = f"{self.probability:.1%}" if self.probability >= 0.01 else in_words(self.probability)
            parts.append(f"match probability {shown}")
        captions = [text if len(text) <= 70 else f"{text[:67]}..." for text in self.item.get("captions", [])[:1]]
        return [*parts, *self.words, *map(repr, captions)]

    def __str__(self) -> str:
        return "  ".join(self.parts)


def embed(queries: Sequence[Query], embedder: Embedder) -> Embedded:
    """Embed queries (Q, D), with novelty; a text with an image is their mixture, as a class of prompts (ProLIP 4.2)."""
    if not queries or any(query[:2] == (None, None) for query in queries):
        raise ValueError("no query, or a query without text and image. Give texts or images")
    texts, images = ([i for i, query in enumerate(queries) if query[part] is not None] for part in (0, 1))
    parts = []
    if texts:
        parts.append((texts, embedder.embed((queries[i].text for i in texts), "text", TEXTS)))
    if images:
        opened = (open_image(queries[i].image or "", queries[i].public_only) for i in images)
        parts.append((images, embedder.embed(opened, "image", PICTURES)))
    z = Gaussian(*(torch.empty(len(queries), x.shape[1]) for x in parts[0][1].z))
    ends = [end for end in parts[0][1].novelty if all(end in part.novelty for _, part in parts)]
    novelty = {end: torch.full((len(queries),), -torch.inf) for end in ends}
    for rows, part in parts:
        z.mean[rows], z.log_var[rows] = part.z
        for end, nats in novelty.items():
            nats[rows] = nats[rows].maximum(part.novelty[end])
    if both := sorted(set(texts) & set(images)):
        own = [part.z.select([rows.index(i) for i in both]) for rows, part in parts]
        z.mean[both], z.log_var[both] = mixture(Gaussian(*(torch.stack(pair, 1) for pair in zip(*own))))
    return Embedded(z, novelty)


def answers_of(
    index: SearchIndex,
    found: TopK,
    pairs: Sequence[bool],
    asked: Gaussian,
    reader: FittedReader | None,
    scored: bool = True,
    informed: bool = True,
) -> list[list[Answer]]:
    """Describe found items. pairs: queries of the other side than the gallery; only they have probabilities. informed:
    whether the model's variances have a meaning.
    """
    there, out = found.rows >= 0, list[list[Answer]]([] for _ in pairs)
    rows, places = found.rows[there].unique(return_inverse=True)
    if not len(rows):
        return out
    at = torch.zeros_like(found.rows).masked_scatter(there, places)
    (units, own), z, items = meaning(index), index.gaussians(rows.tolist()), index.items(rows.tolist())
    means = meanings(z, index.side, units if informed else None, reader)
    trace, shown = own.uncertainty(z), index.side == "image"
    doubt, share = doubts_of(index, reader, z.mean if shown else asked.mean, shown), torch.zeros(())
    if doubt is not None and units is not None:
        share = units.share((asked if shown else z).trace)
        doubt, share = (doubt[at], share.unsqueeze(1)) if shown else (doubt.unsqueeze(1), share[at])
    probability = index.score.match_probability(found.scores, doubt, share) if scored else None
    for i, j in there.nonzero().tolist():
        row, given = int(at[i, j]), None if probability is None or not pairs[i] else float(probability[i, j])
        said: dict[str, Any] = {"probability": given, "trace": float(trace[row]), **vars(means[row])}
        said["ranked_by"] = "similarity" if scored else "log inclusion"
        out[i].append(Answer(item=items[row], similarity=float(found.scores[i, j]), **said))
    return out


def meanings(z: Gaussian, side: Side, units: Units | None, reader: FittedReader | None) -> list[Meaning]:
    """Return the meaning of each input of one side (N, D); all unknown without units."""
    if units is None:
        return [Meaning()] * len(z.mean)
    of, columns = f"{other_side(side)}s", list[Sequence[Any]]([[None] * len(z.mean)] * 5)
    columns[:2] = units.information(z.trace, of, bits=True).tolist(), units.share(z.trace, of).tolist()
    columns[4] = [of] * len(z.mean)
    if reader is not None and side == "text":
        columns[2] = list(zip(*(x.tolist() for x in reader.shares(z.trace, z.mean))))
    elif reader is not None:
        columns[3] = [None if math.isnan(nats) else nats for nats in reader.ambiguity(z.mean).tolist()]
    return [Meaning(*row) for row in zip(*columns)]


def doubts_of(index: SearchIndex, reader: FittedReader | None, image: Tensor, own: bool = False) -> Tensor | None:
    """Return the uncertainty about the model on images (N, D) -> (N,), None if not fitted. own: items of the index."""
    if reader is None:
        return None
    rows = np.unique(np.linspace(0, len(index.store) - 1, SAMPLE).astype(int))
    rows = rows[index.store.fates[rows] == 0]
    gallery = reader.evidence(index.gaussians(rows.tolist()).mean) if own and len(rows) else None
    return meaning(index)[1].doubts(reader.evidence(image), gallery)


def meaning(index: SearchIndex) -> tuple[Units | None, Score]:
    """Return the units of the model's traces, and the score that reads uncertainty off them."""
    own = index.score if index.card is None else index.card.scored_by()
    return own.units, own


def confidences(
    index: SearchIndex, asked: Embedded, found: TopK, pairs: Sequence[bool] = (), reader: FittedReader | None = None
) -> dict[str, np.ndarray]:
    """Return confidences in the first answer to each query by name, (Q,); larger is more certain, -inf without one.
    Some need units, novelty or a small gallery (docs/reference/search_index.md). found: equally many answers for each;
    pairs, reader: as in `answers_of`.
    """
    queries, first, rows = asked.z, found.scores[:, 0], found.rows[:, 0]
    has_answer, out = rows >= 0, {"similarity": first}
    if found.scores.shape[1] > 1:
        lead = first - found.scores[:, 1]
        out["lead"] = lead.where(lead.isfinite(), torch.inf).where(first.isfinite(), -torch.inf)
    if (scaled := index.score.scaled(found.scores)) is not None:
        out["share"] = (scaled[:, 0] - scaled.logsumexp(1)).where(first.isfinite(), -torch.inf)
    if bool(has_answer.any()) and bool(queries.log_var.isfinite().any()):
        own = meaning(index)[1]
        trace: Tensor = own.uncertainty(index.gaussians(rows.clamp(min=0).tolist())) + own.uncertainty(queries)
        out["certainty"] = (-trace.double()).where(has_answer, -torch.inf)
    nats, (units, _), dim = None, meaning(index), queries.mean.shape[1]
    if units is not None and 0 < len(index) * dim <= NUMBERS:  # `Units.code_length` of a row among all items
        logits = 2 / units.unit * queries.mean
        total = torch.full((len(rows),), -torch.inf, dtype=torch.float64)
        for block in index.store.gallery.blocks():
            means = index.store.gallery.gaussian(block).mean
            for part, some in zip(total.split(BLOCK), logits.split(BLOCK)):
                part.copy_(part.logaddexp((some @ means.mT).double().logsumexp(1)))
        answer = (logits * index.gaussians(rows.clamp(min=0).tolist()).mean).double().sum(1)
        nats = (total - answer).where(has_answer, torch.inf)
    doubt = None if index.side == "image" else doubts_of(index, reader, queries.mean)
    if nats is not None:
        if doubt is not None:
            hedged = with_doubt((-nats).exp(), doubt * torch.tensor(pairs), 1 / len(index))
            nats = -hedged.log().where(has_answer, -torch.inf)
        out["log probability"] = -nats
    if asked.novelty:
        out["familiarity"] = -refusal(torch.zeros(len(rows)), asked.novelty)
        if nats is not None:
            out["joint log probability"] = -refusal(nats, asked.novelty)
    return {name: x.double().numpy() for name, x in out.items()}


def ask(
    index: SearchIndex,
    queries: Sequence[Query],
    embedder: Embedder,
    top: int = 10,
    more_general: bool | None = None,
    known: Known | None = None,
    risk: float = 0.1,
    delta: float = 0.1,
    **settings: Any,
) -> tuple[list[list[Answer] | None], list[Meaning], Threshold | None, list[str]]:
    """Return the `top` answers to each query (None if refused), each query's meaning, the refusal threshold, and
    the printed number of each query that it was compared with, "" without one.
    more_general: True or False ranks by inclusion. known: queries with their correct keys, to calibrate the refusal;
    risk, delta: of `calibrate`. settings: of `search`.
    """
    if known is not None and (other := sorted({query.kind for query in queries} - {query.kind for query in known[0]})):
        kinds = ", ".join(sorted({query.kind for query in known[0]})) or "nothing"
        what = f"a query is by {other[0]}, but the queries with known answers are by {kinds}: its risk would not hold"
        line = ", ".join(f'"{part}": ...' for part in other[0].split(" and "))
        raise ValueError(f'{what}. Give lines such as {{{line}, "keys": [...]}}')
    embedded, threshold, most = embed(queries, embedder), None, top if known is None else max(top, COMPARED)
    pairs, z, reader = are_pairs(index, queries), embedded.z, embedder.reader
    informed = not embedder.caution
    images, texts = (meanings(z, side, meaning(index)[0] if informed else None, reader) for side in get_args(Side))
    means = [
        text if query.image is None else image if query.text is None else Meaning()
        for query, text, image in zip(queries, texts, images)
    ]
    if more_general is not None:
        found = index.search_inclusion(z, top, more_general, settings.get("rerank") or 1000)
        answers = answers_of(index, found, pairs, z, reader, False, informed)
        return [*answers], means, None, [""] * len(queries)
    search: Callable[[Gaussian], TopK] = partial(index.search, k=most, **settings)
    found, given, compared = search(z), [True] * len(queries), [""] * len(queries)
    if known is not None:
        threshold = calibrate(index, known, embedder, risk, delta, search)
        sure = confidences(index, embedded, found.first(COMPARED), pairs, reader)
        given = threshold.answers(sure).tolist()
        if threshold.holds:
            compared = [threshold.compared(value) for value in sure[threshold.by].tolist()]
    answers = answers_of(index, found.first(top), pairs, z, reader, informed=informed)
    return [own if is_given else None for own, is_given in zip(answers, given)], means, threshold, compared


def are_pairs(index: SearchIndex, queries: Sequence[Query]) -> list[bool]:
    """Return for each query whether it is of the other side than the gallery."""
    return [(query.image if index.side == "image" else query.text) is None for query in queries]


def calibrate(
    index: SearchIndex, known: Known, embedder: Embedder, risk: float, delta: float, search: Callable[[Gaussian], TopK]
) -> Threshold:
    """Calibrate a threshold on queries with known keys. search: as for later queries, with COMPARED answers or more.
    Warns of keys that the index lacks and of sources that the model's run trained on; ValueError if it lacks all.
    """
    queries, right = known
    keys = list(dict.fromkeys(key for some in right for key in some))
    rows = dict(zip(keys, index.find(keys).tolist()))
    missing = [key for key, row in rows.items() if row < 0]
    what = f"{len(missing)} of {len(keys)} keys of the queries are not in the index ({first_few(missing, 3)})"
    if missing and len(missing) == len(keys):
        tails = [missing[0][end + 1 :] for end, sign in enumerate(missing[0]) if sign == "/"]
        similar = [f", but {tail} is. Use" for tail, row in zip(tails, index.find(tails)) if row >= 0]
        table = f"{similar[0]} the table of the queries for the index, or give" if similar else ". Give"
        raise ValueError(f"{what}{table} keys as query --json prints them")
    if missing:
        log.warning("%s, so no answer can have them", console.plain(what))
    there = [row for row in rows.values() if row >= 0]
    if trained := trained_sources(index, there, embedder.loaded_from.get("model") or ""):
        where = console.plain(first_few(trained, 3))
        log.warning("the model trained on %s: the bound does not hold for training pairs. Use other pairs", where)
    asked = embed(queries, embedder)
    found = search(asked.z)
    firsts = found.rows[:, 0].tolist()
    wrong = [first < 0 or first not in [rows[key] for key in some] for first, some in zip(firsts, right)]
    sure = confidences(index, asked, found.first(COMPARED), are_pairs(index, queries), embedder.reader)
    return find_threshold(sure, np.array(wrong), risk, delta)


def read_queries(path: str, allow_private_hosts: bool = False) -> Known:
    """Read queries and the keys that answer them, a JSON object per line. ValueError names a wrong line."""
    queries, right = [], []
    for number, line in enumerate(text_lines(Path(path).read_bytes().decode("utf-8-sig", "surrogateescape")), 1):
        if not line.strip():
            continue
        try:
            values = check_types(loads(line), {"text": str | None, "image": str | None, "keys": list}, "it")
            query = Query(values.get("text"), values.get("image"), not allow_private_hosts)
            keys = values["keys"]
            if query[:2] == (None, None) or not all(isinstance(key, str) for key in keys):
                raise ValueError("no text or image, or keys that are not texts")
        except (ValueError, KeyError) as error:
            expected = '{"text": "a cat", "keys": ["cats/1.jpg"]} or {"image": "cat.jpg", "keys": ["cats/1.jpg"]}'
            raise ValueError(f"{path}, line {number}: {error!r}; expected lines such as {expected}") from error
        queries.append(query)
        right.append([printable(key) for key in keys])
    return queries, right
