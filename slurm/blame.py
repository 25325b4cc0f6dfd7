"""Which host made a try of a job fail, and is the next to go without it? python slurm/blame.py runs/NAME/slurm/JOB-TRY

Prints one line of three fields between tabs: what is to be done, SLURM's list of nodes to exclude or -, and what the
log says. To be done is one of
  none     no host is at fault
  again    a host is, for the first time: another try may pass
  exclude  it is for the second time: the next try goes without it
  keep     it is, but the job cannot run without it
Each verdict is a line of failures.jsonl beside the try's folder.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

#: Tries that a host may make fail before it is excluded.
TRIES = 2
#: Seconds between two errors from which on the order of two nodes' clocks is believed.
MARGIN = 2.0
#: Of a rank or torchrun that ended because another did.
LOST = re.compile(
    r"another rank ended|peer.*onnection|onnection.*peer|Broken pipe|remote process exited|ncclRemoteError"
    r"|Watchdog caught|communicator was aborted|DistNetworkError|DistStoreError|Rendezvous\w*Error|SignalException"
    r"|socket has timed out"
)
#: Signals by which torchrun and SLURM end ranks that did nothing wrong.
ENDED = (-15, 143)
#: States of nodes that take jobs.
TAKING = ("idle", "alloc", "mix", "comp")


class Failure(NamedTuple):
    """The first error of a node that did not come of another's end."""

    host: str
    time: float
    exit: int
    error: str

    def like(self, exit: int, error: str) -> bool:
        """Whether two errors are the same but for numbers; ranks other than 0 end with 2 without a word."""
        shapes = [re.sub(r"0x[0-9a-f]+|\d+", "#", re.sub(r"\(rank \d+\)", "", text)) for text in (self.error, error)]
        return self.exit == exit and (shapes[0] == shapes[1] or not (self.error and error))

    def __str__(self) -> str:
        return self.error or f"exit code {self.exit}"


def read(logs: Path) -> list[Failure]:
    """What the nodes of a try noted, the earliest first; where none noted anything, what srun saw end first."""
    found = []
    for file in logs.glob("*/end.json"):
        end = json.loads(file.read_text())
        own = [one for one in end["failures"] if one["exit"] not in ENDED and not LOST.search(one["error"])]
        if own:
            found.append(Failure(file.parent.name, end["time"], own[0]["exit"], own[0]["error"]))
    return sorted(found, key=lambda failure: failure.time) or killed(logs)


def killed(logs: Path) -> list[Failure]:
    """The task that ended first by srun's account, where it was one alone without a note: its torchrun was killed."""
    try:
        said = (logs / "srun.err").read_text(errors="replace")
    except OSError:
        return []
    first = re.search(r"^srun: error: ([^\s\[\],:]+): task \d+: (.+)$", said, re.MULTILINE)
    if first is None or (logs / first[1] / "end.json").exists() or "Terminated" in first[2]:
        return []
    return [Failure(first[1], 0.0, 1, f"torchrun ended without a word ({first[2]})")]


def judge(failures: list[Failure], earlier: list[dict[str, Any]]) -> tuple[Failure | None, str]:
    """(the failure of the host at fault or None, why); earlier: verdicts on this job's other tries."""
    if not failures:
        return None, "no node ended by an error of its own: none is at fault"
    first, *others = failures
    alike = [other.host for other in others if first.like(other.exit, other.error)]
    if alike:
        return None, f"{first.host} and {', '.join(alike[:3])} failed alike ({first}): no host is at fault"
    if others and others[0].time - first.time < MARGIN:
        return None, f"{first.host} ({first}) and {others[0].host} ({others[0]}) failed together: none is blamed"
    same = [
        row["host"]
        for row in earlier
        if row["host"] not in (None, first.host) and first.like(row["exit"], row["error"])
    ]
    if same:
        return None, f"{first.host} failed as {same[-1]} did before ({first}): the program is at fault, not the host"
    return first, f"{first.host} failed first ({first})"


def call(*words: str) -> str:
    """What a command of SLURM's prints; empty where it fails."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def expanded(nodes: str) -> list[str]:
    """The hosts of a list such as node[1-3]."""
    return [] if nodes in ("", "(null)") else call("scontrol", "show", "hostnames", nodes).split()


def spared(host: str, job: str, needed: int) -> tuple[str, str]:
    """(hosts to exclude with this one, or empty where the job could not run without it, why)."""
    facts = dict(re.findall(r"(\w+)=(\S*)", call("scontrol", "-o", "show", "job", job)))
    if host in expanded(facts.get("ReqNodeList", "")):
        return "", "the job asks for it by name"
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
        return "", f"without it {len(left)} nodes like it are left, and the job needs {needed}"
    return ",".join(excluded), f"{len(left)} nodes like it are left for {needed}"


def verdict(logs: Path) -> tuple[str, str, str]:
    """What is printed; writes it down."""
    record, (job, _, number) = logs.parent / "failures.jsonl", logs.name.rpartition("-")
    rows = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    earlier = [row for row in rows if row["job"] == job and row["try"] != int(number)]
    failure, why = judge(read(logs), earlier)
    action, nodes = "none", "-"
    if failure is not None:
        count = 1 + len({row["try"] for row in earlier if row["host"] == failure.host})
        action, why = "again", f"{why}; tries that it made fail: {count}"
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
