"""Classification metrics: tensors or arrays in, `dict[str, float]` or arrays out, shares in [0, 1].

Scores (N, C) are larger for nearer classes, equal scores go to the lower class, and accuracies among k classes are left
out where there are fewer: all samples would be right.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch
from sklearn import metrics as sk
from torch import Tensor

from prolip.evaluation.metrics.ranking import Array, as_array

KS = (1, 5)


def label_ranks(scores: Tensor, labels: Tensor) -> Tensor:
    """The rank, from 1, of every sample's own class: scores (N, C), labels (N,) -> (N,) int64.

    Raises ValueError for shapes that do not fit, labels outside the classes, or NaN.
    """
    if scores.dim() != 2 or labels.shape != scores.shape[:1]:
        raise ValueError(
            f"scores {tuple(scores.shape)} and labels {tuple(labels.shape)}: give (samples, classes) and (samples,)"
        )
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= scores.shape[1]):
        raise ValueError(
            f"labels run from {int(labels.min())} to {int(labels.max())}, but there are {scores.shape[1]} classes: "
            "give a score for every class, and labels from 0"
        )
    if scores.isnan().any():
        sample = int(scores.isnan().any(1).nonzero()[0])
        raise ValueError(f"sample {sample} has a NaN score: look for a diverged model before ranking")
    label = labels.long().unsqueeze(1)
    own = scores.gather(1, label)
    lower = torch.arange(scores.shape[1], device=scores.device) < label
    return ((scores > own) | ((scores == own) & lower)).sum(1) + 1


def predictions(scores: Tensor) -> Tensor:
    """The class of the highest score: (N, C) -> (N,)."""
    return scores.argmax(1)


def top_k_accuracy(scores: Tensor, labels: Tensor, ks: Sequence[int] = KS) -> dict[str, float]:
    """`top<k>`: the share of samples whose class is among the k best, for each k that is not beyond the classes."""
    ranks = label_ranks(scores, labels)
    return {f"top{k}": _mean(ranks <= k) for k in ks if k <= scores.shape[1]}


def mean_per_class_recall(predicted: Array, labels: Array) -> float:
    """Recall of every class that has a sample, averaged: (N,), (N,)."""
    truth = as_array(labels)
    return float(sk.recall_score(truth, as_array(predicted), labels=np.unique(truth), average="macro"))


def macro_f1(predicted: Array, labels: Array) -> float:
    """F1 averaged over the classes that have a sample, as WILDS scores iWildCam: (N,), (N,)."""
    truth = as_array(labels)
    scored = sk.f1_score(truth, as_array(predicted), labels=np.unique(truth), average="macro", zero_division=0)
    return float(scored)


def confusion_matrix(predicted: Array, labels: Array, classes: int) -> np.ndarray:
    """(C, C) counts, rows the true class, columns the predicted one."""
    return sk.confusion_matrix(as_array(labels), as_array(predicted), labels=np.arange(classes))


def classification(scores: Tensor, labels: Tensor, ks: Sequence[int] = KS) -> dict[str, float]:
    """What a single-label task reports: `top<k>`, `mean_per_class_recall`, `macro_f1`, `classes`."""
    predicted = predictions(scores)
    out = top_k_accuracy(scores, labels, ks)
    out["mean_per_class_recall"] = mean_per_class_recall(predicted, labels)
    return out | {"macro_f1": macro_f1(predicted, labels), "classes": float(scores.shape[1])}


def group_metrics(
    metric: Callable[[np.ndarray], float],
    groups: Array,
    names: Sequence[str] | Mapping[int, str] | None = None,
    excluded: Collection[str] = (),
    minimum: int = 1,
) -> dict[str, float]:
    """A metric in every group, and in the worst one.

    metric(rows) -> value of the samples with these indices, larger is better; groups: (N,) int; names: of groups, by
    their number; a group that is `excluded` by name, or has fewer than `minimum` samples, does not decide
    `worst_group_kept`. Keys `group/<name>`, `size/<name>`, `worst_group` over all groups and `worst_group_kept`, which
    is the same when nothing is excluded (FMoW's worst region with and without its tiny "Other"). Raises ValueError for
    a group without a name, an excluded name that is none, and when no group is kept.
    """
    groups = as_array(groups)
    named: dict[str, np.ndarray] = {}
    for number in np.unique(groups):
        named[_group_name(int(number), names)] = np.flatnonzero(groups == number)
    known = {*named, *_all_names(names)}
    if unknown := [name for name in excluded if name not in known]:
        raise ValueError(f"excluded groups {unknown} are not among {sorted(known)}: spell them as in the names")
    values = {name: float(metric(rows)) for name, rows in named.items()}
    kept = [values[name] for name, rows in named.items() if name not in excluded and len(rows) >= minimum]
    if not kept:
        raise ValueError(
            f"no group is left: {len(named)} groups, excluded {sorted(excluded)}, at least {minimum} samples each; "
            "exclude fewer or ask for fewer samples"
        )
    out = {f"group/{name}": value for name, value in values.items()}
    out |= {f"size/{name}": float(len(rows)) for name, rows in named.items()}
    return out | {"worst_group": min(values.values()), "worst_group_kept": min(kept)}


def group_accuracy(
    scores: Tensor,
    labels: Tensor,
    groups: Array,
    k: int = 1,
    names: Sequence[str] | Mapping[int, str] | None = None,
    excluded: Collection[str] = (),
    minimum: int = 1,
) -> dict[str, float]:
    """Top-k accuracy by group, as `group_metrics`: Dollar Street has k = 5 and incomes, GeoDE k = 1 and regions."""
    hit = (label_ranks(scores, labels) <= k).cpu().numpy()
    return group_metrics(lambda rows: hit[rows].mean(), groups, names, excluded, minimum)


def average_precision(scores: Array, targets: Array) -> np.ndarray:
    """Average precision of every class over the samples, NaN for a class without any: (N, C), (N, C) -> (C,)."""
    scores, targets = as_array(scores, np.float64), as_array(targets).astype(bool)
    if scores.shape != targets.shape or scores.ndim != 2:
        raise ValueError(f"scores {scores.shape} and targets {targets.shape}: give (samples, classes) twice, multi-hot")
    if np.isnan(scores).any():
        raise ValueError("there are NaN scores: look for a diverged model before ranking")
    out = np.full(scores.shape[1], np.nan)
    for c in np.flatnonzero(targets.any(0)):
        # It depends on the order alone, and scikit-learn refuses infinite scores: give it the order.
        out[c] = sk.average_precision_score(targets[:, c], np.unique(scores[:, c], return_inverse=True)[1])
    return out


def multilabel(scores: Array, targets: Array) -> dict[str, float]:
    """Mean average precision of a multi-label task.

    `mAP`: over the classes that have a sample; `mAP_all_classes`: with 0 for the others, as clip_benchmark counts.
    """
    ap = average_precision(scores, targets)
    present = ~np.isnan(ap)
    out = {"mAP": float(ap[present].mean()) if present.any() else float("nan")}
    out["mAP_all_classes"] = float(np.where(present, ap, 0).mean())
    return out | {"classes": float(len(ap)), "classes_without_sample": float((~present).sum())}


def jaccard(chosen: Sequence[Collection], true: Sequence[Collection]) -> dict[str, float]:
    """`jaccard`: mean over instances of |intersection| / |union|, 1 for two empty sets; `exact`: the share with 1."""
    if len(chosen) != len(true) or not chosen:
        raise ValueError(f"{len(chosen)} answers for {len(true)} instances: give one set for each, and at least one")
    values = []
    for a, b in zip(map(set, chosen), map(set, true)):
        values.append(len(a & b) / len(a | b) if a | b else 1.0)
    return {"jaccard": float(np.mean(values)), "exact": float(np.mean([v == 1 for v in values]))}


def best(scores: Array, count: int) -> frozenset[int]:
    """Indices of the `count` highest scores (C,), equal ones by index: WinoGAViL's answer of known size."""
    return frozenset(np.argsort(-as_array(scores, np.float64), kind="stable")[:count].tolist())


def _group_name(number: int, names: Sequence[str] | Mapping[int, str] | None) -> str:
    """The name of a group, its number without names. Raises ValueError for a number beyond them."""
    if names is None:
        return str(number)
    if number < 0 or (number not in names if isinstance(names, Mapping) else number >= len(names)):
        known = names if isinstance(names, Mapping) else dict(enumerate(names))
        raise ValueError(f"group {number} has no name: names are given for {', '.join(map(str, known))}")
    return names[number]


def _all_names(names: Sequence[str] | Mapping[int, str] | None) -> Collection[str]:
    """The names, of groups with and without samples."""
    if names is None:
        return ()
    return list(names.values()) if isinstance(names, Mapping) else names


def _mean(values: Tensor) -> float:
    """Mean, NaN of nothing."""
    return float(values.double().mean())
