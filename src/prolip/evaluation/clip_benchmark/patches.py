"""Replacements in clip_benchmark 1.6.2 while a command runs; all other code is its own."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from clip_benchmark.datasets import builder
from clip_benchmark.metrics import linear_probe, zeroshot_classification, zeroshot_retrieval
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from prolip.data.faults import SampleFault
from prolip.evaluation.clip_benchmark.encoder import GaussianEncoder, class_vectors
from prolip.evaluation.datasets.base import WHOLE, DamagedData, Dataset, Sample, Share, note_fault
from prolip.evaluation.datasets.webdataset import open_wds
from prolip.evaluation.metrics.classification import label_ranks
from prolip.prompts.weights import in_braces
from prolip.scores import MeanScore

ORIGINAL = {
    "classifier": zeroshot_classification.zero_shot_classifier,
    "classification": zeroshot_classification.evaluate,
    "recall_at_k": zeroshot_retrieval.recall_at_k,
    "retrieval": zeroshot_retrieval.evaluate,
    "linear_probe": linear_probe.evaluate,
}


@contextmanager
def patched() -> Iterator[None]:
    """Patch clip_benchmark with all replacements, and with class mixtures for our models."""
    with (
        patch.multiple(zeroshot_classification, evaluate=evaluate_classification, accuracy=accuracy),
        patch.multiple(zeroshot_classification, zero_shot_classifier=zero_shot_classifier),
        patch.multiple(zeroshot_retrieval, evaluate=evaluate_retrieval),
        patch.multiple(linear_probe, accuracy=accuracy, evaluate=evaluate_linear_probe),
        patch.multiple(builder, build_wds_dataset=build_wds_dataset),
    ):
        yield


def zero_shot_classifier(model, tokenizer, classnames, templates, device, amp=True) -> Tensor:
    """Build a class as the mixture of its prompts' Gaussians; the original averages vectors."""
    if isinstance(model, GaussianEncoder) and (model.prompts is not None or not model.of_means):
        return class_vectors(model, tokenizer, classnames, templates, device, amp)
    return ORIGINAL["classifier"](model, tokenizer, classnames, templates, device, amp=amp)


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...] = (1,)) -> list[float]:
    """Return top-k accuracies; output (N, C), target (N,). The lower class wins ties, as in `label_ranks`.

    The original applies float() of an array of shape (1,), which NumPy refuses from 2.4 on.
    """
    ranks = label_ranks(output, target)
    return [(ranks <= k).sum().item() / len(target) for k in topk]


def evaluate_classification(*args, **kwargs) -> dict[str, float]:
    """Evaluate without the NaN acc5 of the original below five classes, which is not valid JSON."""
    return leave_out(ORIGINAL["classification"](*args, **kwargs), "acc5", "fewer than five classes")


def evaluate_linear_probe(model, *args, **kwargs) -> dict[str, float] | None:
    """Probe the means of our models."""
    if isinstance(model, GaussianEncoder):
        model = GaussianEncoder(model.model, MeanScore())
    return leave_out(ORIGINAL["linear_probe"](model, *args, **kwargs), "lp_acc5", "no image of a sixth class")


def evaluate_retrieval(*args, **kwargs) -> dict[str, float]:
    """Evaluate retrieval with k up to the gallery's size, above which the original's topk raises."""
    galleries: dict[int, list[int]] = {}  # k -> sizes by block: first of images, then of texts

    def recall_at_k(scores: Tensor, positive_pairs: Tensor, k: int) -> Tensor:
        galleries.setdefault(k, []).append(scores.shape[1])
        return ORIGINAL["recall_at_k"](scores, positive_pairs, min(k, scores.shape[1]))

    with patch.object(zeroshot_retrieval, "recall_at_k", recall_at_k):
        metrics = ORIGINAL["retrieval"](*args, **kwargs)
    for k, sizes in galleries.items():
        for what, size in (("image", sizes[0]), ("text", sizes[-1])):
            if k > size:
                name = f"{what}_retrieval_recall@{k}"
                metrics = leave_out(metrics | {name: math.nan}, name, f"only {size} {what}s")
    return metrics


def leave_out(metrics: Any, name: str, reason: str) -> Any:
    """Remove a metric that is NaN, as it would be 1 for any model, and print this."""
    if metrics and math.isnan(metrics.get(name, 0.0)):
        del metrics[name]
        print(f"note: {name} is left out: {reason}", file=sys.stderr)
    return metrics


def build_wds_dataset(dataset_name, transform, split="test", data_dir="root", cache_dir=None) -> WdsImages:
    """Build the data set with our reader: it reports damage, decodes as in training, and allows many workers."""
    return WdsImages(open_wds(data_dir, split, name=dataset_name), transform)


class WdsImages(IterableDataset):
    """A wds data set in clip_benchmark's form: (image, class) or (image, captions), or batches of them."""

    def __init__(self, dataset: Dataset, transform: Callable):
        self.dataset, self.transform, self.size = dataset, transform, 0
        self.classes = list(dataset.classnames) or None
        self.templates = [in_braces(template) for template in dataset.templates] or None

    def batched(self, size: int) -> WdsImages:
        """Return the data set in batches."""
        self.size = size
        return self

    def __iter__(self) -> Iterator[tuple]:
        """Yield the share of this worker. DamagedData for an unusable sample."""
        worker = get_worker_info()
        share = WHOLE if worker is None else Share(worker.id, worker.num_workers)
        pairs = map(self.read, self.dataset.samples(share))
        if not self.size:
            yield from pairs
            return
        for batch in iter(partial(lambda: list(islice(pairs, self.size))), []):
            images, targets = zip(*batch)
            yield torch.stack(images), targets if self.classes is None else torch.from_numpy(np.array(targets))

    def read(self, sample: Sample) -> tuple[Any, Any]:
        """Return one image after `transform`, and its captions or its label."""
        place = self.dataset.source
        if sample.captions is None and sample.label is None:
            raise DamagedData(f"sample {sample.key!r} of {place} has no class (.cls): fetch the set again")
        try:
            image = sample.open()
        except SampleFault as fault:
            note_fault(None, fault, sample.key, place)
            raise
        return self.transform(image), sample.label if sample.captions is None else list(sample.captions)
