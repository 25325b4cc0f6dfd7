"""From scores to DataComp's metrics: pure functions, shares in [0, 1], keys as DataComp's own evaluation names them.

So a line of ours can be laid beside one of its `eval_results.jsonl`. Where DataComp's code and its intention differ
(the region "Other" of FMoW), both are given and the main metric is what its published figures hold.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from sklearn.metrics import f1_score
from torch import Tensor

from prolip.evaluation.datacomp.tasks import AGGREGATES, BY_KEY, FACE_PROMPTS, FMOW_OTHER, Task
from prolip.evaluation.metrics import Ranking, both_directions

BLOCK = 4096
CRIME, NON_HUMAN = (18, None), (14, 18)
"""Classes of the prompts "toxic", from and up to: 14 people by race and gender come first (CLIP section 7.1)."""


class Association(NamedTuple):
    """One instance of WinoGAViL: scores (n,) of its candidates, larger is nearer, and which belong to the cue (n,)."""

    scores: Tensor
    associated: Tensor


class Aggregate(NamedTuple):
    """One of the five figures: the mean over the tasks that are there, and the keys of those that are not."""

    value: float
    missing: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether it may be compared with a published one."""
        return not self.missing


def true_ranks(scores: Tensor, labels: Tensor) -> Tensor:
    """Rank of the true class from 1, equal scores to the lower class: scores (N, C), labels (N,) -> (N,).

    In blocks of rows, so memory stays at a block's comparison. Raises ValueError for NaN scores and foreign labels.
    """
    if scores.dim() != 2 or labels.shape != scores.shape[:1]:
        raise ValueError(f"scores {tuple(scores.shape)} and labels {tuple(labels.shape)} must be (N, C) and (N,)")
    classes = torch.arange(scores.shape[1])
    ranks = []
    for rows, truth in zip(scores.split(BLOCK), labels.split(BLOCK)):
        if rows.isnan().any():
            raise ValueError("a score is NaN: look for a diverged model before ranking")
        if bool(((truth < 0) | (truth >= len(classes))).any()):
            raise ValueError(f"labels reach from {int(truth.min())} to {int(truth.max())}, there are {len(classes)} "
                             "classes: do classnames.txt and the labels belong together?")  # fmt: skip
        own = rows.gather(1, truth.unsqueeze(1))
        before = (rows > own) | ((rows == own) & (classes < truth.unsqueeze(1)))
        ranks.append(1 + before.sum(1))
    return torch.cat(ranks)


def by_group(name: str, hits: Tensor, fields: Sequence[str], groups: np.ndarray) -> dict[str, float]:
    """Means of hits (N,) within groups (N, F) of equal values: `<name>_<field>:<value>`, `count_...`, `<name>_wg`.

    `<name>_wg` is the worst group (WILDS: only groups that have images). With several fields a group is a combination.
    """
    out: dict[str, float] = {}
    values, member = np.unique(groups, axis=0, return_inverse=True)
    member = member.reshape(-1)  # NumPy 2.0 alone gave it another shape
    sums = np.bincount(member, weights=hits.double().numpy(), minlength=len(values))
    counts = np.bincount(member, minlength=len(values))
    for row, total, count in zip(values, sums, counts):
        label = "_".join(f"{field}:{int(value)}" for field, value in zip(fields, row))
        out[f"{name}_{label}"] = float(total / count)
        out[f"count_{label}"] = float(count)
    out[f"{name}_wg"] = float((sums / counts).min())
    return out


def classification_metrics(task: Task, scores: Tensor, labels: Tensor, groups: np.ndarray | None) -> dict[str, float]:
    """acc1, acc5 (with 5 classes or more), mean_per_class_recall, and what the task adds; scores (N, C), labels (N,).

    groups: (N, columns of the task). Raises ValueError where a task needs groups and there are none.
    """
    ranks = true_ranks(scores, labels)
    hits = ranks <= 1
    per_class = [hits[labels == c].double().mean() for c in labels.unique()]
    out = {"acc1": float(hits.double().mean())}
    if scores.shape[1] >= 5:
        out["acc5"] = float((ranks <= 5).double().mean())
    out["mean_per_class_recall"] = float(torch.stack(per_class).mean())
    if not task.groups:
        return out
    columns = group_columns(task, groups, len(labels))
    extra = {
        "wilds/iwildcam": lambda: _iwildcam(scores, labels, out),
        "wilds/camelyon17": lambda: by_group("acc", hits, ["slide"], columns[:, [1]]),
        "wilds/fmow": lambda: _fmow(hits, columns),
        "fairness/dollar_street": lambda: by_group("acc_top5", ranks <= 5, ["income_ds"], columns[:, [0]]),
        "fairness/geode": lambda: by_group("acc", hits, ["region"], columns[:, [0]]),
    }
    return out | extra[task.key]()


def _iwildcam(scores: Tensor, labels: Tensor, plain: Mapping[str, float]) -> dict[str, float]:
    """F1-macro_all: the mean F1 of the species that occur, as WILDS has it (absent ones would count as 0)."""
    predicted = scores.argmax(1)
    present = labels.unique().numpy()
    f1 = f1_score(labels.numpy(), predicted.numpy(), labels=present, average="macro", zero_division=0)
    return {"F1-macro_all": float(f1), "recall-macro_all": plain["mean_per_class_recall"]}


def _fmow(hits: Tensor, columns: np.ndarray) -> dict[str, float]:
    """Worst year and worst region; the main one holds the 4 images of "Other", as the published figures do.

    DataComp's code means to leave them out by the word "Other", which its groups are not called by.
    """
    years = by_group("acc", hits, ["year"], columns[:, [1]])
    years["acc_worst_year"] = years.pop("acc_wg")
    regions = by_group("acc", hits, ["region"], columns[:, [0]])
    regions["acc_worst_region"] = regions.pop("acc_wg")
    known = columns[:, 0] != FMOW_OTHER
    if known.any():
        named = by_group("acc", hits[torch.from_numpy(known)], ["region"], columns[known][:, [0]])
        regions["acc_worst_region_without_other"] = named["acc_wg"]
    return years | regions


def group_columns(task: Task, groups: np.ndarray | None, images: int) -> np.ndarray:
    """The metadata as (N, columns) integers. ValueError where it is missing or has fewer columns than the task's."""
    if groups is None:
        raise ValueError(f"{task.name} needs the .npy beside each image ({', '.join(task.groups)}): fetch "
                         f"{task.repository} again")  # fmt: skip
    groups = np.asarray(groups)
    if groups.ndim != 2 or len(groups) != images or groups.shape[1] < len(task.groups):
        raise ValueError(f"{task.name}: the metadata is {groups.shape}, wanted ({images}, {len(task.groups)}): "
                         f"{', '.join(task.groups)}")  # fmt: skip
    return groups.astype(np.int64)


def retrieval_metrics(i2t: Ranking, t2i: Ranking) -> dict[str, float]:
    """Recalls at 1, 5, 10 of both directions and `mean_recall@1`, the mean of the two at 1.

    text_retrieval: the texts of an image (rows of i2t); image_retrieval: the image of a text.
    """
    both = both_directions(i2t, t2i, (1, 5, 10))
    out = {f"text_retrieval_recall@{k}": both[f"i2t/R@{k}"] for k in (1, 5, 10)}
    out |= {f"image_retrieval_recall@{k}": both[f"t2i/R@{k}"] for k in (1, 5, 10)}
    return out | {"mean_recall@1": 0.5 * (both["i2t/R@1"] + both["t2i/R@1"])}


def cue_prompt(cue: str) -> str:
    """The text of a WinoGAViL cue, in lower case behind "A" or, before a vowel, "An"."""
    cue = cue.lower()
    return f"{'An' if cue.startswith(tuple('aeiou')) else 'A'} {cue}"


def jaccard(instance: Association) -> float:
    """|chosen and true| / |chosen or true| when the n nearest are chosen, n the number that belong to the cue."""
    truth = instance.associated.bool()
    order = instance.scores.argsort(descending=True, stable=True)
    chosen = torch.zeros_like(truth)
    chosen[order[: int(truth.sum())]] = True
    return float((chosen & truth).sum() / (chosen | truth).sum())


def association_metrics(instances: Sequence[Association]) -> dict[str, float]:
    """Mean Jaccard over all instances and by number of candidates; the main one is over 10 to 12 candidates.

    A number of candidates that no instance has is left out. Raises ValueError for an instance without a true candidate.
    """
    if any(not bool(instance.associated.any()) for instance in instances):
        raise ValueError("an instance has no candidate that belongs to its cue: the file of instances is damaged")
    values = np.array([jaccard(instance) for instance in instances])
    sizes = np.array([len(instance.scores) for instance in instances])
    parts = {f"jaccard_score_{n}": sizes == n for n in (5, 6, 10, 12)}
    parts |= {"jaccard_score_5-6": sizes <= 6, "jaccard_score_10-12": sizes >= 10}
    out = {"avg_jaccard_score": float(values.mean())}
    return out | {name: float(values[kept].mean()) for name, kept in parts.items() if kept.any()}


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


def aggregate(values: Mapping[str, float]) -> dict[str, Aggregate]:
    """The five figures of the paper's Table 1 from main metrics by key. An incomplete one names what it lacks."""
    out = {}
    for name, keys in AGGREGATES.items():
        there = [values[key] for key in keys if key in values]
        missing = tuple(key for key in keys if key not in values)
        out[name] = Aggregate(sum(there) / len(there) if there else float("nan"), missing)
    return out


def main_value(key: str, metrics: Mapping[str, float]) -> float | None:
    """The main metric of a task, None for the face sets. Raises ValueError where the task was scored without it."""
    name = BY_KEY[key].main_metric
    if name is None:
        return None
    if name not in metrics:
        raise ValueError(f"{key} has no {name}, its main metric: it has {', '.join(metrics) or 'nothing'}")
    return metrics[name]
