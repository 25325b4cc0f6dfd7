"""Settings of a plan: dataclasses whose fields are the planner's flags. Every default that is an assumption says so."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prolip.utils.fields import option
from prolip.utils.flags import FlagError, build, check_alone, check_range

FLOAT, HALF = 4, 2
#: Titles of the tables.
TABLES = ("time", "memory", "traffic", "input", "failures")


@dataclass(frozen=True, kw_only=True)
class Training:
    """The run: what is trained, on how much, how, and how fast one GPU computes."""

    model: str = option("ProLIP-ViT-B-16", "an architecture of ours or of OpenCLIP's, or local-dir:FOLDER")
    gpus: list[int] = option([8, 32, 256, 1024], "numbers of GPUs, one column of the tables each")
    global_batch_size: int = option(16384, "samples per step over all GPUs")
    max_samples: float = option(1.28e9, "samples seen in the whole run")
    accum_freq: int = option(1, "micro-batches per step, as the training's flag: less memory, a second forward pass")
    precision: Literal["fp32", "amp_bf16", "amp_fp16"] = option("amp_bf16", "arithmetic of the towers")
    ema_decay: float | None = option(None, "averaged weights are kept as well, whatever their decay")
    grad_checkpointing: bool = option(False, "recompute activations in the backward pass")
    checkpoint_policy: Literal["full", "selective"] = option(
        "full", "what --grad-checkpointing keeps: selective products and attention, full the input of a block"
    )
    fsdp: bool = option(False, "parameters, gradients and optimiser state in shards over the GPUs, instead of DDP")
    exchange: Literal["auto", "ring", "gather"] = option("auto", "how texts come to all GPUs; auto: as in training")
    mfu: float | None = option(None, "share of the GPU's peak (fp32: TF32's) that model FLOPs reach; assumed 0.3")
    rate: float | None = option(None, "samples/s of one GPU, measured without waits")
    measured: str | None = option(None, "metrics.jsonl, or the folder, of a run to extrapolate from")
    measured_gpus: int = option(1, "ranks of that run")


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The cluster, its failures and checkpoints; --gpu settles the rest."""

    gpu: str = option("H100", "kind of GPU: A100-40GB, A100-80GB, H100, H200, B200")
    gpus_per_node: int = option(8, "GPUs in a node")
    peak_tflops: float | None = option(None, "dense bf16 peak, instead of the data sheet's")
    memory_gb: float | None = option(None, "memory of a GPU, instead of the data sheet's")
    price: float | None = option(None, "of one GPU for one hour, in dollars; the defaults are a cloud's list prices")
    intra_gbs: float | None = option(None, "GB/s between two GPUs of a node, one way; assumed 80% of NVLink's")
    inter_gbs: float | None = option(None, "GB/s of a GPU's own network link, one way; assumed 80% of its rate")
    intra_hop_us: float = option(3.4, "microseconds per hop of an all-gather within a node; NCCL's own figure")
    inter_hop_us: float = option(14.0, "microseconds per hop of an all-gather between nodes; NCCL's own figure")
    mtbf_gpu_hours: float = option(50_000.0, "GPU-hours between failures; Llama 3: 419 in 54 days of 16,384 H100s")
    mtbf_node_hours: float | None = option(None, "node-hours between failures that are not the GPUs', if counted apart")
    checkpoint_gbs: float = option(2.0, "GB/s at which a checkpoint is written; assumed")
    copy_gbs: float = option(20.0, "GB/s from the GPU to the host, while the step stands still; assumed")
    restart_minutes: float = option(10.0, "from a failure to the first new step: noticing, queueing, loading; assumed")
    save_every_samples: float | None = option(None, "samples between checkpoints; without: the best by Daly's formula")


@dataclass(frozen=True, kw_only=True)
class Supply:
    """Where samples come from, and how fast they are decoded."""

    images_per_core: float = option(250.0, "images/s that one core decodes and crops; assumed, measure yours")
    workers: int = option(16, "loader processes per GPU, a core each")
    prefetch: int | None = option(None, "chunks that each process prepares ahead; without: as the loader")
    shard_samples: int = option(10_000, "samples in a shard")
    sample_kb: float = option(40.0, "kB of a sample in its shard; 40: LAION-5B, 240 TB of 5.85 billion")
    dataset_samples: float | None = option(None, "samples in the data, to see whether there are shards for all streams")
    store_gbs: float = option(5.0, "GB/s that a node reads from the object store; assumed")
    stream_mbs: float = option(60.0, "MB/s of one open shard; assumed")
    open_ms: float = option(150.0, "milliseconds until the first byte of a shard; assumed")


GROUPS: dict[str, type] = {"training": Training, "machines": Machines, "supply": Supply}


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Training, Machines, Supply):
    """All settings of a plan. Raises FlagError for settings that contradict each other or are out of bounds."""

    def __post_init__(self) -> None:
        check_alone(self, ("mfu", "rate", "measured"), "one of them")
        check_range(self, "global_batch_size", "accum_freq", "max_samples", "measured_gpus", "gpus_per_node",
                    "workers", "prefetch", "shard_samples", least=1)
        check_range(self, "intra_hop_us", "inter_hop_us", "open_ms", "restart_minutes")
        check_range(self, "rate", "peak_tflops", "memory_gb", "price", "intra_gbs", "inter_gbs", "images_per_core",
                    "sample_kb", "dataset_samples", "store_gbs", "stream_mbs", "mtbf_gpu_hours", "mtbf_node_hours",
                    "checkpoint_gbs", "copy_gbs", "save_every_samples", above=True)
        if self.mfu is not None and not 0 < self.mfu <= 1:
            raise FlagError(f"--mfu {self.mfu} is outside (0, 1]: give a share such as 0.4")
        if not self.gpus or min(self.gpus) < 1:
            raise FlagError(f"--gpus is {self.gpus}: give one or more numbers of at least 1, such as --gpus 8 32")
        for gpus in self.gpus:
            parts = gpus * self.accum_freq
            low = self.global_batch_size // parts * parts
            if low != self.global_batch_size:
                near = f"{low} or {low + parts}" if low else f"{parts}"
                micro = f" x {self.accum_freq} micro-batches" if self.accum_freq > 1 else ""
                raise FlagError(f"--global-batch-size {self.global_batch_size} does not divide among {gpus} "
                                f"GPUs{micro}: give {near}")

    @property
    def half(self) -> int:
        """Bytes of a number in the towers."""
        return FLOAT if self.precision == "fp32" else HALF

    @property
    def recompute(self) -> Literal["none", "selective", "full"]:
        """Which activations the backward pass computes again."""
        return self.checkpoint_policy if self.grad_checkpointing else "none"

    @property
    def repeats(self) -> int:
        """Forward passes that are done a second time: of every block in the backward pass, of every micro-batch."""
        return (self.recompute == "full") + (self.accum_freq > 1)


def read_flags(given: Mapping[str, Any]) -> PlanConfig:
    """Build the settings from flags by their names in argparse, `group.field`."""
    parts = {tuple(name.split(".")): value for name, value in given.items() if "." in name}
    return build(PlanConfig, "plan", {name: value for (group, name), value in parts.items() if group in GROUPS})
