"""Study of how well uncertainty predicts errors, and how well probabilities are calibrated, on any task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from prolip.evaluation.metrics import Array, as_array
from prolip.evaluation.metrics.calibration import Matching, MatchReliability, Reliability, confidence, reliability
from prolip.evaluation.metrics.classification import label_ranks
from prolip.evaluation.metrics.ranking import Ranking
from prolip.evaluation.metrics.selective import selective_metrics
from prolip.evaluation.metrics.streaming import Index, Nearest, PairScores, Relevance, check_fit, rank_sparse

#: The uncertainty of some pairs of an image and a text or class, (N,) places of both -> (N,); None: unknown.
OfPairs = Callable[[Tensor, Tensor], Tensor | None]


class Samples(NamedTuple):
    """Errors (N,), less is better, and uncertainties (N,) by name."""

    error: np.ndarray
    uncertainties: dict[str, np.ndarray]

    @classmethod
    def of(cls, error: Array, uncertainties: Mapping[str, Array]) -> Samples:
        """Convert tensors or arrays."""
        return cls(as_array(error, np.float64), {name: as_array(u, np.float64) for name, u in uncertainties.items()})


class Study(NamedTuple):
    """Errors and uncertainties of the queries, and reliability of probabilities."""

    samples: dict[str, Samples]
    reliability: dict[str, Reliability] = {}
    extra: dict[str, float] = {}
    too_large_for: tuple[str, ...] = ()

    def metrics(self) -> dict[str, float]:
        """Return `refusal/...`, named by `selective_metrics`, and `calibration/...`, named by `Reliability.metrics`."""
        out: dict[str, float] = {}
        for prefix, (error, uncertainties) in self.samples.items():
            out |= selective_metrics(error, uncertainties, prefix)
        out |= self.extra
        for prefix, found in self.reliability.items():
            out |= found.metrics(prefix)
        return out


def predict(scores: PairScores, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest class of every image, (N,), and the rank of its own class, (N,); the lower class wins ties."""
    parts = [(block.argmax(1), label_ranks(block, labels[rows])) for rows, block in scores.blocks()]
    predicted, ranks = (torch.cat(column) for column in zip(*parts))
    return predicted, ranks


def study_classification(
    scores: PairScores,
    labels: Tensor,
    matches: Matching,
    image: Tensor | None = None,
    classes: Tensor | None = None,
    of_pairs: OfPairs = lambda images, classes: None,
) -> tuple[Tensor, Tensor, Study]:
    """Predict and study a single-label task in one pass: the nearest class, the rank of the own one, (N,), the study.

    labels (N,); matches: of the score; image (N,), classes (C,): uncertainties, None for a model without.
    Refused by `score` (the negative of the best), `image`, `pair` (plus that of the chosen class, or `of_pairs`).
    `calibration/confidence`: of the chosen class, by softmax; `match`: of all pairs; `match_top1`: of the best pairs.
    """
    labels = labels.cpu()
    relevance = Relevance.from_pairs(torch.arange(len(labels)), labels, len(labels), scores.texts)
    check_fit(scores, relevance)
    nearest, pairs, sure, ranks = Nearest(scores.images), _pairs(relevance, matches), [], []
    for rows, block in scores.blocks():
        nearest.update(rows, block)
        ranks.append(label_ranks(block, labels[rows].to(block.device)).cpu())
        if pairs is not None:
            pairs.update(rows, block)
        if (logits := matches.score.scaled(block)) is not None:
            sure.append(confidence(logits, None if matches.doubt is None else matches.doubt[rows]).double().cpu())
    right = nearest.item == labels
    error, uncertainties = _samples(~right, nearest, {"image": image, "class": classes}, of_pairs)
    uncertainties.pop("class", None)
    found = {"calibration/confidence": reliability(torch.cat(sure), right)} if sure else {}
    if pairs is not None:
        found["calibration/match"] = pairs.reliability()
        top = cast(Tensor, matches.pairs(slice(None), nearest.item, nearest.score))
        found["calibration/match_top1"] = reliability(top, right)
    return nearest.item, torch.cat(ranks), Study({"refusal": Samples(error, uncertainties)}, found)


def study_retrieval(
    scores: PairScores,
    relevances: Sequence[Relevance],
    matches: Matching,
    image: Tensor | None = None,
    text: Tensor | None = None,
    of_pairs: OfPairs = lambda images, texts: None,
) -> tuple[list[Ranking], list[Ranking], Study]:
    """Rank and study a retrieval task in one pass per direction: images to texts and texts to images, by relevance.

    relevances: images x texts, the first is studied; other arguments as in `study_classification`. Error: no match in
    first place. Refused by `score`, the uncertainty of the query, of the item in first place, and of both (`pair`), so
    `auroc` is R-AUROC across modalities.
    """
    check_fit(scores, relevances[0])
    pairs = _pairs(relevances[0], matches)  # of one direction, as both have the same pairs
    texts, images = Nearest(scores.images), Nearest(scores.texts)
    i2t = rank_sparse(scores.image_rows, *relevances, others=[texts] if pairs is None else [texts, pairs])
    t2i = rank_sparse(scores.text_rows, *(relevance.transposed() for relevance in relevances), others=[images])
    sides, turned = {"image": image, "text": text}, {"text": text, "image": image}
    samples = {
        "refusal/i2t": _samples(~i2t[0].hit(1), texts, sides, of_pairs, i2t[0].answerable),
        "refusal/t2i": _samples(~t2i[0].hit(1), images, turned, lambda j, i: of_pairs(i, j), t2i[0].answerable),
    }
    found: dict[str, Reliability] = {}
    if pairs is not None:
        found["calibration/match"] = pairs.reliability()
        top_texts = cast(Tensor, matches.pairs(slice(None), texts.item, texts.score))
        top_images = cast(Tensor, matches.pairs(images.item, slice(None), images.score))
        found["calibration/match_i2t"] = reliability(top_texts, i2t[0].hit(1))
        found["calibration/match_t2i"] = reliability(top_images, t2i[0].hit(1))
    return i2t, t2i, Study({key: some for key, some in samples.items() if len(some.error)}, found)


def _pairs(relevance: Relevance, matches: Matching) -> MatchReliability | None:
    """Return the reliability of match probabilities, for scores that have them."""
    return None if matches.score.match_probability(torch.zeros(0)) is None else MatchReliability(relevance, matches)


def _samples(
    wrong: Tensor, nearest: Nearest, sides: Mapping[str, Tensor | None], of_pairs: OfPairs, kept: Index = slice(None)
) -> Samples:
    """Collect the queries of one direction; sides: the uncertainties of queries and gallery, in this order."""
    (name, asked), (other, gallery) = sides.items()
    uncertainties = {"score": -nearest.score}
    if asked is not None and gallery is not None:
        found = gallery[nearest.item]
        uncertainties |= {name: asked, other: found, "pair": asked + found}
    if (together := of_pairs(torch.arange(len(nearest.item)), nearest.item)) is not None:
        uncertainties["pair"] = together
    return Samples.of(wrong[kept], {key: u[kept] for key, u in uncertainties.items()})
