"""COCO Caption's three sets of labels on one score matrix: COCO 5K and 5 x 1K folds, CxC, ECCV Caption; and PMRP.

The labels, by COCO's ids of images and captions, are the files of the package eccv_caption 0.1.0; its code is not
run. Two captions in ECCV Caption's matches are not in the test split; they count in R, as in the package.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from prolip.evaluation.metrics.ranking import KS, both_directions, plausible_match
from prolip.evaluation.metrics.streaming import PairScores, Relevance, rank_sparse
from prolip.utils.documents import loads

log = logging.getLogger(__name__)

PACKAGE = "eccv_caption"
#: Our name of a label set -> the package's name.
LABELS = {"coco": "original", "cxc": "cxc", "eccv": "eccv"}
FOLDS = 5
WAYS = ("i2t", "t2i")
#: Metrics of COCO's and CxC's labels, and of ECCV Caption's in each direction.
RECALLS = (*(f"{way}/R@{k}" for way in WAYS for k in KS), "rsum")
ECCV = ("mAP@R", "R-Precision", *(f"R@{k}" for k in KS))
CAPTIONS_OF_SPLIT = 25_000  # of the Karpathy test split, five for each of 5,000 images


class MatchingIds(NamedTuple):
    """Matches by id, in both directions; they may differ (ECCV Caption's do)."""

    captions_of: dict[int, list[int]]
    images_of: dict[int, list[int]]


class Annotations(NamedTuple):
    """Label sets of a COCO test split, and its captions in the order of the folds."""

    coco: MatchingIds
    cxc: MatchingIds
    eccv: MatchingIds
    captions: tuple[int, ...]


def load_annotations(folder: str | Path | None = None) -> Annotations:
    """Read the label sets from `folder`, by default from the installed package. FileNotFoundError with the remedy."""
    get = f"pip install {PACKAGE} (785 kB) for the annotations of COCO 5K, CxC and ECCV Caption"
    if not folder:
        spec = importlib.util.find_spec(PACKAGE)  # imports nothing
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(f"the package {PACKAGE} is not installed: {get}")
        folder = Path(spec.submodule_search_locations[0]) / "data"

    def read(name: str, way: str) -> dict[int, list[int]]:
        table = json.loads((Path(folder) / f"{name}_{way}.json").read_text(encoding="utf-8"))
        return {int(key): [int(x) for x in values] for key, values in table.items()}

    try:
        sets = {
            ours: MatchingIds(read(theirs, "image_to_caption"), read(theirs, "caption_to_image"))
            for ours, theirs in LABELS.items()
        }
        return Annotations(**sets, captions=tuple(np.load(Path(folder) / "coco_test_ids.npy").tolist()))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{folder} has no {Path(error.filename).name}: {get}") from error


_packaged = lru_cache(maxsize=1)(load_annotations)


# --- metrics ----------------------------------------------------------------------------------------------------------
def label_set_metrics(
    scores: PairScores, image_ids: Sequence[int], caption_ids: Sequence[int], annotations: Annotations
) -> dict[str, float]:
    """Compute all metrics of the four benchmarks, shares in [0, 1]; scores: images x captions in the order of the ids.

    `coco_5k/...` and `cxc/...`: i2t/R@k, t2i/R@k, rsum; `coco_1k/...`: the same averaged over five folds; `eccv/...`:
    i2t and t2i mAP@R, R-Precision, R@k, and their means. Images and captions without annotation (some splits list
    25,010 captions) are not in the galleries. Raises ValueError when annotated ids are missing.
    """
    images = _places("image", image_ids, scores.images, annotations.coco.captions_of)
    captions = _places("caption", caption_ids, scores.texts, annotations.captions)
    split = scores.subset(torch.tensor(list(images.values())), torch.tensor(list(captions.values())))
    if split.images == scores.images and split.texts == scores.texts:
        split = scores  # no index, no copy
    rows, columns = list(images), list(captions)
    coco, cxc, eccv = _both(split, rows, columns, [annotations.coco, annotations.cxc, annotations.eccv])
    folds, size = [], len(annotations.captions) // FOLDS
    for start in range(0, FOLDS * size, size):
        texts = set(annotations.captions[start : start + size])
        shown = {annotations.coco.images_of[text][0] for text in texts}
        i, j = ([n for n, key in enumerate(ids) if key in fold] for ids, fold in ((rows, shown), (columns, texts)))
        part = split.subset(torch.tensor(i), torch.tensor(j))
        folds += _both(part, [rows[n] for n in i], [columns[n] for n in j], [annotations.coco])
    out = {f"coco_5k/{key}": coco[key] for key in RECALLS}
    out |= {f"coco_1k/{key}": fmean(fold[key] for fold in folds) for key in RECALLS}
    out |= {f"cxc/{key}": cxc[key] for key in RECALLS}
    for name in ECCV:
        out |= {f"eccv/{way}/{name}": eccv[f"{way}/{name}"] for way in WAYS}
        out[f"eccv/{name}"] = fmean(eccv[f"{way}/{name}"] for way in WAYS)
    return out


def names_of_labels(info: dict[str, Any]) -> list[str]:
    """Return the names of `label_set_metrics`, [] for a data set without all captions of the split."""
    names = [f"{prefix}/{key}" for prefix in ("coco_5k", "coco_1k", "cxc") for key in RECALLS]
    names += [f"eccv/{way}{name}" for name in ECCV for way in ("i2t/", "t2i/", "")]
    return names if len(info["caption_ids"]) >= CAPTIONS_OF_SPLIT else []


def metrics_of_labels(scores: PairScores, info: dict[str, Any]) -> dict[str, float]:
    """Compute `label_set_metrics` of COCO's whole Karpathy test split; {} for others and, with a warning, no labels."""
    image_ids, caption_ids = info["image_ids"], info["caption_ids"]
    try:
        annotations = _packaged()
    except FileNotFoundError as error:
        if len(caption_ids) == CAPTIONS_OF_SPLIT:
            log.warning("skipping COCO 1K, CxC and ECCV Caption: %s", error)
        return {}
    if not set(annotations.captions) <= set(caption_ids) or not annotations.coco.captions_of.keys() <= set(image_ids):
        return {}
    return label_set_metrics(scores, image_ids, caption_ids, annotations)


def _places(what: str, ids: Sequence[int], size: int, annotated: Iterable[int]) -> dict[int, int]:
    """Return annotated ids and their places, in the order of `ids`, one for each row or column, each once."""
    if len(ids) != size or len(set(ids)) != size:
        counts = f"{len(ids)} {what} ids, {len(set(ids))} of them distinct, for {size} {what}s"
        raise ValueError(f"{counts}: give each its own id")
    wanted = set(annotated)
    places = {int(key): i for i, key in enumerate(ids) if int(key) in wanted}
    if lost := sorted(wanted - places.keys()):
        missing = f"{len(lost)} of {len(wanted)} annotated {what}s are missing, {lost[0]} first"
        raise ValueError(f"{missing}: give the whole test split, with COCO's own {what} ids")
    return places


def _both(
    scores: PairScores, image_ids: list[int], caption_ids: list[int], sets: Sequence[MatchingIds]
) -> list[dict[str, float]]:
    """Compute `both_directions` for every label set, reading the scores once per direction."""
    i2t = [Relevance.from_ids(labels.captions_of, image_ids, caption_ids) for labels in sets]
    t2i = [Relevance.from_ids(labels.images_of, caption_ids, image_ids) for labels in sets]
    return list(map(both_directions, rank_sparse(scores.image_rows, *i2t), rank_sparse(scores.text_rows, *t2i)))


# --- PMRP -------------------------------------------------------------------------------------------------------------
def category_labels(instances: str | Path, image_ids: Sequence[int]) -> Tensor:
    """Return COCO's categories in each image, from instances_val2014.json: (N, 80) bool."""
    path = Path(instances)
    if not path.exists():
        get = "from annotations_trainval2014.zip at cocodataset.org"
        raise FileNotFoundError(f"no {path}: PMRP needs COCO's instances_val2014.json, {get}")
    content = loads(path.read_text(encoding="utf-8"))
    column = {key: i for i, key in enumerate(sorted(category["id"] for category in content["categories"]))}
    row = {int(key): i for i, key in enumerate(image_ids)}
    listed = {image["id"] for image in content["images"]}
    if missing := [key for key in row if key not in listed]:
        what = f"{len(missing)} of {len(row)} images, {missing[0]} first, are not listed in {path}"
        raise ValueError(f"{what}: give the instances file of their split (Karpathy's test images are from val2014)")
    labels = torch.zeros(len(row), len(column), dtype=torch.bool)
    for annotation in content["annotations"]:
        if annotation["image_id"] in row:
            labels[row[annotation["image_id"]], column[annotation["category_id"]]] = True
    return labels


def plausible(scores: PairScores, labels: Tensor, image_of: Sequence[int] | Tensor) -> dict[str, float]:
    """Compute PMRP of both directions: labels (N, 80) of images, image_of (M,) the image of every caption."""
    caption_labels = labels[torch.as_tensor(image_of)]
    i2t = plausible_match(scores.image_rows, labels, caption_labels)
    t2i = plausible_match(scores.text_rows, caption_labels, labels)
    return {f"{way}/{key}": value for way, found in (("i2t", i2t), ("t2i", t2i)) for key, value in found.items()}
