"""The state of a run: model and optimiser, data, health, evaluations, outputs, and its position."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from timm.utils import ModelEmaV3
from torch import nn

from prolip.data.augment.affine import DeviceTransform
from prolip.data.augment.tokens import TokenAugment
from prolip.data.loader import Loader
from prolip.methods.base import Objective
from training.checkpoint.run_dir import Ledger
from training.checkpoint.writer import CheckpointWriter
from training.config import Config, OptimConfig
from training.health.nonfinite import LossMeter, NonFiniteGuard
from training.health.signals import StopSignal, Watchdog
from training.log import ChanceWatch, RunLog, StepProfiler
from training.model import Autocast
from training.optim import EpochAverage, Stage
from training.parallel.distributed import StopConsensus, World

if TYPE_CHECKING:  # evaluations bring scipy and more, which runs without any need not load
    from prolip.corpora.emoji.result import CorpusResult
    from training.evaluate import Best, Validation

#: Averaged twins of the model -> their flags. Metrics of a twin begin with NAME/, its folders and files end in _NAME.
AVERAGES = {"ema": "--ema-decay", "swa": "--swa-epochs"}


@dataclass(kw_only=True)
class TrainState:
    """Model, optimizer and schedule.

    objective: the method with its model; network: the same, in DDP where there are several ranks; parts: its trained
    parameters by tower; gate: skips non-finite steps; averages: averaged twins, of AVERAGES; stages: of backbones that
    are frozen at first; accum_freq: micro-batches; autocast: makes contexts of forward passes; seeded: whether
    generators are seeded at every step, not so after a checkpoint that holds their states.
    """

    objective: Objective
    network: nn.Module
    parts: dict[str, list[nn.Parameter]]
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    gate: NonFiniteGuard
    averages: dict[str, ModelEmaV3]
    config: OptimConfig
    total_steps: int
    stages: dict[str, Stage]
    accum_freq: int
    autocast: Autocast
    seeded: bool = True

    def averaged(self, step: int) -> dict[str, nn.Module]:
        """Name -> averaged twin, of those that have averaged something after `step` steps."""
        return {
            name: average.module
            for name, average in self.averages.items()
            if not isinstance(average, EpochAverage) or average.taken(step)
        }


@dataclass(kw_only=True)
class DataState:
    """This rank's batches, their augmentation on the device, and the samples of all ranks in a step."""

    loader: Loader
    augment: DeviceTransform | None
    global_batch: int
    token_augment: TokenAugment | None = None


@dataclass(kw_only=True)
class Health:
    """What watches over a run. utilisation: model FLOPs of a sample over the peak FLOP/s of all devices, if known."""

    meter: LossMeter
    stop: StopSignal
    consensus: StopConsensus
    watchdog: Watchdog
    chance: ChanceWatch
    utilisation: float | None = None
    profiler: StepProfiler | None = None


@dataclass
class Evaluated:
    """Evaluation of a model, on the first rank: metrics, log lines, the emoji corpus's result, examples of sets."""

    metrics: dict[str, float] = field(default_factory=dict)
    headlines: list[str] = field(default_factory=list)
    corpus: CorpusResult | None = None
    examples: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class EvalState:
    """Evaluations. results: of the last one, at `step`, by the prefix of its metrics: "", "ema/"."""

    validation: Validation | None = None
    best: Best | None = None
    results: dict[str, Evaluated] = field(default_factory=dict)
    step: int | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Name -> metric of the model, and ema/name, swa/name -> metric of averaged weights."""
        return {prefix + name: value for prefix, one in self.results.items() for name, value in one.metrics.items()}


@dataclass(kw_only=True)
class Clock:
    """When the next checkpoint or line of the log is due: steps and seconds after the last one (0: never)."""

    every_steps: int = 0
    every_seconds: float = 0.0
    last_step: int = 0
    last_time: float = field(default_factory=time.monotonic)

    def asks(self) -> int:
        """The number of the next one if it is due by this rank's clock, else 0."""
        over = bool(self.every_seconds) and time.monotonic() - self.last_time >= self.every_seconds
        return (self.last_step + 1) * over

    def due(self, step: int, agreed: int) -> bool:
        """Whether it is due after `step` steps. agreed: the largest number that a rank asked for."""
        by_steps = bool(self.every_steps) and step - self.last_step >= self.every_steps
        return by_steps or agreed == self.last_step + 1

    def restart(self, step: int) -> None:
        """It was done at `step`."""
        self.last_step, self.last_time = step, time.monotonic()


@dataclass(kw_only=True)
class RunOutputs:
    """What a run writes, and when.

    saves, lines: of checkpoints and of the log; saved_step: last saved step, of this process; saver: on rank 0, or on
    all for shards; tokenizer: saved with a model; preprocess: of its evaluation.
    """

    folder: Path
    log: RunLog
    saves: Clock
    lines: Clock
    saved_step: int | None = None
    saver: CheckpointWriter | None = None
    ledger: Ledger | None = None
    tokenizer: Any = None
    preprocess: Any = None


@dataclass(kw_only=True)
class Position:
    """Position of a run: optimiser steps, whole epochs, batches of the present one, seconds of training up to the last
    checkpoint. closed: whether the method's fit at the end is done.
    """

    step: int = 0
    epoch: int = 0
    batch_in_epoch: int = 0
    seconds: float = 0.0
    closed: bool = False


@dataclass(kw_only=True)
class Run:
    """A run on this rank."""

    config: Config
    world: World
    trained: TrainState
    data: DataState
    health: Health
    evals: EvalState
    outputs: RunOutputs
    at: Position = field(default_factory=Position)

    @property
    def total_steps(self) -> int:
        """Its length."""
        return self.trained.total_steps
