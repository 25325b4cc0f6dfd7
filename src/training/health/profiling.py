"""--profile: a trace of a few steps, for chrome://tracing or Perfetto, and a table of what took the time."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

#: Steps before the trace: what is done once (compilation, allocation, full queues) is no part of it.
SETTLE, WARMUP = 5, 3
ROWS = 15


class StepProfiler:
    """Traces `steps` steps behind the first SETTLE + WARMUP of a run, into profile/rank_R.json of its folder."""

    def __init__(self, folder: Path, rank: int, steps: int, say: Callable[[str], None]):
        self.path, self.say, self.steps = folder / "profile" / f"rank_{rank}.json", say, steps
        self.path.parent.mkdir(parents=True, exist_ok=True)
        on_device = torch.cuda.is_available()
        self.sort = "self_cuda_time_total" if on_device else "self_cpu_time_total"
        self.profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])],
            schedule=schedule(wait=SETTLE, warmup=WARMUP, active=steps, repeat=1),
            on_trace_ready=self._leave,
            profile_memory=True,
        )
        self.profile.start()
        self.open = True

    def step(self) -> None:
        """A step has ended."""
        if self.open:
            self.profile.step()

    def close(self) -> None:
        """End a trace that is not complete: the run was shorter."""
        if self.open:
            self.open = False
            self.profile.stop()
            if not self.path.exists():
                self.say(f"no profile: the run ended within the {SETTLE + WARMUP} steps before it")

    def _leave(self, trace: profile) -> None:
        try:
            trace.export_chrome_trace(str(self.path))
        except Exception as error:  # torch says by many kinds that a file cannot be written
            self.say(f"warning: {self.path} was NOT written, the run goes on: {error}")
        table = trace.key_averages().table(sort_by=self.sort, row_limit=ROWS, max_name_column_width=60)
        self.say(f"profile of {self.steps} steps: {self.path}\n{table}")
