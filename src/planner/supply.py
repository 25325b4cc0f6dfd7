"""The loader's side: what a rate of samples asks of cores, shards and the object store."""
from __future__ import annotations

from typing import NamedTuple

from planner.hardware import GB, Cluster
from planner.question import Supply
from prolip.data.config import chunks_ahead


class Feed(NamedTuple):
    """What the loader can give, in samples/s of one GPU, by what limits it; and what the run asks for at `wanted`.

    bridged: seconds that one loader process may stand still before the step waits for it.
    """

    wanted: float
    decoding: float
    store: float
    streams: float
    cores_needed: float
    shards_per_second: float
    bytes_per_second: float
    open_streams: int
    bridged: float

    @property
    def limit(self) -> float:
        """The least of the limits, samples/s of one GPU."""
        return min(self.decoding, self.store, self.streams)

    @property
    def keeps_up(self) -> bool:
        """Whether the loader is as fast as the GPUs on average; the simulation says how often it is late."""
        return self.limit >= self.wanted


def feed(local: int, step_seconds: float, cluster: Cluster, supply: Supply) -> Feed:
    """What a batch of `local` samples per GPU every `step_seconds` asks for.

    A loader process decodes while its shard streams in, so each of the two limits it alone; opening a shard is waited
    for. Every process keeps one shard open. A chunk may begin `chunks_ahead` steps before it is due.
    """
    size = supply.sample_kb * 1e3
    cores = supply.cores_per_gpu
    wanted, ahead = local / step_seconds, chunks_ahead(supply.prefetch, local)
    opening = supply.open_ms * 1e-3 / supply.shard_samples
    per_core = 1 / (1 / supply.images_per_core + opening)
    per_stream = 1 / (size / (supply.stream_mbs * 1e6) + opening)
    return Feed(
        wanted,
        cores * per_core,
        supply.store_gbs * GB / cluster.per_node / size,
        cores * per_stream,
        wanted / per_core,
        wanted * cluster.gpus / supply.shard_samples,
        wanted * cluster.gpus * size,
        cores * cluster.gpus,
        max(0.0, ahead * step_seconds - local / cores * max(1 / per_core, 1 / per_stream)),
    )


def missing_shards(cluster: Cluster, supply: Supply) -> int:
    """Streams without a shard of their own: each stream needs at least one of the data's shards."""
    if supply.dataset_samples is None:
        return 0
    return max(0, supply.cores_per_gpu * cluster.gpus - int(supply.dataset_samples // supply.shard_samples))
