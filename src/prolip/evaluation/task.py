"""One task: from features to metrics, with every similarity, in bounded memory.

Metrics are shares in [0, 1] by clip_benchmark's and DataComp's names where they have one: `acc1`, `acc5` (with five
classes or more), `mean_per_class_recall`; `mAP`; `i2t/R@1` ... `rsum` and `mean_recall@1`; `jaccard_score_10-12`. What
a set is too small for, as R@10 among nine images is always 1, is left out and named in `info["too_small_for"]`.
"""
from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from prolip.evaluation import coco
from prolip.evaluation.datacomp.scores import Association as Instance
from prolip.evaluation.datacomp.scores import association_metrics
from prolip.evaluation.datasets.base import DamagedData, Dataset
from prolip.evaluation.embed import Similarity, similarity_scores
from prolip.evaluation.embedder import Embedder
from prolip.evaluation.feature_store import FeatureStore
from prolip.evaluation.features import Features, compute_features
from prolip.evaluation.metrics import blockwise as large
from prolip.evaluation.metrics import classification
from prolip.evaluation.metrics.blockwise import PairScores, Relevance
from prolip.evaluation.metrics.ranking import both_directions, retrieval_names
from prolip.gaussian import Gaussian

TOP = 5
MAIN = {
    "classification": "acc1",
    "multilabel": "mAP",
    "retrieval": "mean_recall@1",
    "association": "jaccard_score_10-12",
}


@dataclass(frozen=True)
class TaskResult:
    """The metrics of one task, JSON-able. main_metric: one of their names; info: what was run and what was left out."""

    key: str
    metrics: dict[str, float]
    main_metric: str
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The main metric."""
        return self.metrics[self.main_metric]

    def to_dict(self) -> dict[str, Any]:
        """JSON values; what is not finite is null."""
        finite = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        return asdict(self) | {"metrics": finite}


@dataclass(frozen=True)
class Scored:
    """A classification, sample by sample, for group metrics and figures of uncertainty.

    keys: N; labels: (N,) int64; groups: (N, G) or None; predictions: (N, k) the k nearest classes, nearest first (k: 5
    or all classes); score: (N,) of the nearest; rank: (N,) of the own class, from 1; image: (N, D); classes: (C, D).
    """

    keys: tuple[str, ...]
    labels: Tensor
    groups: Any
    predictions: Tensor
    score: Tensor
    rank: Tensor
    image: Gaussian
    classes: Gaussian


def evaluate_dataset(
    dataset: Dataset,
    source: Embedder | Features,
    similarity: Similarity = None,
    store: FeatureStore | None = None,
    confusion: bool = False,
    **options: Any,
) -> TaskResult:
    """The metrics of a data set by a model or by its features.

    similarity: as in `similarity_scores`, default: that of the model's method; a deterministic model takes those of
    points alone; confusion: the matrix of
    counts in `info`, rows the true class; options: of `compute_features`. Raises ValueError for what cannot be scored
    and DamagedData for a damaged set.
    """
    started = time.perf_counter()
    card = source.card if isinstance(source, Embedder) else source.model
    score = card.scored_by(similarity)
    features = compute_features(dataset, source, store, **options) if isinstance(source, Embedder) else source
    metrics, info = evaluate_features(features, score, confusion)
    main = MAIN[dataset.kind] if MAIN[dataset.kind] in metrics else next(iter(metrics))
    info |= {"model": card.to_dict(), "similarity": score.name, "images": len(features.keys), "source": dataset.source}
    if features.damaged:
        info["damaged"] = features.damaged
    return TaskResult(dataset.name, metrics, main, info | {"seconds": round(time.perf_counter() - started, 2)})


def metric_names(dataset: Dataset) -> list[str]:
    """What the metrics of a task will be called, known before any is computed."""
    if dataset.kind == "association":
        blank = [
            Instance(torch.zeros(len(one.images)), torch.tensor([key in one.associated for key in one.images]))
            for one in dataset.associations
        ]
        return list(association_metrics(blank))
    if dataset.kind == "multilabel":
        return list(classification.multilabel(torch.zeros(1, 1), torch.ones(1, 1)))
    if dataset.kind == "classification":
        return ["acc1", *(["acc5"] if len(dataset.classnames) >= TOP else []), "mean_per_class_recall"]
    names = [*retrieval_names(images=min(dataset.size or 10, 10)), "mean_recall@1"]
    if dataset.relevance is not None or dataset.info.get("relevant_by") == "label":
        names += [f"own/{name}" for name in names]
    return names + (coco.figure_names() if len(dataset.info.get("caption_ids", ())) >= coco.CAPTIONS_OF_SPLIT else [])


def evaluate_features(
    features: Features, similarity: Similarity = None, confusion: bool = False
) -> tuple[dict[str, float], dict[str, Any]]:
    """The metrics of a task by its kind, and what `info` holds of them."""
    similarity = features.model.scored_by(similarity)
    kind = features.dataset.kind
    if kind == "retrieval":
        metrics = retrieval_metrics(features, similarity)
        return metrics, {"texts": len(features.captions), **too_small_for(retrieval_names(), metrics)}
    if kind == "association":
        return association_metrics(list(instances(features, similarity))), {}
    if kind == "multilabel":
        scores = torch.cat([block for _, block in score_blocks(features, similarity)])
        return classification.multilabel(scores, own_labels(features)), {"classes": scores.shape[1]}
    scored = score_classes(features, similarity)
    info: dict[str, Any] = {"classes": len(scored.classes.mean)}
    if confusion:
        predicted = scored.predictions[:, 0]
        info["confusion"] = classification.confusion_matrix(predicted, scored.labels, info["classes"]).tolist()
    metrics = classification_metrics(scored)
    return metrics, info | too_small_for(["acc5"], metrics)


def too_small_for(names: Sequence[str], metrics: Mapping[str, float]) -> dict[str, Any]:
    """What `info` says of figures that were left out, nothing where all are there."""
    absent = [name for name in names if name not in metrics]
    return {"too_small_for": absent} if absent else {}


# --- classes ---------------------------------------------------------------------------------------------------------
def score_blocks(features: Features, similarity: Similarity) -> Iterator[tuple[slice, Tensor]]:
    """The rows of the (images, classes) scores, some at a time."""
    scores = pair_scores(features, similarity)
    return large.row_blocks(scores.image_rows, scores.images, scores.texts)


def score_classes(features: Features, similarity: Similarity = None, k: int = TOP) -> Scored:
    """Every image against all classes; equal scores go to the lower class. ValueError without labels."""
    labels, parts = own_labels(features), []
    for rows, block in score_blocks(features, similarity):
        order = block.argsort(dim=1, descending=True, stable=True)[:, :k]
        best = block.gather(1, order[:, :1]).squeeze(1)
        parts.append((order, best, classification.label_ranks(block, labels[rows])))
    predictions, score, rank = (torch.cat(column) for column in zip(*parts))
    return Scored(
        features.keys, labels, features.groups, predictions, score, rank, features.image, texts_of(features)
    )


def classification_metrics(scored: Scored) -> dict[str, float]:
    """acc1, acc5 (with five classes or more) and the mean per-class recall."""
    out = {"acc1": float((scored.rank <= 1).double().mean())}
    if len(scored.classes.mean) >= TOP:
        out["acc5"] = float((scored.rank <= 5).double().mean())
    predicted = scored.predictions[:, 0]
    return out | {"mean_per_class_recall": classification.mean_per_class_recall(predicted, scored.labels)}


def own_labels(features: Features) -> Tensor:
    """The labels. ValueError where the files have none, or more classes than there are names."""
    if features.labels is None:
        raise ValueError(
            f"{features.dataset.source} has no labels (.cls), only metadata (.npy): sets of faces are scored by python "
            "-m prolip.evaluation.datacomp"
        )
    return features.labels


def texts_of(features: Features) -> Gaussian:
    """The Gaussians of the texts. ValueError where only images were embedded."""
    if features.text is None:
        raise ValueError(f"the features of {features.dataset.name} have no texts: use compute_features")
    return features.text


# --- captions and cues -----------------------------------------------------------------------------------------------
def pair_scores(features: Features, similarity: Similarity) -> PairScores:
    """Images against texts, computed when asked for."""
    return PairScores.from_gaussians(features.image, texts_of(features), features.model.scored_by(similarity))


def retrieval_metrics(features: Features, similarity: Similarity = None) -> dict[str, float]:
    """Both directions by the most complete labels there are; where that is not each image's own captions, these too.

    `i2t/...`, `t2i/...`, `rsum`, `mean_recall@1` (DataComp's main metric: both directions at 1), and `own/...`; of
    COCO's Karpathy test split also `coco_5k/...`, `coco_1k/...`, `cxc/...` and `eccv/...`, see `coco.evaluate`.
    """
    scores, (own, complete) = pair_scores(features, similarity), relevance_of(features)
    labels = [own] if complete is None else [complete, own]
    i2t = large.rank_sparse(scores.image_rows, *labels)
    t2i = large.rank_sparse(scores.text_rows, *(relevance.transposed() for relevance in labels))
    out: dict[str, float] = {}
    for prefix, a, b in zip(("", "own/"), i2t, t2i):
        both = both_directions(a, b)
        both["mean_recall@1"] = (both["i2t/R@1"] + both["t2i/R@1"]) / 2
        out |= {f"{prefix}{name}": value for name, value in both.items()}
    info = features.dataset.info
    if "caption_ids" in info:
        out |= coco.figures_of_split(scores, info["image_ids"], info["caption_ids"])
    return out


def relevance_of(features: Features) -> tuple[Relevance, Relevance | None]:
    """Images x texts: each image's own captions, and the complete labels where the data set has more than those.

    DamagedData for a pair of `dataset.relevance` that names no image or no caption.
    """
    owners, images = features.owners, len(features.keys)
    assert owners is not None
    texts = torch.arange(len(owners))
    own = Relevance.from_pairs(owners, texts, images, len(owners))
    dataset = features.dataset
    if dataset.info.get("relevant_by") == "label":
        image, text = same_label(own_labels(features), owners)
        return own, Relevance.from_pairs(image, text, images, len(owners))
    if dataset.relevance is None:
        return own, None
    row = {key: i for i, key in enumerate(features.keys)}
    strange = [pair for pair in dataset.relevance if pair[0] not in row or not 0 <= pair[1] < len(owners)]
    if strange:
        raise DamagedData(
            f"{len(strange)} relevant pairs of {dataset.source} name no image or none of its {len(owners)} captions, "
            f"such as {strange[0]}: the list belongs to other shards"
        )
    further = torch.tensor([(row[key], index) for key, index in dataset.relevance]).reshape(-1, 2)
    image, text = torch.cat([owners, further[:, 0]]), torch.cat([texts, further[:, 1]])
    return own, Relevance.from_pairs(image, text, images, len(owners))


def same_label(labels: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of an image and a text whose image has its label, label by label: (P,), (P,)."""
    pairs = [
        torch.cartesian_prod((labels == label).nonzero().flatten(), (labels[owners] == label).nonzero().flatten())
        for label in labels.unique()
    ]
    image, text = torch.cat(pairs).unbind(1)
    return image, text


def instances(features: Features, similarity: Similarity = None) -> Iterator[Instance]:
    """The candidates' scores against each cue. DamagedData where a candidate's image was left out."""
    row = {key: i for i, key in enumerate(features.keys)}
    text, score = texts_of(features), features.model.scored_by(similarity)
    for number, instance in enumerate(features.dataset.associations):
        missing = [key for key in instance.images if key not in row]
        if missing:
            raise DamagedData(f"the cue {instance.cue!r} has candidates that were left out: {', '.join(missing)}")
        candidates = features.image.select([row[key] for key in instance.images])
        scores = similarity_scores(candidates, text.select(slice(number, number + 1)), score).squeeze(1)
        yield Instance(scores, torch.tensor([key in instance.associated for key in instance.images]))


__all__ = [
    "Scored", "TaskResult", "classification_metrics", "evaluate_dataset", "evaluate_features", "metric_names",
    "retrieval_metrics", "score_classes",
]  # fmt: skip
