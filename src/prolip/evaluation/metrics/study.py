"""The uncertainty study of any task: its per-sample arrays, and every figure that follows from them.

A `Study` holds what was right, what could be refused by, and how well probabilities were kept; `Study.figures` is the
flat table, `evaluation.figures.draw` the plots. Models without uncertainty are refused by their scores alone.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from prolip.evaluation.metrics.blockwise import (
    MatchRanks,
    Nearest,
    PairScores,
    Reader,
    Relevance,
    Rows,
    check_fit,
    row_blocks,
)
from prolip.evaluation.metrics.calibration import (
    Confidence,
    MatchReliability,
    Reliability,
    reliability,
)
from prolip.evaluation.metrics.ranking import Array, Ranking, as_array
from prolip.evaluation.metrics.selective import recall_auroc, selective_metrics
from prolip.gaussian import Gaussian
from prolip.scores import CSDScore, Score

Side = tuple[str, Tensor | None]
X = TypeVar("X")
Transform = Callable[[X], Tensor]
#: No scores, by which a score is asked whether it has probabilities.
NOTHING = torch.zeros(0)


def trace(z: Gaussian) -> Tensor:
    """The trace of each, (N, D) -> (N,): what a method's score reads its uncertainty from unless it says otherwise."""
    return z.trace


class Samples(NamedTuple):
    """Errors (N,), less is better, and uncertainties (N,) by name."""

    error: np.ndarray
    uncertainties: dict[str, np.ndarray]


class Study(NamedTuple):
    """samples by prefix (`refusal`, or one for each direction), reliability by prefix, and single figures by key."""

    samples: dict[str, Samples]
    reliability: dict[str, Reliability]
    extra: dict[str, float]

    def metrics(self) -> dict[str, float]:
        """`refusal/...` as `refusal_figures` names them, `calibration/...` as `Reliability.figures` does."""
        out: dict[str, float] = {}
        for prefix, (error, uncertainties) in self.samples.items():
            out |= selective_metrics(error, uncertainties, prefix)
        out |= self.extra
        for prefix, found in self.reliability.items():
            out |= found.metrics(prefix)
        return out


def study_errors(error: Array, uncertainties: Mapping[str, Array]) -> Study:
    """Of any task that has an error per sample (1 - Jaccard of an instance, 1 - AP of an image): (N,) each."""
    return Study({"refusal": _samples(error, uncertainties)}, {}, {})


def study_classification(
    scores: PairScores | Tensor,
    labels: Tensor,
    image: Gaussian | None = None,
    classes: Gaussian | None = None,
    score: Score | None = None,
    uncertainty: Transform[Gaussian] = trace,
    neighbours: bool = True,
    elements: int | None = None,
) -> Study:
    """Of a single-label task, error = the wrong class: scores of images against classes (N, C), labels (N,).

    image (N, D), classes (C, D): None for a model without uncertainty, which `uncertainty` reads off them, (N,) and
    (C,); score: what made the scores, whose softmax and match probability these are, None: there are none; neighbours:
    R-AUROC too, which takes N^2 scores. Refused by `score` (the negative of the best), `image` (its uncertainty),
    `pair` (plus that of the class chosen); `refusal/R-AUROC`, `refusal/1-NN`; `calibration/confidence/...` of the class
    chosen, by softmax, and `calibration/match/...` of all pairs of image and class.
    """
    score = score or CSDScore()
    scores = scores if isinstance(scores, PairScores) else PairScores.from_matrix(scores)
    relevance = Relevance.from_pairs(torch.arange(len(labels)), labels, len(labels), scores.texts)
    check_fit(scores, relevance)
    nearest, pairs = Nearest(scores.images), _pairs(relevance, score)
    sure = None if score.scaled(NOTHING) is None else Confidence(scores.images, cast(Transform[Tensor], score.scaled))
    readers: list[Reader] = [reader for reader in (nearest, pairs, sure) if reader is not None]
    _read(scores.image_rows, relevance, elements, readers)

    right = nearest.item == labels.cpu()
    uncertainties, extra = {"score": -nearest.score}, {}
    if image is not None:
        own = uncertainties["image"] = uncertainty(image)
        if classes is not None:
            uncertainties["pair"] = own + uncertainty(classes)[nearest.item]
        if neighbours and len(labels) > 1:
            extra = {f"refusal/{key}": value for key, value in recall_auroc(image, labels, own).items()}
    found = {} if sure is None else {"calibration/confidence": reliability(sure.probability, right)}
    if pairs is not None:
        found["calibration/match"] = pairs.reliability()
    return Study({"refusal": _samples(~right, uncertainties)}, found, extra)


def study_retrieval(
    scores: PairScores,
    relevance: Relevance,
    image: Gaussian | None = None,
    text: Gaussian | None = None,
    score: Score | None = None,
    uncertainty: Transform[Gaussian] = trace,
    elements: int | None = None,
) -> tuple[Ranking, Ranking, Study]:
    """(images to texts, texts to images, study) of a retrieval task, from one pass over the scores per direction.

    relevance: images x texts; the rest as in `study_classification`. Error = no match in the first place, of queries
    that have one somewhere. Refused by `score` (the negative of the first place's), by the uncertainty of the query, of
    the item in first place (`image`, `text`), and of both (`pair`), so `auroc` is R-AUROC across modalities.
    `calibration/match`: all pairs; `calibration/match_i2t`, `match_t2i`: each query with its first place.
    """
    score = score or CSDScore()
    check_fit(scores, relevance)
    pairs = _pairs(relevance, score)  # of one direction: they are the same in both
    readers = [] if pairs is None else [pairs]
    i2t, first_texts = _rank(scores.image_rows, relevance, elements, readers)
    t2i, first_images = _rank(scores.text_rows, relevance.transposed(), elements)

    sides: list[Side] = [(name, None if z is None else uncertainty(z)) for name, z in
                         (("image", image), ("text", text))]  # fmt: skip
    samples = {
        "refusal/i2t": _queries(i2t, first_texts, *sides),
        "refusal/t2i": _queries(t2i, first_images, *reversed(sides)),
    }
    found: dict[str, Reliability] = {}
    if pairs is not None:
        found["calibration/match"] = pairs.reliability()
        for way, ranking, first in (("i2t", i2t, first_texts), ("t2i", t2i, first_images)):
            probability = pairs.probability(first.score)
            found[f"calibration/match_{way}"] = reliability(probability, ranking.hit(1))
    return i2t, t2i, Study({key: kept for key, kept in samples.items() if len(kept.error)}, found, {})


def _pairs(relevance: Relevance, score: Score) -> MatchReliability | None:
    """The reader of match probabilities, for scores that have them."""
    if score.match_probability(NOTHING) is None:
        return None
    return MatchReliability(relevance, cast(Transform[Tensor], score.match_probability))


def _read(scores: Rows, relevance: Relevance, elements: int | None, readers: Sequence[Reader]) -> None:
    """One pass over the scores of all queries, every block given to every reader."""
    for rows, block in row_blocks(scores, relevance.queries, relevance.gallery, elements):
        for reader in readers:
            reader.update(rows, block)


def _rank(
    scores: Rows, relevance: Relevance, elements: int | None, others: Sequence[Reader] = ()
) -> tuple[Ranking, Nearest]:
    """Ranks of the matches and first places of one direction; other readers see the blocks too."""
    ranks, nearest = MatchRanks(relevance), Nearest(relevance.queries)
    _read(scores, relevance, elements, [ranks, nearest, *others])
    return ranks.rankings()[0], nearest


def _queries(ranking: Ranking, nearest: Nearest, query: Side, item: Side) -> Samples:
    """The answerable queries of one direction."""
    kept = ranking.answerable
    (name, asked), (other, gallery) = query, item
    uncertainties = {"score": -nearest.score}
    if asked is not None and gallery is not None:
        found = gallery[nearest.item]
        uncertainties |= {name: asked, other: found, "pair": asked + found}
    return _samples((~ranking.hit(1))[kept], {key: u[kept] for key, u in uncertainties.items()})


def _samples(error: Array, uncertainties: Mapping[str, Array]) -> Samples:
    """As float64 arrays."""
    return Samples(as_array(error, np.float64), {name: as_array(u, np.float64) for name, u in uncertainties.items()})
