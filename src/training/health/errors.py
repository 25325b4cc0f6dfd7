"""How an error that ends a run is reported: a line with its remedy, or nothing for a bug."""

from __future__ import annotations

import re

import torch

from prolip.data.faults import SampleFault, TooManyBadSamples
from prolip.models.checkpoint import CheckpointError
from prolip.utils.console import one_line
from training.health.nonfinite import NonFiniteError

#: Errors whose message is enough; others are bugs and show their trace.
EXPECTED = (ValueError, OSError, ImportError, CheckpointError, NonFiniteError, SampleFault, TooManyBadSamples)
ORIGINAL = "Original Traceback (most recent call last):"
RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Fault|Samples|Exception): ", re.MULTILINE)
#: gloo's message on a rank whose peer has ended.
PEER_GONE = re.compile(r"peer.*onnection|onnection.*peer|gloo.*Broken pipe", re.DOTALL)
#: torch's messages about a worker of the loader that ended.
WORKER_ENDED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: ([^.]*)|exited )")

DEVICE_MEMORY = "give a smaller --batch-size with a larger --accum-freq (same global batch), or --grad-checkpointing"
# Within an epoch, fewer workers or a smaller shuffle buffer are refused: they change the data's order.
RESUME = "--resume auto takes any --prefetch"
HOST_MEMORY = (
    f"most likely by the kernel, out of memory (`dmesg` says): give more memory or a smaller --prefetch; {RESUME}. "
    "Fewer --workers and a smaller --shuffle-buffer take less, too, from a checkpoint between epochs or from the start"
)
SHARED_MEMORY = (
    "most likely /dev/shm is full, where its batches wait (`df -h /dev/shm`): give the container more (docker's "
    f"--shm-size), or a smaller --prefetch; {RESUME}"
)
OPEN_FILES = f"batches that wait are open files: raise the limit (`ulimit -n`), or give a smaller --prefetch; {RESUME}"
OTHER_END = "--workers 0 shows where, in a run of its own"


def explain(error: BaseException) -> str | None:
    """An expected error in a line for the person, or None for a bug."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, RuntimeError) and (ended := WORKER_ENDED.search(text)):
        met: BaseException | None = error
        signal = ""
        while met is not None and not signal:
            signal = (found[2] or "").strip() if (found := WORKER_ENDED.search(str(met))) else ""
            met = met.__cause__ or met.__context__
        cause = {"Killed": HOST_MEMORY, "": HOST_MEMORY, "Bus error": SHARED_MEMORY}.get(signal, OTHER_END)
        how = f"was killed by signal: {signal}" if signal else "ended without a word"
        return f"a worker of the data loader (process {ended[1]}) {how}, {cause}"
    if (isinstance(error, RuntimeError) or ORIGINAL in text) and (remedy := remedy_of_exhaustion(text)):
        line = next(line for line in reversed(text.splitlines()) if remedy_of_exhaustion(line))
        return f"a worker of the loader could not hand on its batch ({line.strip()[:200]}): {remedy}"
    if ORIGINAL in text:  # raised in a worker of the data loader, whose trace torch puts into the message
        return RAISED.split(text)[-1].strip()
    if isinstance(error, torch.OutOfMemoryError):
        return f"{text.split('.')[0]}: {DEVICE_MEMORY}"
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in text):
        return f"this process got no more memory ({text.splitlines()[-1][:120]}): {DEVICE_MEMORY}"
    if isinstance(error, RuntimeError) and PEER_GONE.search(text):
        return f"another rank ended ({text.splitlines()[0][:120]}): its own error stands above or below"
    return one_line(error).strip() or text if isinstance(error, EXPECTED) else None


def remedy_of_exhaustion(text: str) -> str | None:
    """The remedy where a worker or its parent finds no room for shared batches; None for other errors."""
    if "unable to allocate shared memory" in text or "unable to write to file </torch" in text:
        return SHARED_MEMORY
    return OPEN_FILES if "Too many open files" in text else None
