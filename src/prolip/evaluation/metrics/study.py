"""The uncertainty study of any task: its per-sample arrays, and every figure that follows from them.

A `Study` holds what was right, what could be refused by, and how well probabilities were kept; `Study.metrics` is the
flat table, `evaluation.plots.draw` the plots. Models without uncertainty are refused by their scores alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from prolip.evaluation.metrics.blockwise import Nearest, PairScores, Relevance, Rows, check_fit, rank_sparse
from prolip.evaluation.metrics.calibration import Matches, MatchReliability, Reliability, confidence, reliability
from prolip.evaluation.metrics.ranking import Array, Ranking, as_array
from prolip.evaluation.metrics.selective import recall_auroc, selective_metrics
from prolip.gaussian import Gaussian

Side = tuple[str, Tensor | None]
#: The uncertainty of some pairs of an image and a text or class, (N,) places of either -> (N,); None: there is none.
OfPairs = Callable[[Tensor, Tensor], Tensor | None]


class Samples(NamedTuple):
    """Errors (N,), less is better, and uncertainties (N,) by name."""

    error: np.ndarray
    uncertainties: dict[str, np.ndarray]


class Study(NamedTuple):
    """samples by prefix (`refusal`, or one for each direction), reliability by prefix, and single figures by key.

    too_large_for: metrics that were left out because the set has too many images for them.
    """

    samples: dict[str, Samples]
    reliability: dict[str, Reliability]
    extra: dict[str, float]
    too_large_for: tuple[str, ...] = ()

    def metrics(self) -> dict[str, float]:
        """`refusal/...` as `selective_metrics` names them, `calibration/...` as `Reliability.metrics` does."""
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
    scores: Tensor,
    labels: Tensor,
    image: Gaussian | None,
    classes: Gaussian | None,
    matches: Matches,
    uncertainty: Callable[[Gaussian], Tensor],
    neighbours: bool = True,
    of_pairs: OfPairs = lambda images, classes: None,
) -> Study:
    """Of a single-label task, error = the wrong class: scores of images against classes (N, C), labels (N,).

    image (N, D), classes (C, D): None for a model without uncertainty, which `uncertainty` reads off them, (N,) and
    (C,); matches: of what made the scores, whose softmax and match probability these are; neighbours: R-AUROC too,
    which takes N^2 scores; of_pairs: see `OfPairs`. Refused by `score` (the negative of the best), `image` (its
    uncertainty), `pair` (plus that of the class chosen, or what `of_pairs` says of both); `refusal/R-AUROC`,
    `refusal/1-NN`; `calibration/confidence/...` of the class chosen, by softmax, `calibration/match/...` of all pairs
    of image and class, and `calibration/match_top1/...` of each image with the class chosen.
    """
    matrix = PairScores.from_matrix(scores)
    relevance = Relevance.from_pairs(torch.arange(len(labels)), labels, len(labels), matrix.texts)
    check_fit(matrix, relevance)
    nearest, pairs, sure = Nearest(matrix.images), _pairs(relevance, matches), []
    for rows, block in matrix.blocks():
        nearest.update(rows, block)
        if pairs is not None:
            pairs.update(rows, block)
        if (logits := matches.score.scaled(block)) is not None:
            sure.append(confidence(logits, None if matches.doubt is None else matches.doubt[rows]).double().cpu())

    right = nearest.item == labels.cpu()
    uncertainties, extra = {"score": -nearest.score}, {}
    if image is not None:
        own = uncertainties["image"] = uncertainty(image)
        if classes is not None:
            uncertainties["pair"] = own + uncertainty(classes)[nearest.item]
        if neighbours and len(labels) > 1:
            extra = {f"refusal/{key}": value for key, value in recall_auroc(image, labels, own).items()}
    if (together := of_pairs(torch.arange(len(labels)), nearest.item)) is not None:
        uncertainties["pair"] = together
    found = {"calibration/confidence": reliability(torch.cat(sure), right)} if sure else {}
    if pairs is not None:
        found["calibration/match"] = pairs.reliability()
        top = cast(Tensor, matches.pairs(slice(None), nearest.item, nearest.score))
        found["calibration/match_top1"] = reliability(top, right)
    return Study({"refusal": _samples(~right, uncertainties)}, found, extra)


def study_retrieval(
    scores: PairScores,
    relevance: Relevance,
    image: Gaussian | None,
    text: Gaussian | None,
    matches: Matches,
    uncertainty: Callable[[Gaussian], Tensor],
    of_pairs: OfPairs = lambda images, texts: None,
) -> tuple[Ranking, Ranking, Study]:
    """(images to texts, texts to images, study) of a retrieval task, from one pass over the scores per direction.

    relevance: images x texts; the rest as in `study_classification`. Error = no match in the first place, of queries
    that have one somewhere. Refused by `score` (the negative of the first place's), by the uncertainty of the query, of
    the item in first place (`image`, `text`), and of both (`pair`: their sum, or what `of_pairs` says), so `auroc` is
    R-AUROC across modalities.
    `calibration/match`: all pairs; `calibration/match_i2t`, `match_t2i`: each query with its first place.
    """
    check_fit(scores, relevance)
    pairs = _pairs(relevance, matches)  # of one direction: they are the same in both
    i2t, first_texts = rank(scores.image_rows, relevance, pairs)
    t2i, first_images = rank(scores.text_rows, relevance.transposed())

    sides: list[Side] = [
        (name, None if z is None else uncertainty(z)) for name, z in (("image", image), ("text", text))
    ]
    samples = {
        "refusal/i2t": _queries(i2t, first_texts, sides, of_pairs),
        "refusal/t2i": _queries(t2i, first_images, sides[::-1], lambda text, image: of_pairs(image, text)),
    }
    found: dict[str, Reliability] = {}
    if pairs is not None:
        found["calibration/match"] = pairs.reliability()
        top_texts = cast(Tensor, matches.pairs(slice(None), first_texts.item, first_texts.score))
        top_images = cast(Tensor, matches.pairs(first_images.item, slice(None), first_images.score))
        found["calibration/match_i2t"] = reliability(top_texts, i2t.hit(1))
        found["calibration/match_t2i"] = reliability(top_images, t2i.hit(1))
    return i2t, t2i, Study({key: kept for key, kept in samples.items() if len(kept.error)}, found, {})


def _pairs(relevance: Relevance, matches: Matches) -> MatchReliability | None:
    """The reader of match probabilities, for scores that have them."""
    return None if matches.score.match_probability(torch.zeros(0)) is None else MatchReliability(relevance, matches)


def rank(scores: Rows, relevance: Relevance, pairs: MatchReliability | None = None) -> tuple[Ranking, Nearest]:
    """Ranks of the matches and first places of one direction, from one pass that match probabilities share."""
    nearest = Nearest(relevance.queries)
    (ranking,) = rank_sparse(scores, relevance, others=[nearest] if pairs is None else [nearest, pairs])
    return ranking, nearest


def _queries(ranking: Ranking, nearest: Nearest, sides: list[Side], of_pairs: OfPairs) -> Samples:
    """The answerable queries of one direction; sides: what asks, what is found."""
    kept = ranking.answerable
    (name, asked), (other, gallery) = sides
    uncertainties = {"score": -nearest.score}
    if asked is not None and gallery is not None:
        found = gallery[nearest.item]
        uncertainties |= {name: asked, other: found, "pair": asked + found}
    if (together := of_pairs(torch.arange(len(nearest.item)), nearest.item)) is not None:
        uncertainties["pair"] = together
    return _samples((~ranking.hit(1))[kept], {key: u[kept] for key, u in uncertainties.items()})


def _samples(error: Array, uncertainties: Mapping[str, Array]) -> Samples:
    return Samples(as_array(error, np.float64), {name: as_array(u, np.float64) for name, u in uncertainties.items()})
