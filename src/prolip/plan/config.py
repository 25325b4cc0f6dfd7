"""Settings of a plan, whose fields are the flags. Every default that is an assumption says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prolip.utils.fields import option
from prolip.utils.flags import FlagError, build, check_alone, check_range

FLOAT, HALF = 4, 2
TABLES = ("time", "memory", "traffic", "input", "phases", "failures")  # Titles of the tables


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The run, the cluster, and where samples come from. FlagError for what contradicts itself or is out of bounds."""

    # what is trained, on how much, how, and how fast one GPU computes
    model: str = option("ProLIP-ViT-B-16", "an architecture of ours or of OpenCLIP's, or local-dir:FOLDER")
    gpus: list[int] = option([8, 32, 256, 1024], "numbers of GPUs, one column of the tables each")
    global_batch_size: int = option(16384, "samples per step over all GPUs")
    max_samples: float = option(1.28e9, "samples seen in the whole run")
    accum_freq: int = option(1, "micro-batches per step, as the training's flag: less memory, a second forward pass")
    precision: Literal["fp32", "amp_bf16", "amp_fp16"] = option("amp_bf16", "arithmetic of the towers")
    ema_decay: float | None = option(None, "averaged weights are kept as well, whatever their decay")
    grad_checkpointing: bool = option(False, "recompute activations in the backward pass")
    checkpoint_policy: Literal["full", "selective"] = option("full", "what --grad-checkpointing computes again")
    fsdp: bool = option(False, "parameters, gradients and optimiser state in shards over the GPUs, instead of DDP")
    mfu: float | None = option(None, "share of the GPU's peak (fp32: TF32's) that model FLOPs reach; assumed 0.3")
    rate: float | None = option(None, "samples/s of one GPU, measured without waits")
    save_every_samples: float | None = option(None, "samples between checkpoints; without: the best by Young's formula")
    # the cluster, its failures and checkpoints
    gpu: Literal["A100-40GB", "A100-80GB", "H100", "H200", "B200"] = option("H100", "kind of GPU, or the nearest")
    gpus_per_node: int = option(8, "GPUs in a node")
    peak_tflops: float | None = option(None, "dense bf16 peak, instead of the data sheet's")
    memory_gb: float | None = option(None, "memory of a GPU, instead of the data sheet's")
    price: float | None = option(None, "of one GPU for one hour, in dollars; the defaults are a cloud's list prices")
    intra_gbs: float | None = option(None, "GB/s between two GPUs of a node, one way; assumed 80% of NVLink's")
    inter_gbs: float | None = option(None, "GB/s of a GPU's own network link, one way; assumed 80% of its rate")
    mtbf_gpu_hours: float = option(50_000.0, "GPU-hours between failures; Llama 3: 419 in 54 days of 16,384 H100s")
    checkpoint_gbs: float = option(2.0, "GB/s at which a node writes a checkpoint; assumed")
    copy_gbs: float = option(20.0, "GB/s between a GPU and its host; assumed")
    queue_minutes: float = option(10.0, "from a failure to new processes: noticing and queueing; assumed")
    # where samples come from, and how fast they are decoded
    images_per_core: float = option(250.0, "images/s that one core decodes and crops; assumed, measure yours")
    workers: int = option(16, "loader processes per GPU, a core each")
    prefetch: int | None = option(None, "chunks that each process prepares ahead; without: as the loader")
    shard_samples: int = option(10_000, "samples in a shard")
    sample_kb: float = option(40.0, "kB of a sample in its shard; 40: LAION-5B, 240 TB of 5.85 billion")
    dataset_samples: float | None = option(None, "samples in the data; without: --max-samples, each seen once")
    store_gbs: float = option(5.0, "GB/s that a node reads from the store of shards and checkpoints; assumed")
    store_total_gbs: float = option(200.0, "GB/s of that store for all nodes together; assumed")
    stream_mbs: float = option(60.0, "MB/s of one open shard; assumed")
    open_ms: float = option(150.0, "milliseconds until the first byte of a shard; assumed")

    def __post_init__(self) -> None:
        check_alone(self, ("mfu", "rate"), "one of them")
        counts = ("global_batch_size", "accum_freq", "max_samples", "gpus_per_node")
        check_range(self, *counts, "workers", "prefetch", "shard_samples", least=1)
        check_range(self, "open_ms", "queue_minutes")
        check_range(self, "mfu", most=1, above=True)
        check_range(self, "rate", "peak_tflops", "memory_gb", "price", "intra_gbs", "inter_gbs", above=True)
        check_range(self, "mtbf_gpu_hours", "checkpoint_gbs", "copy_gbs", "save_every_samples", above=True)
        rates = ("images_per_core", "sample_kb", "dataset_samples", "store_gbs", "store_total_gbs", "stream_mbs")
        check_range(self, *rates, above=True)
        if not self.gpus or min(self.gpus) < 1:
            raise FlagError(f"--gpus is {self.gpus}: give one or more numbers of at least 1, such as --gpus 8 32")
        for gpus in self.gpus:
            parts = gpus * self.accum_freq
            if rest := self.global_batch_size % parts:
                wrong = f"--global-batch-size {self.global_batch_size} does not divide among {gpus} GPUs"
                good = self.global_batch_size - rest + parts
                raise FlagError(f"{wrong} x {self.accum_freq} micro-batches: give {good}")

    @property
    def repeats(self) -> int:
        """Forward passes that are repeated: of every block in the backward pass, of every micro-batch."""
        return (self.grad_checkpointing and self.checkpoint_policy == "full") + (self.accum_freq > 1)


def read_flags(given: Mapping[str, Any]) -> PlanConfig:
    """Build the settings from flags by their names in argparse, `plan.field`."""
    return build(PlanConfig, "plan", {name[5:]: value for name, value in given.items() if name.startswith("plan.")})
