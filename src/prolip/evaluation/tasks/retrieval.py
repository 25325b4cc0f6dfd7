"""Captions of images and images of captions, both directions, by the most complete labels that there are."""

from __future__ import annotations

import torch

from prolip.evaluation.datasets import coco_labels
from prolip.evaluation.datasets.base import DamagedData, Dataset
from prolip.evaluation.embed import Features
from prolip.evaluation.metrics.blockwise import Relevance, rank_sparse
from prolip.evaluation.metrics.bootstrap import Clusters, Statistic, clustered, combine, mean_of
from prolip.evaluation.metrics.calibration import Matches
from prolip.evaluation.metrics.ranking import KS, Ranking, both_directions, retrieval_names
from prolip.evaluation.metrics.selective import recall_auroc
from prolip.evaluation.metrics.study import Study, study_retrieval
from prolip.evaluation.tasks.base import (
    Kind,
    Metrics,
    TaskMetrics,
    own_labels,
    pair_scores,
    pair_uncertainty_of,
    text_gaussians,
    too_small_for,
    uncertainty_of,
)
from prolip.evaluation.tasks.classification import BY_NEIGHBOURS, NEIGHBOURS
from prolip.scores import Score

#: Entry of a data set's info, by which it declares labels of its own -> the names of their metrics, and the metrics.
EXTRA = {"caption_ids": (coco_labels.names_of_labels, coco_labels.metrics_of_labels)}


def texts(features: Features) -> tuple[list[str], None]:
    return list(features.captions), None


def names(dataset: Dataset) -> list[str]:
    """Of both directions, `own/...`, and those of further labels."""
    found = [*retrieval_names(images=min(dataset.size or 10, 10)), "mean_recall@1"]
    if dataset.relevance is not None or dataset.info.get("relevant_by") == "label":
        found += [f"own/{name}" for name in found]
    declared = (names_of for entry, (names_of, _) in EXTRA.items() if entry in dataset.info)
    return found + [name for names_of in declared for name in names_of(dataset.info)]


def evaluate(features: Features, score: Score, confusion: bool = False) -> TaskMetrics:
    """Both directions by the most complete labels there are; where that is not each image's own captions, these too.

    `i2t/...`, `t2i/...`, `rsum`, `mean_recall@1` (DataComp's main metric: both directions at 1), and `own/...`; what
    the data set adds by labels of its own, see EXTRA. Intervals draw clusters in both directions: an image together
    with its own captions, the ones stored with it. Further matches join no clusters: such links could make one cluster
    of the whole set.
    """
    scores, (own, complete) = pair_scores(features, score), relevance_of(features)
    labels = [own] if complete is None else [complete, own]
    i2t = rank_sparse(scores.image_rows, *labels)
    t2i = rank_sparse(scores.text_rows, *(relevance.transposed() for relevance in labels))
    metrics: Metrics = {}
    statistics: dict[str, Statistic] = {}
    assert features.owners is not None
    clusters = {"texts": Clusters("images", features.owners.numpy(), len(features.keys))}
    for prefix, a, b in zip(("", "own/"), i2t, t2i):
        both = both_directions(a, b)
        both["mean_recall@1"] = (both["i2t/R@1"] + both["t2i/R@1"]) / 2
        metrics |= {f"{prefix}{name}": value for name, value in both.items()}
        statistics |= {
            f"{prefix}{name}": clustered(value, clusters) for name, value in statistics_of(a, b).items() if name in both
        }
    dataset = features.dataset
    for entry, (_, extra) in EXTRA.items():
        metrics |= extra(scores, dataset.info) if entry in dataset.info else {}
    info = {"texts": len(features.captions), **too_small_for(retrieval_names(), metrics)}
    return TaskMetrics(metrics, info, statistics)


def statistics_of(i2t: Ranking, t2i: Ranking, texts: str = "texts") -> dict[str, Statistic]:
    """The metrics that are means over queries, images of one direction and texts, called `texts`, of the other."""
    out: dict[str, Statistic] = {}
    for way, ranking, queries in (("i2t", i2t, "images"), ("t2i", t2i, texts)):
        kept = ranking.answerable
        values = {f"R@{k}": ranking.hit(k).double().where(kept, torch.nan) for k in KS}
        values |= {"mAP@R": ranking.ap_at_r, "R-Precision": ranking.r_precision}
        out |= {f"{way}/{name}": mean_of(value, queries) for name, value in values.items()}
    out["mean_recall@1"] = combine([(0.5, out["i2t/R@1"]), (0.5, out["t2i/R@1"])])
    out["rsum"] = combine([(100.0, out[f"{way}/R@{k}"]) for way in ("i2t", "t2i") for k in KS])
    return out


def relevance_of(features: Features) -> tuple[Relevance, Relevance | None]:
    """Images x texts: each image's own captions, and the complete labels where the data set has more than those.

    DamagedData for a pair of `dataset.relevance` that names no image or no caption.
    """
    owners, images = features.owners, len(features.keys)
    assert owners is not None
    captions = torch.arange(len(owners))
    own = Relevance.from_pairs(owners, captions, images, len(owners))
    dataset = features.dataset
    if dataset.info.get("relevant_by") == "label":
        labels = own_labels(features)
        pairs = [
            torch.cartesian_prod((labels == label).nonzero().flatten(), (labels[owners] == label).nonzero().flatten())
            for label in labels.unique()
        ]
        image, text = torch.cat(pairs).unbind(1)
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
    image, text = torch.cat([owners, further[:, 0]]), torch.cat([captions, further[:, 1]])
    return own, Relevance.from_pairs(image, text, images, len(owners))


def study(features: Features, score: Score) -> Study:
    """Error: no match in the first place, by the most complete labels; `refusal/R-AUROC` where images have classes."""
    own, complete = relevance_of(features)
    image, text = (features.image, features.text) if features.model.probabilistic else (None, None)
    found = study_retrieval(
        pair_scores(features, score),
        own if complete is None else complete,
        image,
        text,
        Matches.of(score, features.evidence, text_gaussians(features)),
        uncertainty_of(features),
        pair_uncertainty_of(features),
    )[2]
    labels = features.labels
    if labels is None or not features.model.probabilistic or len(labels) < 2:
        return found
    if len(labels) > NEIGHBOURS:
        return found._replace(too_large_for=BY_NEIGHBOURS)
    neighbours = recall_auroc(features.image, labels, uncertainty_of(features)(features.image))
    return found._replace(extra={f"refusal/{key}": value for key, value in neighbours.items()})


KIND = Kind("mean_recall@1", texts, names, evaluate, study)
