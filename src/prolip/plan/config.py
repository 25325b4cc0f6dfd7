"""Settings of a plan as flags. The help marks each default that is an assumption."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prolip.utils.fields import option
from prolip.utils.flags import FlagError, build, check_alone, check_range

FLOAT, HALF = 4, 2
TABLES = ("time", "memory", "traffic", "input", "phases", "failures")  # titles of the tables


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The run, the cluster and the data. FlagError for contradictions and values out of range."""

    # the run, and the speed of one GPU
    model: str = option("ProLIP-ViT-B-16", "architecture of ProLIP or OpenCLIP, or local-dir:FOLDER")
    gpus: list[int] = option([8, 32, 256, 1024], "numbers of GPUs, one table column each")
    global_batch_size: int = option(16384, "samples per step over all GPUs")
    max_samples: float = option(1.28e9, "samples of the whole run")
    accum_freq: int = option(1, "micro-batches per step: less memory, a second forward pass")
    precision: Literal["fp32", "amp_bf16", "amp_fp16"] = option("amp_bf16", "arithmetic of the towers")
    ema_decay: float | None = option(None, "also hold averaged weights, with any decay")
    grad_checkpointing: bool = option(False, "recompute activations in the backward pass")
    checkpoint_policy: Literal["full", "selective"] = option("full", "activations that --grad-checkpointing recomputes")
    fsdp: bool = option(False, "shard parameters, gradients and optimiser state, instead of DDP")
    mfu: float | None = option(None, "model FLOPs as a share of the GPU's peak (fp32: of TF32's); assumed 0.3")
    rate: float | None = option(None, "samples/s of one GPU, measured without data waits")
    save_every_samples: float | None = option(None, "samples between checkpoints; default: the best by Young's formula")
    # the cluster, its failures and checkpoints
    gpu: Literal["A100-40GB", "A100-80GB", "H100", "H200", "B200"] = option("H100", "type of GPU, or the nearest")
    gpus_per_node: int = option(8, "GPUs per node")
    peak_tflops: float | None = option(None, "dense bf16 peak in TFLOP/s, instead of the data sheet's")
    memory_gb: float | None = option(None, "memory of a GPU in GB, instead of the data sheet's")
    price: float | None = option(None, "dollars per GPU and hour; default: a cloud's list price")
    intra_gbs: float | None = option(None, "GB/s between two GPUs of a node, one way; assumed 80% of NVLink")
    inter_gbs: float | None = option(None, "GB/s of a GPU's network link, one way; assumed 80% of its rate")
    mtbf_gpu_hours: float = option(50_000.0, "GPU-hours between failures; Llama 3: 419 in 54 days of 16,384 H100s")
    checkpoint_gbs: float = option(2.0, "GB/s of a node's checkpoint writes; assumed")
    copy_gbs: float = option(20.0, "GB/s between a GPU and its host; assumed")
    queue_minutes: float = option(10.0, "minutes from a failure to new processes; assumed")
    # the data and its decoding
    images_per_core: float = option(250.0, "images/s decoded and cropped per core; assumed, measure yours")
    workers: int = option(16, "loader processes per GPU, one core each")
    prefetch: int | None = option(None, "chunks that each process prepares ahead; default: the loader's")
    shard_samples: int = option(10_000, "samples per shard")
    sample_kb: float = option(40.0, "kB per sample in a shard; 40: LAION-5B, 240 TB of 5.85 billion")
    dataset_samples: float | None = option(None, "samples in the data; default: --max-samples, each seen once")
    store_gbs: float = option(5.0, "GB/s of a node's reads from the store of shards and checkpoints; assumed")
    store_total_gbs: float = option(200.0, "GB/s of that store for all nodes together; assumed")
    stream_mbs: float = option(60.0, "MB/s of one open shard; assumed")
    open_ms: float = option(150.0, "milliseconds to the first byte of a shard; assumed")

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
            raise FlagError(f"--gpus is {self.gpus}: give numbers of at least 1, such as --gpus 8 32")
        for gpus in self.gpus:
            parts = gpus * self.accum_freq
            if rest := self.global_batch_size % parts:
                wrong = f"--global-batch-size {self.global_batch_size} is not divisible by {gpus} GPUs"
                good = self.global_batch_size - rest + parts
                raise FlagError(f"{wrong} x {self.accum_freq} micro-batches: give {good}")

    @property
    def repeats(self) -> int:
        """Number of repeated forward passes: of every block in the backward pass, of every micro-batch."""
        return (self.grad_checkpointing and self.checkpoint_policy == "full") + (self.accum_freq > 1)


def read_flags(given: Mapping[str, Any]) -> PlanConfig:
    """Build the settings from flags, named `plan.field` in argparse."""
    return build(PlanConfig, "plan", {name[5:]: value for name, value in given.items() if name.startswith("plan.")})
