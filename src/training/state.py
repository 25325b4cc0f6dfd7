"""What a run is made of while it goes on: what is trained, fed, watched, measured and kept, and where it stands."""

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
from training.checkpoint.files import Saver
from training.checkpoint.run_folder import Ledger
from training.config import Config, OptimConfig
from training.health.chance import ChanceWatch
from training.health.preemption import StopSignal
from training.health.terms import StepGate, TermMeter
from training.health.watchdog import Watchdog
from training.log import RunLog, StepProfiler
from training.model import Autocast
from training.optim import EpochAverage, Stage
from training.parallel.distributed import Agreement, World

if TYPE_CHECKING:  # evaluations bring scipy and more, which runs without any need not load
    from prolip.corpora.emoji.result import CorpusResult
    from training.validation import Best, Validation

#: Averaged twins of the model by name, and the flag that asks for each. Its metrics begin with NAME/, its folders and
#: files end in _NAME.
AVERAGES = {"ema": "--ema-decay", "swa": "--swa-epochs"}


@dataclass(kw_only=True)
class Trained:
    """What a step moves, and by what.

    objective: the method with its model; network: the same, inside DDP where there are several ranks; parts: its
    trained parameters by tower; optimizer, scaler, gate: what moves them, and holds back; averages: the averaged twins
    of the model, of AVERAGES; config, total_steps: the schedule; stages: of backbones that stand still at first;
    accum_freq: micro-batches; autocast: makes contexts of forward passes; seeded: generators anew at every step, but
    behind a checkpoint that holds their states.
    """

    objective: Objective
    network: nn.Module
    parts: dict[str, list[nn.Parameter]]
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    gate: StepGate
    averages: dict[str, ModelEmaV3]
    config: OptimConfig
    total_steps: int
    stages: dict[str, Stage]
    accum_freq: int
    autocast: Autocast
    seeded: bool = True

    def averaged(self, step: int) -> dict[str, nn.Module]:
        """Name -> averaged twin, of those that stand for something behind `step` steps."""
        return {
            name: average.module
            for name, average in self.averages.items()
            if not isinstance(average, EpochAverage) or average.taken(step)
        }


@dataclass(kw_only=True)
class Fed:
    """What a step takes: this rank's batches, what the device does to their images and texts, and how many samples all
    ranks have.
    """

    loader: Loader
    augment: DeviceTransform | None
    global_batch: int
    token_augment: TokenAugment | None = None


@dataclass(kw_only=True)
class Health:
    """What looks after a run. utilisation: model FLOPs of a sample over the peak FLOP/s of all devices, where known."""

    meter: TermMeter
    stop: StopSignal
    agreement: Agreement
    watchdog: Watchdog
    chance: ChanceWatch
    utilisation: float | None = None
    profiler: StepProfiler | None = None


@dataclass
class Evaluated:
    """Of one model, on the first rank: metrics by name, lines for the person, the corpus's whole result, examples of
    the test sets for the report.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    headlines: list[str] = field(default_factory=list)
    corpus: CorpusResult | None = None
    examples: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Measured:
    """What is measured on the way. results: of the last evaluation, at `step`; by a prefix of metrics: "", "ema/"."""

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
    """When the next checkpoint or line of the log is due: steps and seconds after the last one (0: not by these)."""

    every_steps: int = 0
    every_seconds: float = 0.0
    last_step: int = 0
    last_time: float = field(default_factory=time.monotonic)

    def asks(self) -> int:
        """What this rank tells the others: the number of the next one if it is due by this rank's time, else 0."""
        over = bool(self.every_seconds) and time.monotonic() - self.last_time >= self.every_seconds
        return (self.last_step + 1) * over

    def due(self, step: int, agreed: int) -> bool:
        """Whether it is due after `step` steps. agreed: the largest number that a rank told, maybe a step ago."""
        by_steps = bool(self.every_steps) and step - self.last_step >= self.every_steps
        return by_steps or agreed == self.last_step + 1

    def restart(self, step: int) -> None:
        """It was done at `step`."""
        self.last_step, self.last_time = step, time.monotonic()


@dataclass(kw_only=True)
class Kept:
    """What a run leaves, and when. saves, lines: of checkpoints and of the log; saved_step: of the last checkpoint that
    this process took; saver: rank 0's alone; tokenizer: that goes with a saved model; preprocess: of its evaluation.
    """

    folder: Path
    log: RunLog
    saves: Clock
    lines: Clock
    saved_step: int | None = None
    saver: Saver | None = None
    ledger: Ledger | None = None
    tokenizer: Any = None
    preprocess: Any = None


@dataclass(kw_only=True)
class Position:
    """Where a run stands: optimiser steps taken, whole epochs done, batches taken of the present one, seconds of
    training up to the last checkpoint. closed: whether the method has fitted what it wants when training ends.
    """

    step: int = 0
    epoch: int = 0
    batch_in_epoch: int = 0
    seconds: float = 0.0
    closed: bool = False


@dataclass(kw_only=True)
class Run:
    """A run on this rank: its config, its place among the ranks, its parts, and where it stands."""

    config: Config
    world: World
    trained: Trained
    fed: Fed
    health: Health
    measured: Measured
    kept: Kept
    at: Position = field(default_factory=Position)

    @property
    def total_steps(self) -> int:
        """Its length."""
        return self.trained.total_steps
