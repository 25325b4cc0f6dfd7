"""Run the torchrun of one node in this process: python slurm/node.py [words of torchrun]

Binds each rank to the cores near its GPU if torch and the node support it; the variable NUMA is torchrun's mode
(default: node) or `off`. After a failure, end.json in PET_LOG_DIR holds `time` in seconds since 1970, and `failures`
with the exit code and the last error of each rank that ended by itself.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ERRORS = ("error", "exception", "fault")
#: Bytes at the end of a rank's log to search for its last error.
TAIL = 2**16
#: Exit codes of ranks that wrote a reason: a traceback, one line, an abort by NCCL. Processes killed by signals do not.
SPEAKING = (1, 2, -6)


def numa_words(known: Sequence[str], mode: str, gpus: int, tool: str | None) -> tuple[list[str], str]:
    """Return (words for torchrun, a line for the log): binds ranks if `known` options, GPUs and numactl allow it."""
    if mode == "off":
        return [], "ranks are not bound to cores: NUMA=off"
    if "--numa-binding" not in known:
        return [], "ranks are not bound to cores: this torch's torchrun has no --numa-binding"
    if not gpus:
        return [], "ranks are not bound to cores: this node has no GPU"
    if tool is None:
        return [], "ranks are not bound to cores: this node has no numactl; install it or set NUMA=off"
    return [f"--numa-binding={mode}"], f"ranks are bound to the cores near their GPUs (--numa-binding={mode})"


def last_error(log: Path) -> str:
    """Return the last line about an error in a rank's log, without secrets; empty if there is none."""
    from prolip.utils.secrecy import scrub

    try:
        with open(log, "rb") as file:
            file.seek(max(log.stat().st_size - TAIL, 0))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    found = [line.strip() for line in lines if any(word in line.lower() for word in ERRORS)]
    return scrub(found[-1][:300]) if found else ""


def failures_of(error: Any, logs: Path) -> list[dict[str, Any]]:
    """Return the facts of torchrun's ChildFailedError for each rank."""
    found = []
    for rank, failure in sorted(error.failures.items(), key=lambda item: item[1].timestamp):
        written = sorted(logs.glob(f"*/attempt_*/{failure.local_rank}/stderr.log"))
        said = last_error(written[-1]) if written and failure.exitcode in SPEAKING else ""
        signal = failure.signal_name() if failure.exitcode < 0 else ""
        found.append({"rank": rank, "exit": failure.exitcode, "error": said or signal})
    return found


def note(logs: Path, failures: list[dict[str, Any]]) -> None:
    """Write end.json atomically."""
    part = logs / "end.json.part"
    part.write_text(json.dumps({"time": time.time(), "failures": failures}) + "\n")
    part.replace(logs / "end.json")


def main(words: list[str]) -> None:
    """Run torchrun; writes end.json if it fails, and raises its error."""
    logs = Path(os.environ["PET_LOG_DIR"])
    try:
        import torch
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except BaseException as error:
        note(logs, [{"rank": None, "exit": 1, "error": f"{type(error).__name__}: {error}"[:300]}])
        raise
    known = [option for action in run.get_args_parser()._actions for option in action.option_strings]
    mode, tool = os.environ.get("NUMA") or "node", shutil.which("numactl")
    binding, said = numa_words(known, mode, torch.cuda.device_count(), tool)
    with open(logs / "node.txt", "a", encoding="utf-8") as file:
        file.write(f"{said}\n")
    if os.environ.get("SLURM_NODEID", "0") == "0":
        print(said, flush=True)
    try:
        run.main([*binding, *words])
    except ChildFailedError as error:
        note(logs, failures_of(error, logs))
        raise
    except Exception as error:  # of torchrun itself, such as a rendezvous without an answer
        note(logs, [{"rank": None, "exit": 1, "error": f"{type(error).__name__}: {error}"[:300]}])
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
