"""Progress line, metrics.jsonl, TensorBoard, profile, and a warning if a run does not learn."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from prolip.measures.chance import is_at_chance
from prolip.methods.base import CANDIDATES, RECALL
from prolip.utils.secrecy import scrub
from training.checkpoint.run_dir import truncate_log

T = TypeVar("T")
#: Values that the progress line does not show as terms of the loss.
NO_TERMS = ("loss", "lr", "grad_norm", "samples_per_second", "data_wait", RECALL)
NO_TERM_OF = "grad_norm_"
SETTLE, WARMUP = 5, 3  # steps before the trace of --profile: compilation, allocation and full queues
PROFILE_ROWS = 15


class Stopwatch:
    """Seconds, samples and data waits since the last lap. before: seconds of training before a resume."""

    def __init__(self, before: float = 0.0) -> None:
        self.before = before
        self.start = self.lap_start = time.perf_counter()
        self.waited = 0.0
        self.samples = 0

    def lap(self) -> dict[str, float]:
        """Return samples_per_second and data_wait (share of the time) since the last lap; starts a new lap."""
        now = time.perf_counter()
        seconds = max(now - self.lap_start, 1e-9)
        rates = {"samples_per_second": self.samples / seconds, "data_wait": self.waited / seconds}
        self.lap_start, self.waited, self.samples = now, 0.0, 0
        return rates

    def elapsed(self) -> float:
        """Return the seconds of training so far, including those before a resume."""
        return self.before + time.perf_counter() - self.start

    def pause(self, seconds: float) -> None:
        """Exclude the seconds of an evaluation or a save from rates and sums."""
        self.lap_start += seconds
        self.start += seconds

    def waiting(self, work: Callable[[], T]) -> T:
        """Return the result of `work`; its time counts as waiting for data."""
        start = time.perf_counter()
        result = work()
        self.waited += time.perf_counter() - start
        return result


class RunLog:
    """Log of rank 0: lines on `stream`; once `open`ed, objects in metrics.jsonl and curves in TensorBoard and W&B."""

    def __init__(self, folder: Path, is_first: bool = True, stream: TextIO | None = None):
        self.stream = stream or sys.stdout
        self.folder, self.is_first = folder, is_first
        self.file: TextIO | None = None
        self.board: Any = None
        self.wandb: Any = None
        self.failing: set[str] = set()

    def open(self, resume_at: int | None = None, again: str | None = None, wandb_project: str | None = None) -> None:
        """Open the files; resume_at: drop entries after this step, see `truncate_log`."""
        if not self.is_first:
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        path = self.folder / "metrics.jsonl"
        if resume_at is not None and path.exists():
            truncate_log(path, resume_at, again)
        self.file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  closed in close()
        purge = None if resume_at is None else resume_at + 1  # TensorBoard hides earlier points from this step
        # an error of TensorBoard's thread is raised at its next call
        shown = threading.__excepthook__
        threading.excepthook = lambda met: type(met.thread).__name__ == "_AsyncWriterThread" or shown(met)
        self.board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=purge)
        if wandb_project:
            import wandb

            name = self.folder.name  # also the id, so that a resumed run continues the same one
            config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
            place = {"project": wandb_project, "id": name, "name": name, "dir": str(self.folder)}
            self.wandb = wandb.init(**place, resume="allow", config=config)

    def say(self, text: str) -> None:
        """Print a line immediately, without secrets in addresses."""
        if self.is_first:
            print(scrub(text), file=self.stream, flush=True)

    def metrics(self, step: int, values: Mapping[str, Any], kind: str = "train") -> None:
        """Write one object to metrics.jsonl, and each number, also counts by kind, to TensorBoard and W&B."""
        if self.file is None:
            return
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        with self.kept_going("metrics.jsonl", step):
            self.file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")
        counts = {k: v for k, v in values.items() if isinstance(v, Mapping)}
        flat = {f"{kind}/{name}": value for name, value in values.items() if name not in counts}
        flat |= {f"{kind}/{name}/{part}": n for name, of in counts.items() for part, n in of.items()}
        if self.board is not None:
            with self.kept_going("TensorBoard", step):
                for name, value in flat.items():
                    if isinstance(value, (int, float)):
                        self.board.add_scalar(name, value, step)
            if "TensorBoard" in self.failing:  # its thread has ended; a resumed run starts it again
                self.board = None
        if self.wandb is not None:
            with self.kept_going("W&B", step):
                self.wandb.log(flat, step=step)

    @contextlib.contextmanager
    def kept_going(self, place: str, step: int) -> Iterator[None]:
        """Report the first failed write to `place`; the run continues."""
        try:
            yield
        except Exception as error:  # W&B and TensorBoard have exceptions of many kinds
            if place not in self.failing:
                self.say(f"warning: the metrics of step {step} were NOT logged; the run continues: {error} ({place})")
            self.failing.add(place)

    def close(self) -> None:
        if self.file is not None:
            for part, end in ((self.file, "close"), (self.board, "close"), (self.wandb, "finish")):
                with contextlib.suppress(Exception):  # reported before, or None
                    getattr(part, end)()


def progress_line(
    values: Mapping[str, float],
    at: tuple[int, int, float],
    seconds_left: float,
    faults: Mapping[str, int],
    statistics: Sequence[str] = (),
    candidates: int = 1,
) -> str:
    """Format a line: step | loss and terms | R@1 among `candidates` | `statistics` | rates. at: step, all steps, epoch.
    Names with a common first word share it: `vib image 4.5 text 4.4`.
    """

    def grouped(chosen: Callable[[str], bool]) -> str:
        groups: dict[str, str] = {}
        for name in filter(chosen, values):
            first, _, rest = name.partition("_")
            groups[first] = f"{groups.get(first, first)} {rest}".rstrip() + f" {values[name]:.4g}"
        return "  ".join(groups.values())

    step, total, epoch = at
    parts = [f"step {step:>{len(str(total))}}/{total} ({100 * step / total:.0f}%) epoch {epoch:.1f}"]
    others = (*NO_TERMS, *statistics)
    terms = grouped(lambda name: name not in others and not name.startswith(NO_TERM_OF))
    parts.append(f"loss {values['loss']:.4g}" + (f"  ({terms})" if terms else ""))
    if RECALL in values:
        parts.append(f"R@1 {values[RECALL]:.1%} (chance {1 / candidates:.1%})")
    parts.append(grouped(lambda name: name in statistics))
    if "grad_norm" in values:
        parts.append(f"grad {values['grad_norm']:.4g}")
    parts.append(f"lr {values['lr']:.2e}")
    parts.append(f"{values['samples_per_second']:.0f} samples/s  data wait {100 * values['data_wait']:.0f}%")
    parts.append(f"ETA {duration(seconds_left)}")
    if faults:
        parts.append("faults " + " ".join(f"{kind}={count}" for kind, count in faults.items()))
    return " | ".join(filter(None, parts))


def duration(seconds: float) -> str:
    """Format seconds as h:mm:ss, or m:ss below an hour."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


@dataclass
class ChanceWatch:
    """Test of the in-batch R@1 of the last CANDIDATES pairs or more against chance, once, after a tenth of the run."""

    rows: int  # of a rank in a step
    ranks: int
    total: int  # steps of the run
    seen: int = 0  # step of the last call
    steps: int = 0
    found: float = 0.0
    judged: bool = False

    @property
    def candidates(self) -> int:  # captions among which the image's own is ranked
        return min(self.rows, CANDIDATES)

    def judge(self, step: int, recall: float) -> str:
        """Return a warning, or an empty string. recall: mean since the last call."""
        taken, self.seen = step - self.seen, step
        if self.judged or self.candidates < 2 or not math.isfinite(recall):
            return ""
        self.steps, self.found = self.steps + taken, self.found + recall * taken
        if self.steps * self.candidates * self.ranks < CANDIDATES:
            return ""
        rate, self.steps, self.found = self.found / self.steps, 0, 0.0
        self.judged = 10 * step >= self.total
        if not self.judged or not is_at_chance(round(rate * CANDIDATES), CANDIDATES, self.candidates):
            return ""
        return (
            f"warning: step {step}: the model is still at chance: in-batch R@1 is {rate:.1%}, chance is "
            f"{1 / self.candidates:.1%}. Likely causes: the bias (--init-logit-bias auto, or -log(batch - 1)), the "
            "learning rate (--lr), captions of other images, frozen towers (--lock-image, --lock-text)"
        )


class StepProfiler(profile):
    """Profiler of `steps` steps after the first SETTLE + WARMUP: writes profile/rank_0.json in the run's folder, for
    chrome://tracing or Perfetto; `say` gets a table of the slowest operations.
    """

    def __init__(self, folder: Path, steps: int, say: Callable[[str], None]):
        self.path, self.say = folder / "profile/rank_0.json", say
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        when = schedule(wait=SETTLE, warmup=WARMUP, active=steps, repeat=1)

        def leave(trace: profile) -> None:
            try:
                trace.export_chrome_trace(str(self.path))
            except Exception as error:  # torch raises many kinds if a file cannot be written
                say(f"warning: {self.path} was NOT written; the run continues: {error}")
            sort = f"self_{'cuda' if len(kinds) > 1 else 'cpu'}_time_total"
            table = trace.key_averages().table(sort_by=sort, row_limit=PROFILE_ROWS, max_name_column_width=60)
            say(f"profile of {steps} steps: {self.path}\n{table}")

        super().__init__(activities=kinds, schedule=when, on_trace_ready=leave, profile_memory=True)
        self.start()

    def close(self) -> None:
        """End an incomplete trace of a shorter run."""
        self.stop()
        if not self.path.exists():
            self.say(f"no profile: the run ended within the first {SETTLE + WARMUP} steps")
