"""Find the host that made a try of a job fail: python slurm/blame.py runs/NAME/slurm/JOB-TRY

Prints one line of three fields between tabs: the action, SLURM's list of nodes to exclude or -, and the reason for the
log. The action is one of
  none     no host is at fault
  again    a host is at fault for the first time: another try may succeed
  exclude  a host is at fault for the second time: the next try excludes it
  keep     a host is at fault, but the job cannot run without it
Each verdict is a line of failures.jsonl next to the try's folder.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

#: Failed tries after which a host is excluded.
TRIES = 2
#: Minimum seconds between two errors whose order is trusted despite the nodes' clocks.
MARGIN = 2.0
#: Errors of a rank or torchrun that ended because another did.
LOST = re.compile(
    r"another rank ended|peer.*onnection|onnection.*peer|Broken pipe|remote process exited|ncclRemoteError"
    r"|Watchdog caught|communicator was aborted|DistNetworkError|DistStoreError|Rendezvous\w*Error|SignalException"
    r"|socket has timed out"
)
#: Exit codes of ranks that torchrun and SLURM ended without a fault.
ENDED = (-15, 143)
#: States of nodes that accept jobs.
TAKING = ("idle", "alloc", "mix", "comp")


class Failure(NamedTuple):
    """The first error of a node that another node's end did not cause."""

    host: str
    time: float
    exit: int
    error: str

    def like(self, exit: int, error: str) -> bool:
        """Return True if two errors are equal except for numbers; ranks other than 0 end with 2 and no message."""
        shapes = [re.sub(r"0x[0-9a-f]+|\d+", "#", re.sub(r"\(rank \d+\)", "", text)) for text in (self.error, error)]
        return self.exit == exit and (shapes[0] == shapes[1] or not (self.error and error))

    def __str__(self) -> str:
        return self.error or f"exit code {self.exit}"


def read(logs: Path) -> list[Failure]:
    """Read the failures noted by the nodes of a try, earliest first; without notes, the first end that srun saw."""
    found = []
    for file in logs.glob("*/end.json"):
        end = json.loads(file.read_text())
        own = [one for one in end["failures"] if one["exit"] not in ENDED and not LOST.search(one["error"])]
        if own:
            found.append(Failure(file.parent.name, end["time"], own[0]["exit"], own[0]["error"]))
    return sorted(found, key=lambda failure: failure.time) or killed(logs)


def killed(logs: Path) -> list[Failure]:
    """Return the single task that srun saw end first, if it left no note: its torchrun was killed."""
    try:
        said = (logs / "srun.err").read_text(errors="replace")
    except OSError:
        return []
    first = re.search(r"^srun: error: ([^\s\[\],:]+): task \d+: (.+)$", said, re.MULTILINE)
    if first is None or (logs / first[1] / "end.json").exists() or "Terminated" in first[2]:
        return []
    return [Failure(first[1], 0.0, 1, f"torchrun ended without a message ({first[2]})")]


def judge(failures: list[Failure], earlier: list[dict[str, Any]]) -> tuple[Failure | None, str]:
    """Return (the failure of the host at fault or None, reason). earlier: verdicts on this job's other tries."""
    if not failures:
        return None, "no node ended with its own error: no host is at fault"
    first, *others = failures
    alike = [other.host for other in others if first.like(other.exit, other.error)]
    if alike:
        return (
            None,
            f"{first.host} and {', '.join(alike[:3])} failed with the same error ({first}): no host is at fault",
        )
    if others and others[0].time - first.time < MARGIN:
        return (
            None,
            f"{first.host} ({first}) and {others[0].host} ({others[0]}) failed at the same time: no host is at fault",
        )
    same = [
        row["host"]
        for row in earlier
        if row["host"] not in (None, first.host) and first.like(row["exit"], row["error"])
    ]
    if same:
        return None, f"{first.host} failed like {same[-1]} before ({first}): the program is at fault, not the host"
    return first, f"{first.host} failed first ({first})"


def call(*words: str) -> str:
    """Return the output of a SLURM command; empty if it fails."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def expanded(nodes: str) -> list[str]:
    """Expand a list such as node[1-3] to hosts."""
    return [] if nodes in ("", "(null)") else call("scontrol", "show", "hostnames", nodes).split()


def spared(host: str, job: str, needed: int) -> tuple[str, str]:
    """Return (hosts to exclude including this one, or empty if the job could not run without it; reason)."""
    facts = dict(re.findall(r"(\w+)=(\S*)", call("scontrol", "-o", "show", "job", job)))
    if host in expanded(facts.get("ReqNodeList", "")):
        return "", "the job requires it by name"
    rows = call("sinfo", "-h", "-N", "-p", facts.get("Partition", ""), "-o", "%N|%t|%f|%c|%m|%G").splitlines()
    kinds = {name: (state, kind) for name, state, *kind in (row.split("|") for row in rows)}
    excluded = list(dict.fromkeys([*expanded(facts.get("ExcNodeList", "")), host]))
    kind = kinds.get(host, ("", None))[1]
    left = [
        name
        for name, (state, other) in kinds.items()
        if other == kind and state.rstrip("+~#") in TAKING and name not in excluded
    ]
    if len(left) < needed:
        return "", f"only {len(left)} such nodes are left, but the job needs {needed}"
    return ",".join(excluded), f"{len(left)} such nodes are left, the job needs {needed}"


def verdict(logs: Path) -> tuple[str, str, str]:
    """Return the printed fields, and write them to failures.jsonl."""
    record, (job, _, number) = logs.parent / "failures.jsonl", logs.name.rpartition("-")
    rows = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    earlier = [row for row in rows if row["job"] == job and row["try"] != int(number)]
    failure, why = judge(read(logs), earlier)
    action, nodes = "none", "-"
    if failure is not None:
        count = 1 + len({row["try"] for row in earlier if row["host"] == failure.host})
        action, why = "again", f"{why}; failed tries of this host: {count}"
        if count >= TRIES:
            nodes, reason = spared(failure.host, job, int(os.environ["SLURM_NNODES"]))
            action, nodes = ("exclude", nodes) if nodes else ("keep", "-")
            why += f"; {'excluded' if action == 'exclude' else 'NOT excluded'}, {reason}"
    facts = {"exit": failure.exit, "error": failure.error} if failure else {"exit": None, "error": ""}
    row = {"job": job, "try": int(number), "host": failure.host if failure else None, **facts, "verdict": action}
    with open(record, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return action, nodes, " ".join(why.split())


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python slurm/blame.py runs/NAME/slurm/JOB-TRY")
    print("\t".join(verdict(Path(sys.argv[1]))))
