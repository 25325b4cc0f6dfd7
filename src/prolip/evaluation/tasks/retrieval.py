"""Retrieval of captions by images and of images by captions, by the most complete labels available."""

from __future__ import annotations

import torch

from prolip.evaluation.datasets import coco_labels
from prolip.evaluation.datasets.base import DamagedData, Dataset
from prolip.evaluation.embed import Features
from prolip.evaluation.metrics.bootstrap import Clusters, Statistic, clustered
from prolip.evaluation.metrics.ranking import both_directions, retrieval_names, statistics_of
from prolip.evaluation.metrics.streaming import Relevance, rank_sparse
from prolip.evaluation.metrics.study import study_retrieval
from prolip.evaluation.tasks import base
from prolip.evaluation.tasks.base import Metrics, Scored, Task
from prolip.scores import Score

#: Entry of a data set's info, that declares its own labels -> names of their metrics, and the metrics.
EXTRA = {"caption_ids": (coco_labels.names_of_labels, coco_labels.metrics_of_labels)}


def texts(features: Features) -> tuple[list[str], None]:
    return list(features.captions), None


def names(dataset: Dataset) -> list[str]:
    """Return the metric names of both directions, of `own/...` and of additional labels."""
    found = [*retrieval_names(images=min(dataset.size or 10, 10)), "mean_recall@1"]
    if dataset.relevance is not None or dataset.info.get("relevant_by") == "label":
        found += [f"own/{name}" for name in found]
    declared = (names_of for entry, (names_of, _) in EXTRA.items() if entry in dataset.info)
    return found + [name for names_of in declared for name in names_of(dataset.info)]


def score_task(features: Features, score: Score, study: bool = False) -> Scored:
    """Score both directions by the most complete labels; if these are additional, also `own/...` by own captions.

    Intervals draw an image with its own captions: clusters by all matches could join the whole set.
    """
    scores, (own, complete) = base.pair_scores(features, score), relevance_of(features)
    labels, found = [own] if complete is None else [complete, own], None
    if study:
        i2t, t2i, found = study_retrieval(scores, labels, *base.study_parts(features, score))
        found = base.with_neighbours(found, features)
    else:
        i2t = rank_sparse(scores.image_rows, *labels)
        t2i = rank_sparse(scores.text_rows, *(relevance.transposed() for relevance in labels))
    assert features.owners is not None
    clusters = {"texts": Clusters("images", features.owners.numpy(), len(features.keys))}
    statistics: dict[str, Statistic] = {}
    others: Metrics = {}
    for prefix, a, b in zip(("", "own/"), i2t, t2i):
        means = statistics_of(a, b)
        statistics |= {f"{prefix}{name}": clustered(one, clusters) for name, one in means.items()}
        both = both_directions(a, b) | {"mean_recall@1": means["mean_recall@1"].value}
        others |= {f"{prefix}{name}": value for name, value in both.items()}
    info = {"texts": len(features.captions), **base.too_small_for(retrieval_names(), others)}
    for entry, (_, extra) in EXTRA.items():
        others |= extra(scores, features.dataset.info) if entry in features.dataset.info else {}
    return Scored(statistics, others, info, found)


def relevance_of(features: Features) -> tuple[Relevance, Relevance | None]:
    """Return images x texts: each image's own captions, and the complete labels if there are more. DamagedData."""
    owners, images = features.owners, len(features.keys)
    assert owners is not None
    captions = torch.arange(len(owners))
    own = Relevance.from_pairs(owners, captions, images, len(owners))
    dataset = features.dataset
    if dataset.info.get("relevant_by") == "label":
        labels = base.own_labels(features)
        pairs = []
        for label in labels.unique():
            pairs.append(torch.cartesian_prod(*((x == label).nonzero().flatten() for x in (labels, labels[owners]))))
        image, text = torch.cat(pairs).unbind(1)
        return own, Relevance.from_pairs(image, text, images, len(owners))
    if dataset.relevance is None:
        return own, None
    row = {key: i for i, key in enumerate(features.keys)}
    if strange := [pair for pair in dataset.relevance if pair[0] not in row or not 0 <= pair[1] < len(owners)]:
        what = f"{len(strange)} relevant pairs of {dataset.source} name no image or none of its {len(owners)} captions"
        raise DamagedData(f"{what}, such as {strange[0]}: give the list of these shards")
    further = torch.tensor([(row[key], index) for key, index in dataset.relevance]).reshape(-1, 2)
    image, text = torch.cat([owners, further[:, 0]]), torch.cat([captions, further[:, 1]])
    return own, Relevance.from_pairs(image, text, images, len(owners))


TASK = Task("mean_recall@1", texts, names, score_task)
