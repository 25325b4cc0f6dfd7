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
from training.checkpoint.files import CheckpointWriter
from training.checkpoint.run_dir import Ledger
from training.config import Config, OptimConfig
from training.health.errors import LossMeter, NonFiniteGuard
from training.health.log import ChanceWatch, RunLog, StepProfiler
from training.health.signals import StopSignal, Watchdog
from training.model import Autocast
from training.optim import EpochAverage, Stage
from training.parallel import StopConsensus, World

if TYPE_CHECKING:  # evaluations load scipy and more, which runs without evaluations do not need
    from prolip.corpora.emoji.result import CorpusResult
    from training.evaluate import Validation

#: Averaged models -> their flags. Their metrics begin with NAME/, their folders and files end in _NAME.
AVERAGES = {"ema": "--ema-decay", "swa": "--swa-epochs"}


@dataclass(kw_only=True)
class TrainState:
    """Model, optimiser and schedule."""

    objective: Objective  # the method, with its model
    network: nn.Module  # the objective, wrapped in DDP if there are several ranks
    parts: dict[str, list[nn.Parameter]]  # trained parameters by tower
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    gate: NonFiniteGuard
    averages: dict[str, ModelEmaV3]  # by name of AVERAGES
    config: OptimConfig
    total_steps: int
    stages: dict[str, Stage]  # of backbones frozen at first
    accum_freq: int
    autocast: Autocast
    seeded: bool = True  # seed generators at every step; False after a checkpoint with generator states

    def swa_steps(self, step: int) -> list[int]:
        """Return the steps whose weights SWA has averaged after `step`; empty without SWA."""
        average = self.averages.get("swa")
        return average.taken(step) if isinstance(average, EpochAverage) else []

    def averaged(self, step: int) -> dict[str, nn.Module]:
        """Return name -> averaged model, for averages that hold weights after `step` steps."""
        return {name: x.module for name, x in self.averages.items() if name != "swa" or self.swa_steps(step)}


@dataclass
class DataState:
    """This rank's batches, and their augmentation on the device."""

    loader: Loader
    augment: DeviceTransform | None
    token_augment: TokenAugment | None
    global_batch: int  # samples of all ranks in a step


@dataclass
class Health:
    """The health monitors of a run."""

    meter: LossMeter
    stop: StopSignal
    consensus: StopConsensus
    watchdog: Watchdog
    chance: ChanceWatch
    utilisation: float | None = None  # model FLOPs per sample / peak FLOP/s of all devices, if known
    profiler: StepProfiler | None = None


@dataclass
class Evaluated:
    """The evaluation of a model, on the first rank: metrics, log lines, the emoji corpus's result, examples of sets."""

    metrics: dict[str, float] = field(default_factory=dict)
    headlines: list[str] = field(default_factory=list)
    corpus: CorpusResult | None = None
    examples: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class EvalState:
    """The last evaluation, and the test sets."""

    validation: Validation | None = None
    results: dict[str, Evaluated] = field(default_factory=dict)  # by prefix of the metrics: "", "ema/"
    step: int | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics, with their prefixes."""
        return {prefix + name: value for prefix, one in self.results.items() for name, value in one.metrics.items()}


@dataclass(kw_only=True)
class Clock:
    """Schedule of checkpoints or log lines: steps and seconds after the last one (0: never)."""

    every_steps: int = 0
    every_seconds: float = 0.0
    last_step: int = 0
    last_time: float = field(default_factory=time.monotonic)

    def asks(self) -> int:
        """Return the number of the next one if it is due by this rank's clock, else 0."""
        over = bool(self.every_seconds) and time.monotonic() - self.last_time >= self.every_seconds
        return (self.last_step + 1) * over

    def due(self, step: int, agreed: int) -> bool:
        """Return True if the next one is due after `step` steps. agreed: largest number that a rank requested."""
        by_steps = bool(self.every_steps) and step - self.last_step >= self.every_steps
        return by_steps or agreed == self.last_step + 1

    def restart(self, step: int) -> None:
        """Count from `step`."""
        self.last_step, self.last_time = step, time.monotonic()


@dataclass
class RunOutputs:
    """Outputs of a run, with their schedules."""

    folder: Path
    log: RunLog
    tokenizer: Any  # saved with a model
    preprocess: Any
    saves: Clock  # checkpoints
    lines: Clock  # of the log
    saved_step: int | None = None  # last step that this process saved
    saver: CheckpointWriter | None = None  # on rank 0, or on all for shards
    ledger: Ledger | None = None


@dataclass(kw_only=True)
class Position:
    """The position of a run, as saved in checkpoints."""

    step: int = 0
    epoch: int = 0  # completed epochs
    batch_in_epoch: int = 0
    seconds: float = 0.0  # of training, up to the last checkpoint
    closed: bool = False  # the method's fit at the end is done


@dataclass(kw_only=True)
class Run:
    """The complete state of a run on this rank."""

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
        return self.trained.total_steps
