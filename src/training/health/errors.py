"""Errors that end a run, each reported in one line with its remedy, and steps with non-finite terms."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from prolip.data.faults import SampleFault, TooManyBadSamples
from prolip.models.checkpoint import CheckpointError
from prolip.utils.console import one_line
from training.parallel import World, gathered


class NonFiniteError(RuntimeError):
    """A NaN or infinite term; the message names step, terms, ranks and samples."""


#: Errors reported by their message alone; others are bugs and show a traceback.
EXPECTED = (ValueError, OSError, ImportError, CheckpointError, NonFiniteError, SampleFault, TooManyBadSamples)
ORIGINAL = "Original Traceback (most recent call last):"
RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Fault|Samples|Exception): ", re.MULTILINE)
#: gloo's message on a rank whose peer has ended.
PEER_GONE = re.compile(r"peer.*onnection|onnection.*peer|gloo.*Broken pipe", re.DOTALL)
#: torch's messages about a worker of the loader that ended.
WORKER_ENDED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: ([^.]*)|exited )")

DEVICE_MEMORY = "give a smaller --batch-size with a larger --accum-freq (same global batch), or --grad-checkpointing"
# Within an epoch, fewer workers or a smaller shuffle buffer are refused: they change the data order.
RESUME = "--resume auto accepts any --prefetch"
HOST_MEMORY = (
    f"most likely by the kernel, out of memory (see `dmesg`): give more memory or a smaller --prefetch; {RESUME}. "
    "From the start or a checkpoint between epochs, also try fewer --workers or a smaller --shuffle-buffer"
)
SHARED_MEMORY = (
    "most likely because /dev/shm, which holds its batches, is full (see `df -h /dev/shm`): enlarge it (docker "
    f"--shm-size), or give a smaller --prefetch; {RESUME}"
)
OPEN_FILES = f"queued batches are open files: raise the limit (`ulimit -n`), or give a smaller --prefetch; {RESUME}"
NAMED = 5  # sample keys of a bad step
OTHER_END = "start a new run with --workers 0 to see where"


def explain(error: BaseException) -> str | None:
    """Describe an expected error in one line; None for a bug."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, RuntimeError) and (ended := WORKER_ENDED.search(text)):
        met: BaseException | None = error
        signal = ""
        while met is not None and not signal:
            signal = (found[2] or "").strip() if (found := WORKER_ENDED.search(str(met))) else ""
            met = met.__cause__ or met.__context__
        cause = {"Killed": HOST_MEMORY, "": HOST_MEMORY, "Bus error": SHARED_MEMORY}.get(signal, OTHER_END)
        how = f"was killed by signal: {signal}" if signal else "ended without a message"
        return f"a worker of the data loader (process {ended[1]}) {how}, {cause}"
    if (isinstance(error, RuntimeError) or ORIGINAL in text) and (remedy := remedy_of_exhaustion(text)):
        line = next(line for line in reversed(text.splitlines()) if remedy_of_exhaustion(line))
        return f"a worker of the data loader could not send its batch ({line.strip()[:200]}): {remedy}"
    if ORIGINAL in text:  # raised in a worker of the data loader, whose trace torch puts into the message
        return RAISED.split(text)[-1].strip()
    if isinstance(error, torch.OutOfMemoryError):
        return f"{text.split('.')[0]}: {DEVICE_MEMORY}"
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in text):
        return f"this process is out of memory ({text.splitlines()[-1][:120]}): {DEVICE_MEMORY}"
    if isinstance(error, RuntimeError) and PEER_GONE.search(text):
        return f"another rank ended ({text.splitlines()[0][:120]}): see its error above or below"
    return one_line(error).strip() or text if isinstance(error, EXPECTED) else None


def remedy_of_exhaustion(text: str) -> str | None:
    """Return the remedy if a worker or its parent has no room for shared batches; None for other errors."""
    if "unable to allocate shared memory" in text or "unable to write to file </torch" in text:
        return SHARED_MEMORY
    return OPEN_FILES if "Too many open files" in text else None


class NonFiniteGuard:
    """Guard that skips the optimiser's step for non-finite gradients, on the device: the host does not wait.

    After more than `allowed` such steps, it skips all steps, so the parameters stay finite until the host checks.
    """

    def __init__(self, allowed: int, device: torch.device):
        self.allowed = allowed
        self.bad_steps = torch.zeros((), device=device)

    def hold(self, grad_norm: Tensor) -> Tensor:
        """Return 1 to skip this step, equal on all ranks, else 0: () float."""
        bad = (~torch.isfinite(grad_norm.detach())).float()
        self.bad_steps = self.bad_steps + bad
        return torch.maximum(bad, (self.bad_steps > self.allowed).float())


class LossMeter:
    """Sums of scalar terms on their device, and a record of finite ones. `check` and `read` wait for the device."""

    def __init__(self, ignored: Sequence[str] = (), allowed: int = 0):
        self.ignored = ignored  # prefixes of terms that may be infinite
        self.allowed = allowed  # steps with other non-finite terms before the run stops
        self.bad_steps = 0
        self.sums: Tensor | float = 0.0
        self.counts: Tensor | float = 0.0
        self.finite: list[Tensor] = []
        self.steps: list[tuple[int, Sequence[str]]] = []
        self.names: list[str] = []
        self.all_names: list[str] = []

    def add(self, terms: Mapping[str, Tensor], step: int, keys: Sequence[str] = ()) -> None:
        """Add the terms of a step on samples `keys`; bad steps and non-finite ignored terms are not counted."""
        self.all_names = list(terms)
        judged = [i for i, name in enumerate(terms) if not name.startswith(tuple(self.ignored))]
        self.names = [self.all_names[i] for i in judged]
        values = torch.stack([value.detach().double().reshape(()) for value in terms.values()])
        each = torch.isfinite(values)
        finite = torch.stack([each[i] for i in judged])
        counted = each & finite.all()
        self.sums = self.sums + torch.where(counted, values, 0.0)
        self.counts = self.counts + counted.double()
        self.finite.append(finite)
        self.steps.append((step, keys))

    def check(self, world: World) -> list[str]:
        """Describe the bad steps since the last check, on every rank; NonFiniteError after more than `allowed`."""
        if not self.finite:
            return []
        finite, steps, self.finite, self.steps = torch.stack(self.finite), self.steps, [], []
        any_bad = (~finite).any().float()
        if world.world_size > 1:
            dist.all_reduce(any_bad, op=dist.ReduceOp.MAX)
        if not any_bad:
            return []
        found = {}
        for row, (step, keys) in zip(finite.tolist(), steps):
            if not all(row):
                found[step] = ([name for name, ok in zip(self.names, row) if not ok], list(keys[:NAMED]), len(keys))

        def describe(everywhere: list[dict]) -> list[str]:
            """Name the terms, the ranks and the first samples of each rank's batch for each bad step."""
            said = []
            for step in sorted(set().union(*everywhere)):
                met = {rank: found[step] for rank, found in enumerate(everywhere) if step in found}
                names = list(dict.fromkeys(name for terms, _, _ in met.values() for name in terms))
                ranks = f"on rank {', '.join(map(str, met))} " if len(everywhere) > 1 else ""
                shown = [(", ".join(keys), total - len(keys)) for _, keys, total in met.values() if keys]
                samples = "; ".join(keys + (f" and {more} more" if more else "") for keys, more in shown)
                said.append(f"step {step}: {', '.join(names)} not finite {ranks}(samples {samples or 'unknown'})")
            return said

        reports = gathered(found, describe, world)
        self.bad_steps += len(reports)
        if self.bad_steps > self.allowed:
            allowed = f" (--max-nonfinite {self.allowed} allows {self.allowed} such steps)" if self.allowed else ""
            first = reports[max(0, self.allowed - self.bad_steps + len(reports))]
            raise NonFiniteError(
                f"{first}; the run stops before this reaches the parameters{allowed}. Resume from the last checkpoint "
                "or the start (--resume auto) with a lower --lr or --grad-clip-norm 1, or skip a few such steps "
                "with --max-nonfinite"
            )
        return reports

    def read(self, world: World) -> dict[str, float]:
        """Return the mean of every term over finite steps and ranks since the last call; resets the sums."""
        if not isinstance(self.sums, Tensor):
            return {}
        means, names = self.sums / self.counts, self.all_names
        if world.world_size > 1:
            dist.all_reduce(means)
            means /= world.world_size
        self.sums = self.counts = 0.0
        return dict(zip(names, means.tolist()))
