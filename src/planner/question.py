"""What is asked: dataclasses whose fields are the planner's flags. Every default that is an assumption says so."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from prolip.utils.fields import option
from prolip.utils.flags import FlagError, build, check_alone, flag_of

HOUR, MINUTE = 3600.0, 60.0


@dataclass(frozen=True, kw_only=True)
class Training:
    """The run: what is trained, on how much, how."""

    model: str = option("ProLIP-ViT-B-16", "one of prolip.list_models(), or a model of OpenCLIP's for comparison")
    method: Literal["prolip", "siglip"] = option("prolip", "siglip: no masked views; OpenCLIP's models are always so")
    gpus: list[int] = option([8, 32, 256, 1024], "numbers of GPUs, one column of the tables each")
    global_batch_size: int = option(16384, "samples per step over all GPUs")
    accum_freq: int = option(1, "micro-batches per step, as the training's flag: less memory, a second forward pass")
    max_samples: float = option(1.28e9, "samples seen in the whole run")
    precision: Literal["amp_bf16", "fp32"] = option("amp_bf16", "arithmetic of the towers")
    ema_decay: float | None = option(None, "averaged weights are kept as well, whatever their decay")
    grad_checkpointing: bool = option(False, "recompute activations in the backward pass")
    checkpoint_policy: Literal["full", "selective"] = option(
        "full", "what --grad-checkpointing keeps: selective products and attention, full the input of a block"
    )
    fsdp: bool = option(False, "parameters, gradients and optimiser state in shards over the GPUs, instead of DDP")
    block: int | None = option(None, "rows of PPCL scored at a time; without: losses.pairs.default_block")
    exchange: Literal["auto", "ring", "gather"] = option(
        "auto", "how texts come to all GPUs; auto: as in training, by losses.contrastive.choose_exchange (siglip: ring)"
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "global_batch_size", "accum_freq", "max_samples", "block")
        if self.method == "siglip" and self.exchange == "gather":
            raise FlagError("--exchange gather is of --method prolip: leave it out, SigLIP's texts go round a ring")
        if not self.gpus or min(self.gpus) < 1:
            raise FlagError(f"--gpus is {self.gpus}: give one or more numbers of at least 1, such as --gpus 8 32")
        for count in self.gpus:
            parts = count * self.accum_freq
            if self.global_batch_size % parts:
                low = self.global_batch_size // parts * parts
                near = " or ".join(str(size) for size in (low, low + parts) if size)
                micro = f" x {self.accum_freq} micro-batches" if self.accum_freq > 1 else ""
                raise FlagError(f"--global-batch-size {self.global_batch_size} does not divide among {count} "
                                f"GPUs{micro}: give {near}")  # fmt: skip

    @property
    def recompute(self) -> Literal["none", "selective", "full"]:
        """What is made again in the backward pass."""
        return self.checkpoint_policy if self.grad_checkpointing else "none"

    @property
    def repeats(self) -> int:
        """Forward passes that are done a second time: of every block in the backward pass, of every micro-batch."""
        return (self.recompute == "full") + (self.accum_freq > 1)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast one GPU computes: one of these."""

    mfu: float | None = option(None, "share of the GPU's peak (fp32: TF32's) that model FLOPs reach; assumed 0.3")
    rate: float | None = option(None, "samples/s of one GPU, measured without waits")
    measured: str | None = option(None, "metrics.jsonl, or the folder, of a run to extrapolate from")
    measured_gpus: int = option(1, "ranks of that run")

    def __post_init__(self) -> None:
        check_alone(self, ("mfu", "rate", "measured"), "one of them")
        if self.mfu is not None and not 0 < self.mfu <= 1:
            raise FlagError(f"--mfu {self.mfu} is outside (0, 1]: give a share such as 0.4")
        above_zero(self, "rate")
        at_least(self, 1, "measured_gpus")


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The cluster; what is left out follows from the kind of GPU."""

    gpu: str = option("H100", "kind of GPU: A100-40GB, A100-80GB, H100, H200, B200")
    gpus_per_node: int = option(8, "GPUs in a node")
    peak_tflops: float | None = option(None, "dense bf16 peak, instead of the data sheet's")
    memory_gb: float | None = option(None, "memory of a GPU, instead of the data sheet's")
    price: float | None = option(None, "of one GPU for one hour, in dollars; the defaults are a cloud's list prices")
    intra_gbs: float | None = option(None, "GB/s between two GPUs of a node, one way; assumed 80% of NVLink's")
    inter_gbs: float | None = option(None, "GB/s of a GPU's own network link, one way; assumed 80% of its rate")
    intra_us: float = option(10.0, "microseconds before a message moves within a node; assumed")
    inter_us: float = option(20.0, "microseconds before a message moves between nodes; assumed")
    intra_hop_us: float = option(3.4, "microseconds per hop of an all-gather within a node; NCCL's own figure")
    inter_hop_us: float = option(14.0, "microseconds per hop of an all-gather between nodes; NCCL's own figure")
    launch_us: float = option(5.0, "microseconds per kernel that Python starts; assumed")
    block_kernels: int = option(21, "kernels per block of PPCL: 17 of losses.pairs.add_pairs on CUDA, 4 around it")

    def __post_init__(self) -> None:
        at_least(self, 1, "gpus_per_node", "block_kernels")
        above_zero(self, "peak_tflops", "memory_gb", "price", "intra_gbs", "inter_gbs")
        at_least(self, 0, "intra_us", "inter_us", "intra_hop_us", "inter_hop_us", "launch_us")


@dataclass(frozen=True, kw_only=True)
class Supply:
    """Where samples come from, and how fast they are decoded."""

    images_per_core: float = option(250.0, "images/s that one core decodes and crops; assumed, measure yours")
    workers: int = option(16, "loader processes per GPU, a core each")
    prefetch: int | None = option(
        None, "chunks that each process prepares ahead; without: as the loader's --prefetch, by the batch per GPU"
    )
    shard_samples: int = option(10_000, "samples in a shard")
    sample_kb: float = option(40.0, "kB of a sample in its shard; 40: LAION-5B, 240 TB of 5.85 billion")
    dataset_samples: float | None = option(None, "samples in the data, to see whether there are shards for all streams")
    store_gbs: float = option(5.0, "GB/s that a node reads from the object store; assumed")
    stream_mbs: float = option(60.0, "MB/s of one open shard; assumed")
    open_ms: float = option(150.0, "milliseconds until the first byte of a shard; assumed")

    def __post_init__(self) -> None:
        above_zero(self, "images_per_core", "sample_kb", "store_gbs", "stream_mbs", "dataset_samples")
        at_least(self, 1, "workers", "prefetch", "shard_samples")
        at_least(self, 0, "open_ms")


@dataclass(frozen=True, kw_only=True)
class Safety:
    """Failures and checkpoints."""

    mtbf_gpu_hours: float = option(50_000.0, "GPU-hours between failures; Llama 3: 419 in 54 days of 16,384 H100s")
    mtbf_node_hours: float | None = option(None, "node-hours between failures that are not the GPUs', if counted apart")
    checkpoint_gbs: float = option(2.0, "GB/s at which a checkpoint is written; assumed")
    copy_gbs: float = option(20.0, "GB/s from the GPU to the host, while the step stands still; assumed")
    restart_minutes: float = option(10.0, "from a failure to the first new step: noticing, queueing, loading; assumed")
    save_every_samples: float | None = option(None, "samples between checkpoints; if none is given: Daly's formula")
    save_every_steps: int | None = option(None, "steps between checkpoints")
    save_every_minutes: float | None = option(None, "minutes between checkpoints")

    def __post_init__(self) -> None:
        names = ("save_every_samples", "save_every_steps", "save_every_minutes")
        check_alone(self, names, "one cadence")
        above_zero(self, "mtbf_gpu_hours", "mtbf_node_hours", "checkpoint_gbs", "copy_gbs", *names)
        at_least(self, 0, "restart_minutes")


@dataclass(frozen=True, kw_only=True)
class Question:
    """Everything the planner needs to know."""

    training: Training = field(default_factory=Training)
    speed: Speed = field(default_factory=Speed)
    machines: Machines = field(default_factory=Machines)
    supply: Supply = field(default_factory=Supply)
    safety: Safety = field(default_factory=Safety)


SECTIONS: dict[str, type] = get_type_hints(Question)


def ask(given: Mapping[str, Any]) -> Question:
    """The question that flags make."""
    return Question(**{name: build(kind, name, settings(given, name)) for name, kind in SECTIONS.items()})


def settings(given: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Field -> value of the flags of one section, as `add_flags` calls them."""
    prefix = f"{section}."
    return {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}


def at_least(config: Any, bound: float, *names: str) -> None:
    """FlagError for a given field that is below the bound, or no number."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not bound <= value < math.inf:
            raise FlagError(f"{flag_of(name)} is {value}: give a number of {bound:g} or more")


def above_zero(config: Any, *names: str) -> None:
    """FlagError for a given field that is not above 0."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise FlagError(f"{flag_of(name)} is {value}: give a number above 0")
