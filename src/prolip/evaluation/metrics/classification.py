"""Classification metrics, shares in [0, 1], of scores (N, C); for equal scores the lower class wins."""

from __future__ import annotations

import numpy as np
import torch
from sklearn import metrics as sk
from torch import Tensor

from prolip.evaluation.metrics import Array, as_array


def label_ranks(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the rank, from 1, of every own class: (N, C), (N,) -> (N,) int64. ValueError for bad labels, and NaN."""
    if scores.dim() != 2 or labels.shape != scores.shape[:1]:
        shapes = f"scores {tuple(scores.shape)} and labels {tuple(labels.shape)}"
        raise ValueError(f"{shapes}: give (samples, classes) and (samples,)")
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= scores.shape[1]):
        found = f"labels run from {int(labels.min())} to {int(labels.max())}, but there are {scores.shape[1]} classes"
        raise ValueError(f"{found}: give a score for every class, and labels from 0")
    if scores.isnan().any():
        sample = int(scores.isnan().any(1).nonzero()[0])
        raise ValueError(f"sample {sample} has a NaN score: look for a diverged model before ranking")
    label = labels.long().unsqueeze(1)
    own = scores.gather(1, label)
    lower = torch.arange(scores.shape[1], device=scores.device) < label
    return ((scores > own) | ((scores == own) & lower)).sum(1) + 1


def macro_f1(predicted: Array, labels: Array) -> float:
    """Return F1 averaged over the classes with a sample, as WILDS scores iWildCam: (N,), (N,)."""
    truth = as_array(labels)
    return float(sk.f1_score(truth, as_array(predicted), labels=np.unique(truth), average="macro", zero_division=0))


def classification(scores: Tensor, labels: Tensor) -> dict[str, float]:
    """Compute the metrics `top1`, `top5`, `mean_per_class_recall`, `macro_f1` and `classes` of a single-label task."""
    ranks, predicted, classes = label_ranks(scores, labels), as_array(scores.argmax(1)), scores.shape[1]
    out = {f"top{k}": float((ranks <= k).double().mean()) for k in (1, 5) if k <= classes}
    truth = as_array(labels)
    recall = sk.recall_score(truth, predicted, labels=np.unique(truth), average="macro")
    return out | {"mean_per_class_recall": float(recall), "macro_f1": macro_f1(predicted, truth), "classes": classes}


def average_precision(scores: Array, targets: Array) -> np.ndarray:
    """Return the average precision of every class over the samples, NaN without one: (N, C), (N, C) -> (C,)."""
    scores, targets = as_array(scores, np.float64), as_array(targets).astype(bool)
    if scores.shape != targets.shape or scores.ndim != 2:
        raise ValueError(f"scores {scores.shape} and targets {targets.shape}: give (samples, classes) twice, multi-hot")
    if np.isnan(scores).any():
        raise ValueError("there are NaN scores: look for a diverged model before ranking")
    out = np.full(scores.shape[1], np.nan)
    for c in np.flatnonzero(targets.any(0)):
        # It depends only on the order, and scikit-learn refuses infinite scores: pass the order.
        out[c] = sk.average_precision_score(targets[:, c], np.unique(scores[:, c], return_inverse=True)[1])
    return out


def multilabel(scores: Array, targets: Array) -> dict[str, float]:
    """Return `mAP` of the classes with a sample, and `mAP_all_classes` with 0 for the others (clip_benchmark)."""
    ap = average_precision(scores, targets)
    present = ~np.isnan(ap)
    out = {"mAP": float(ap[present].mean()) if present.any() else float("nan")}
    out["mAP_all_classes"] = float(np.where(present, ap, 0).mean())
    return out | {"classes": float(len(ap)), "classes_without_sample": float((~present).sum())}
