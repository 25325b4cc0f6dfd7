"""One evaluation by all ranks of a process group: each rank reads and embeds its share, the first rank scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from prolip.data.faults import FaultCounter
from prolip.embedder import Embedder
from prolip.evaluation.datasets.base import DamagedData, Dataset, Sample, Share
from prolip.evaluation.datasets.webdataset import unique_keys
from prolip.evaluation.embed import Features, embed_share, from_record, text_key, to_record
from prolip.evaluation.evaluate import TaskResult, evaluate_dataset
from prolip.evaluation.tasks import TASKS
from prolip.gaussian import Gaussian, concatenate
from prolip.prompts.templates import mix_prompts
from prolip.scores import Similarity

T = TypeVar("T")
#: Errors of data, networks or a full device, as opposed to bugs.
OF_DATA = (DamagedData, OSError, torch.OutOfMemoryError)


class TaskLost(RuntimeError):
    """Error on all ranks: a task could not be evaluated; the message names the rank and its error."""


class PeerError(RuntimeError):
    """Error on the other ranks: one rank raises an error that the data did not cause."""


def evaluate_over_ranks(  # noqa: PLR0913 (what is evaluated, and how)
    dataset: Dataset,
    embedder: Embedder,
    similarity: Similarity = None,
    group: Any = None,
    batch_size: int = 256,
    workers: int | None = None,
    seen: Callable[[Features], object] = lambda features: None,
) -> TaskResult | None:
    """Run `evaluate_dataset` on all ranks of `group`: the result on the first rank, None on the others.

    group: over gloo with a long time-out, as reading may take long; seen: called on the first rank with the features.
    TaskLost on all ranks if any rank cannot read the data or runs out of device memory.
    """
    embedder.scored_by(similarity)
    features = features_over_ranks(dataset, embedder, group, batch_size, workers)
    result = agree(lambda: None if features is None else evaluate_dataset(dataset, features, similarity), group)
    if features is not None:
        seen(features)
    return result


def features_over_ranks(
    dataset: Dataset, embedder: Embedder, group: Any = None, batch_size: int = 256, workers: int | None = None
) -> Features | None:
    """Run `compute_features` on all ranks: the features on the first rank, None on the others."""
    rank, size = rank_and_size(group)
    own = agree(partial(embed_share, dataset, embedder, batch_size, workers, share=Share(rank, size)), group)
    found = gather((*own, dataset.damage), group)
    features = agree(lambda: None if found is None else merge(dataset, embedder, found), group)
    texts, counts = broadcast(None if features is None else TASKS[dataset.kind].texts(features), group)

    def embed_part() -> Gaussian | None:
        """Embed this rank's consecutive part of the texts, or of the classes of `counts` prompts; None for no text."""
        units = len(texts) if counts is None else len(counts)
        start, end = (units * number // size for number in (rank, rank + 1))
        if start == end:
            return None
        if counts is None:
            return embedder.embed_texts(texts[start:end])
        return mix_prompts(texts[sum(counts[:start]) : sum(counts[:end])], counts[start:end], embedder.embed_texts)

    parts = gather(agree(embed_part, group), group)
    if features is None or parts is None:
        return None
    text = concatenate([part for part in parts if part is not None])
    return replace(features, text=text, text_key=text_key(texts, counts, embedder.card))


def merge(
    dataset: Dataset, embedder: Embedder, found: Sequence[tuple[list[Sample], list[Gaussian], FaultCounter | None]]
) -> Features:
    """Merge the shares of all ranks into the features of one pass over the data set, without texts."""
    for _, _, damage in found[1:]:
        if dataset.damage is not None and damage is not None:
            dataset.damage.merge(damage)
    samples = [sample for part, _, _ in found for sample in part]
    order = sorted(range(len(samples)), key=lambda row: samples[row].place)
    image = [concatenate([z for _, parts, _ in found for z in parts]).select(order)] if samples else []
    record = to_record(dataset, list(unique_keys(samples[row] for row in order)), image, embedder.reader)
    return from_record(dataset, embedder.card, record)


def rank_and_size(group: Any = None) -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) without a process group."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def agree(work: Callable[[], T], group: Any = None) -> T:
    """Return the result of `work`. If it fails on any rank, all ranks raise, so that none waits."""
    value, own = None, None
    try:
        value = work()
    except Exception as error:
        own = error
    reports = gather(None if own is None else (isinstance(own, OF_DATA), f"{type(own).__name__}: {own}"), group)
    failed = broadcast({rank: entry for rank, entry in enumerate(reports or ()) if entry is not None}, group)
    if not failed:
        return value  # type: ignore[return-value]
    several = rank_and_size(group)[1] > 1
    text = "; ".join(several * f"rank {rank}: " + message for rank, (_, message) in failed.items())
    if all(of_data for of_data, _ in failed.values()):
        raise TaskLost(text) from own
    raise PeerError(text) if own is None else own


def gather(value: T, group: Any = None) -> list[T] | None:
    """Return the values of all ranks on the first rank, None on the others."""
    rank, size = rank_and_size(group)
    if size == 1:
        return [value]
    boxes: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(value, boxes, group=group, group_dst=0)
    return boxes


def broadcast(value: T | None, group: Any = None) -> T:
    """Return the first rank's value on every rank."""
    box: list[Any] = [value]
    if rank_and_size(group)[1] > 1:
        dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]
