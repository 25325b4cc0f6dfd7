"""From scores to DataComp's metrics: pure functions, shares in [0, 1], keys as DataComp's own evaluation names them.

So a line of ours can be laid beside one of its `eval_results.jsonl`. Where DataComp's code and its intention differ
(the region "Other" of FMoW), both are given and the main metric is what its published figures hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from prolip.evaluation.metrics.classification import macro_f1
from prolip.evaluation.metrics.ranking import KS
from prolip.evaluation.suites.datacomp.tasks import FACE_PROMPTS, FMOW_OTHER, Task

#: Classes of the prompts "toxic", from and up to: 14 people by race and gender come first (CLIP section 7.1).
CRIME, NON_HUMAN = (18, None), (14, 18)

#: Of the tasks with one grouping: the name of the accuracy, among how many classes, and the column of the groups.
GROUPED = {
    "wilds/camelyon17": ("acc", 1, "slide"),
    "fairness/dollar_street": ("acc_top5", 5, "income_ds"),
    "fairness/geode": ("acc", 1, "region"),
}


def by_group(
    name: str, hits: Tensor, fields: Sequence[str], columns: np.ndarray, without: str | None = None
) -> dict[str, float]:
    """Means of hits (N,) in groups of equal columns (N, F): `<name>_<field>:<value>`, `count_...` and `<name>_wg`.

    With several fields a group is a combination. `<name>_wg` is the worst group, of those that have images (WILDS);
    `<name>_wg_without_other` leaves out the group that is called `without`.
    """
    values, group = np.unique(columns, axis=0, return_inverse=True)
    names = ["_".join(f"{field}:{int(value)}" for field, value in zip(fields, row)) for row in values]
    members = {label: hits.double().numpy()[group.reshape(-1) == number] for number, label in enumerate(names)}
    means = {label: float(hit.mean()) for label, hit in members.items()}
    out = {f"{name}_{label}": mean for label, mean in means.items()}
    out |= {f"count_{label}": float(len(hit)) for label, hit in members.items()}
    if without is not None and names != [without]:
        out[f"{name}_wg_without_other"] = min(mean for label, mean in means.items() if label != without)
    return out | {f"{name}_wg": min(means.values())}


def added_metrics(
    task: Task, predicted: Tensor, ranks: Tensor, labels: Tensor, groups: np.ndarray | None
) -> dict[str, float]:
    """What a task has beside the figures of its kind, of classes predicted, ranks of the true ones, and labels, (N,).

    groups: (N, columns of the task). Raises ValueError where a task needs groups and there are none.
    """
    if task.key == "wilds/iwildcam":
        return {"F1-macro_all": macro_f1(predicted, labels)}
    if not task.groups:
        return {}
    columns = group_columns(task, groups, len(labels))
    if task.key == "wilds/fmow":
        return _fmow(ranks <= 1, columns)
    name, most, field = GROUPED[task.key]
    return by_group(name, ranks <= most, [field], columns[:, [task.groups.index(field)]])


def _fmow(hits: Tensor, columns: np.ndarray) -> dict[str, float]:
    """Worst year and worst region; the main one holds the 4 images of "Other", as the published figures do.

    DataComp's code means to leave them out by the word "Other", which its groups are not called by.
    """
    years = by_group("acc", hits, ["year"], columns[:, [1]])
    regions = by_group("acc", hits, ["region"], columns[:, [0]], without=f"region:{FMOW_OTHER}")
    names = {"acc_wg": "acc_worst_region", "acc_wg_without_other": "acc_worst_region_without_other"}
    out = {names.get(key, key): value for key, value in regions.items()}
    return out | {{"acc_wg": "acc_worst_year"}.get(key, key): value for key, value in years.items()}


def group_columns(task: Task, groups: np.ndarray | None, images: int) -> np.ndarray:
    """The metadata as (N, columns) integers. ValueError where it is missing or has fewer columns than the task's."""
    if groups is None:
        raise ValueError(
            f"{task.name} needs the .npy beside each image ({', '.join(task.groups)}): fetch {task.repository} again"
        )
    groups = np.asarray(groups)
    if groups.ndim != 2 or len(groups) != images or groups.shape[1] < len(task.groups):
        raise ValueError(
            f"{task.name}: the metadata is {groups.shape}, wanted ({images}, {len(task.groups)}): "
            f"{', '.join(task.groups)}"
        )
    return groups.astype(np.int64)


def retrieval_metrics(both: Mapping[str, float]) -> dict[str, float]:
    """The figures of retrieval by DataComp's names: those of images and their own captions, where others match too.

    text_retrieval: the texts of an image (i2t); image_retrieval: the image of a text.
    """
    prefix = "own/" if "own/mean_recall@1" in both else ""
    keys = {
        f"{name}_recall@{k}": f"{prefix}{way}/R@{k}"
        for name, way in (("text_retrieval", "i2t"), ("image_retrieval", "t2i"))
        for k in KS
    }
    keys["mean_recall@1"] = f"{prefix}mean_recall@1"
    return {name: both[key] for name, key in keys.items() if key in both}


def face_metrics(task: Task, predicted: Mapping[str, Tensor], groups: np.ndarray | None) -> dict[str, float]:
    """The tables of CLIP's section 7.1 as DataComp has them; predicted: (N,) class of each of `FACE_PROMPTS`.

    acc_race (white or not, by that), acc_gender, acc_age (by that), acc_gender_x (by race and gender), and how often
    toxicity_crime and toxicity_nonhuman prompts win (by race). `_avg` over all images; the worst group is `_wg`, the
    lowest, of an accuracy and `_max`, the highest, of a toxicity.
    """
    columns = group_columns(task, groups, len(predicted["race"]))
    age, gender, _, binary = torch.from_numpy(columns[:, :4]).unbind(1)
    out: dict[str, float] = {}

    def add(name: str, hits: Tensor, fields: Sequence[str]) -> None:
        picked = columns[:, [task.groups.index(field) for field in fields]]
        out.update({f"{name}_avg": float(hits.double().mean())} | by_group(name, hits, fields, picked))

    add("acc_race", (predicted["race"] != 1) == binary.bool(), ["race_binary"])
    add("acc_gender", predicted["gender"] == gender, ["race_binary"])
    add("acc_age", predicted["age"] == age, ["race_binary"])
    add("acc_gender_x", predicted["gender"] == gender, ["race", "gender"])
    for name, (start, end) in (("toxicity_crime", CRIME), ("toxicity_nonhuman", NON_HUMAN)):
        toxic = predicted["toxic"] >= start
        add(name, toxic if end is None else toxic & (predicted["toxic"] < end), ["race"])
        del out[f"{name}_wg"]  # the lowest share is the best group here
        out[f"{name}_max"] = max(value for key, value in out.items() if key.startswith(f"{name}_race:"))
    return out


def split_prompts(lines: Sequence[str], what: str) -> dict[str, list[str]]:
    """Class names or templates of the face sets, `objective:text`, by objective. ValueError where one has none."""
    out: dict[str, list[str]] = {objective: [] for objective in FACE_PROMPTS}
    for line in lines:
        objective, colon, text = line.partition(":")
        if not colon or objective not in out:
            raise ValueError(f"the line {line!r} of the {what} is not one of {', '.join(f'{o}:...' for o in out)}")
        out[objective].append(text)
    empty = [objective for objective, texts in out.items() if not texts]
    if empty:
        raise ValueError(f"no {what} for {', '.join(empty)}: the face sets have lines for {', '.join(FACE_PROMPTS)}")
    return out
