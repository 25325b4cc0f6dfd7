"""What a person sees of a run, and what is kept of it: progress line, metrics.jsonl, TensorBoard, profile."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from prolip.methods.base import RECALL
from prolip.utils.console import plain
from prolip.utils.secrecy import scrub
from training.checkpoint.run_folder import keep_until_step

# What stands elsewhere in the progress line than among the terms of the loss, or not at all.
NO_TERMS = ("loss", "lr", "grad_norm", "samples_per_second", "data_wait", RECALL)
NO_TERM_OF = "grad_norm_"
#: Steps before the trace of --profile: what is done once (compilation, allocation, full queues) is no part of it.
SETTLE, WARMUP = 5, 3
PROFILE_ROWS = 15


class Stopwatch:
    """Seconds and samples since the last lap, and how much of the time went into waiting for data.

    before: seconds of training before this process went on with the run.
    """

    def __init__(self, before: float = 0.0) -> None:
        self.before = before
        self.start = self.lap_start = time.perf_counter()
        self.waited = 0.0
        self.samples = 0

    def lap(self) -> dict[str, float]:
        """samples_per_second and data_wait (share of the time) since the last lap; starts anew."""
        now = time.perf_counter()
        seconds = max(now - self.lap_start, 1e-9)
        rates = {"samples_per_second": self.samples / seconds, "data_wait": self.waited / seconds}
        self.lap_start, self.waited, self.samples = now, 0.0, 0
        return rates

    def elapsed(self) -> float:
        """Seconds of training so far, those before included."""
        return self.before + time.perf_counter() - self.start

    def pause(self, seconds: float) -> None:
        """Leave time that went into something else (evaluation, saving) out of rates and sums."""
        self.lap_start += seconds
        self.start += seconds


class RunLog:
    """Lines for a person on `stream`, objects for programs in metrics.jsonl, curves in TensorBoard and W&B; rank 0.

    Nothing is written into the folder before `open`.
    """

    def __init__(self, folder: Path, is_first: bool = True, stream: TextIO | None = None):
        self.stream = stream or sys.stdout
        self.folder, self.is_first = folder, is_first
        self.colours = is_first and self.stream.isatty()
        self.file: TextIO | None = None
        self.board: Any = None
        self.wandb: Any = None
        self.failing: set[str] = set()

    def open(self, resume_at: int | None = None, again: str | None = None, wandb_project: str | None = None) -> None:
        """Open the files; with resume_at those of a run that goes on behind that step, see `keep_until_step`."""
        if not self.is_first:
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        path = self.folder / "metrics.jsonl"
        if resume_at is not None and path.exists():
            keep_until_step(path, resume_at, again)
        self.file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  closed in close()
        # TensorBoard hides what it has from purge_step on
        purge = None if resume_at is None else resume_at + 1
        threading.excepthook = report_thread_error
        try:
            self.board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=purge)
        except UnicodeEncodeError:
            self.say(
                f"warning: no curves for TensorBoard, which writes into no folder such as {plain(self.folder)}:"
                " its name is no UTF-8"
            )
        if wandb_project:
            import wandb

            name = self.folder.name  # its id as well, so that a resumed run goes on in the same
            config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
            self.wandb = wandb.init(
                project=wandb_project, id=name, name=name, dir=str(self.folder), resume="allow", config=config
            )

    def say(self, text: str) -> None:
        """A line for the person, at once; addresses in it are without secrets."""
        if self.is_first:
            print(scrub(text), file=self.stream, flush=True)

    def metrics(self, step: int, values: Mapping[str, Any], kind: str = "train") -> None:
        """One object in metrics.jsonl, one point per number in TensorBoard, those of counts by kind too."""
        if self.file is None:
            return
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        with self.kept_going("metrics.jsonl", step):
            self.file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")
        if self.board is not None:
            with self.kept_going("TensorBoard", step):
                for name, value in flattened(values):
                    if isinstance(value, (int, float)):
                        self.board.add_scalar(f"{kind}/{name}", value, step)
            if "TensorBoard" in self.failing:  # its thread has ended: it begins again with the next try of the run
                self.board = None
        if self.wandb is not None:
            with self.kept_going("W&B", step):
                self.wandb.log({f"{kind}/{name}": value for name, value in flattened(finite)}, step=step)

    @contextlib.contextmanager
    def kept_going(self, place: str, step: int) -> Iterator[None]:
        """Have the run outlive what cannot be written; reported when it begins and when it is over."""
        try:
            yield
        except Exception as error:  # W&B and TensorBoard have exceptions of many kinds
            if place not in self.failing:
                self.say(f"warning: the figures of step {step} were NOT logged, the run goes on: {error} ({place})")
            self.failing.add(place)
        else:
            if place in self.failing:
                self.failing.remove(place)
                self.say(f"note: {place} takes figures again from step {step} on")

    def progress(self, line: str) -> None:
        """The progress line: figures bold on a terminal, plain in a file."""
        if not self.colours:
            self.say(line)
            return
        head, bar, rest = line.partition(" | ")
        print(
            f"\033[2m{head}\033[0m{bar}\033[1m{rest}\033[0m",
            file=getattr(self.stream, "stream", self.stream),
            flush=True,
        )

    def close(self) -> None:
        if self.file is not None:
            for part in (self.file.close, getattr(self.board, "close", None), getattr(self.wandb, "finish", None)):
                with contextlib.suppress(Exception):  # reported before
                    if part is not None:
                        part()


def flattened(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """name, value; and name/kind, value of what is counted by kind."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{kind}", part) for kind, part in value.items())
        else:
            yield name, value


def report_thread_error(met: threading.ExceptHookArgs) -> None:
    """What a thread met, as Python shows it, but for TensorBoard's, which hands it to the next call."""
    if type(met.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(met)


def progress_line(
    values: Mapping[str, float],
    step: int,
    total: int,
    epoch: float,
    seconds_left: float,
    faults: Mapping[str, int],
    statistics: Sequence[str] = (),
    candidates: int = 1,
) -> str:
    """step | loss and its terms | R@1 | statistics | rates: one line, the same columns every time.

    statistics: those of `values` that are no terms of the loss; candidates: of which R@1 is.
    """
    width = len(str(total))
    parts = [f"step {step:>{width}}/{total} ({100 * step / total:.0f}%) epoch {epoch:.1f}"]
    others = (*NO_TERMS, *statistics)
    terms = {name: value for name, value in values.items() if name not in others and not name.startswith(NO_TERM_OF)}
    parts.append(f"loss {values['loss']:.4g}" + (f"  ({grouped(terms)})" if terms else ""))
    if RECALL in values:
        parts.append(f"R@1 {values[RECALL]:.1%} (chance {1 / candidates:.1%})")
    beside = {name: value for name, value in values.items() if name in statistics}
    if beside:
        parts.append(grouped(beside))
    if "grad_norm" in values:
        parts.append(f"grad {values['grad_norm']:.4g}")
    parts.append(f"lr {values['lr']:.2e}")
    parts.append(f"{values['samples_per_second']:.0f} samples/s  data wait {100 * values['data_wait']:.0f}%")
    parts.append(f"ETA {duration(seconds_left)}")
    if faults:
        parts.append("faults " + " ".join(f"{kind}={count}" for kind, count in faults.items()))
    return " | ".join(parts)


def grouped(values: Mapping[str, float]) -> str:
    """name value pairs; those that share the first word of their names say it once: `vib image 4.5 text 4.4`."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        first, _, rest = name.partition("_")
        groups.setdefault(first, []).append(f"{rest} {value:.4g}".strip())
    return "  ".join(f"{first} {' '.join(members)}" for first, members in groups.items())


def peak_memory(device: torch.device) -> float:
    """Most memory that this process has held so far, GiB: of the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux


def duration(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def count_parameters(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Top-level part -> (parameters, trainable ones); parameters directly on the model count as `logit`."""
    counts: dict[str, tuple[int, int]] = {}
    for name, parameter in model.named_parameters():
        part = name.split(".")[0] if "." in name else "logit"
        every, trained = counts.get(part, (0, 0))
        counts[part] = (every + parameter.numel(), trained + parameter.numel() * parameter.requires_grad)
    return counts


class StepProfiler(profile):
    """Traces `steps` steps behind the first SETTLE + WARMUP of a run, into profile/rank_0.json of its folder: for
    chrome://tracing or Perfetto. A table of what took the time goes to `say`.
    """

    def __init__(self, folder: Path, steps: int, say: Callable[[str], None]):
        self.path, self.say, self.steps = folder / "profile/rank_0.json", say, steps
        self.path.parent.mkdir(parents=True, exist_ok=True)
        on_device = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self.sort = "self_cuda_time_total" if on_device else "self_cpu_time_total"
        super().__init__(
            activities=[ProfilerActivity.CPU, *on_device],
            schedule=schedule(wait=SETTLE, warmup=WARMUP, active=steps, repeat=1),
            on_trace_ready=self._leave,
            profile_memory=True,
        )
        self.start()

    def close(self) -> None:
        """End a trace that is not complete: the run was shorter."""
        self.stop()
        if not self.path.exists():
            self.say(f"no profile: the run ended within the {SETTLE + WARMUP} steps before it")

    def _leave(self, trace: profile) -> None:
        try:
            trace.export_chrome_trace(str(self.path))
        except Exception as error:  # torch says by many kinds that a file cannot be written
            self.say(f"warning: {self.path} was NOT written, the run goes on: {error}")
        table = trace.key_averages().table(sort_by=self.sort, row_limit=PROFILE_ROWS, max_name_column_width=60)
        self.say(f"profile of {self.steps} steps: {self.path}\n{table}")
