"""Results that survive: one JSON line per finished task, tasks claimed by locks that die with their process.

    OUTPUT/results.jsonl        a line per task, model and similarity; the last of a kind counts
    OUTPUT/claims/*.lock        held (flock) while a process evaluates a task; who holds it is written inside

A process that is killed loses its locks with it, so its task is taken up by the next one; what it was writing is at
worst one line without its end, which readers skip. Where locks do not reach from machine to machine, --part shares the
tasks without them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from prolip.evaluation.datasets.base import fingerprint
from prolip.evaluation.suites.datacomp.tasks import BY_KEY, Task
from prolip.evaluation.task import TaskResult
from prolip.utils.documents import loads
from prolip.utils.outputs import holder_of, lock

TOLERANCE = 0.01
#: Seconds between two looks at tasks that other processes hold.
POLL = 5.0
#: Of the scoring: raised when a metric changes, so that older lines are not taken for today's.
VERSION = 1


@dataclass(frozen=True)
class Identity:
    """What a figure depends on besides its task: lines of another one are never taken.

    model: its name, for readers; fingerprint: of its weights, preprocessing and tokenizer.
    """

    model: str
    fingerprint: str
    similarity: str
    precision: str

    @property
    def mark(self) -> str:
        """Of what decides the figures, for file names."""
        return fingerprint(self.fingerprint, self.similarity, self.precision, digits=16)

    @property
    def label(self) -> str:
        """For a table's row."""
        extra = [self.similarity] + ([] if self.precision == "fp32" else [self.precision])
        return f"{self.model} ({', '.join(extra)})"


@dataclass(frozen=True)
class Line:
    """A result with what it belongs to; data: fingerprint of images, class names and prompts."""

    identity: Identity
    data: str
    result: TaskResult
    version: int = VERSION


def main_value(result: TaskResult) -> float | None:
    """The main metric, None for the face sets."""
    return result.value if result.main_metric else None


def is_complete(result: TaskResult) -> bool:
    """Whether it was measured on what the published figures were: all classes, and the images but for one in a hundred.

    (What lies on the hub differs from DataComp's own count by a few instances.) Damaged images left out: never.
    """
    task, info = BY_KEY[result.key], result.info
    classes = info.get("classes", task.classes) == task.classes
    return classes and not info.get("damaged") and abs(info.get("size", 0) - task.size) <= TOLERANCE * task.size


def to_json(line: Line) -> str:
    """One line: DataComp's keys (key, dataset, metrics with main_metric among them) and ours. NaN becomes null."""
    result = line.result
    metrics: dict[str, Any] = {
        name: value if value is None or math.isfinite(value) else None
        for name, value in {**result.metrics, "main_metric": main_value(result)}.items()
    }
    values: dict[str, Any] = {"key": result.key, "dataset": BY_KEY[result.key].name, "metrics": metrics}
    values |= {"main": result.main_metric, "identity": asdict(line.identity), "data": line.data}
    return json.dumps(values | {"info": result.info, "version": line.version}, allow_nan=False)


def from_json(text: str) -> Line | None:
    """A line that `to_json` wrote; None for one that broke off, is no result, or is of a task nobody knows."""
    try:
        values = loads(text)
        numbers = {k: math.nan if v is None else v for k, v in values["metrics"].items() if k != "main_metric"}
        result = TaskResult(values["key"], numbers, values["main"], values["info"])
        line = Line(Identity(**values["identity"]), values["data"], result, values["version"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return line if result.key in BY_KEY and (not result.main_metric or result.main_metric in numbers) else None


class Store:
    """The folder of results; several processes may have it open."""

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self.path = self.folder / "results.jsonl"
        self.claims = self.folder / "claims"

    def lines(self) -> list[Line]:
        """All readable lines of today's scoring, in the order of the file."""
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        read = (from_json(line) for line in text.split("\n") if line.strip())
        return [line for line in read if line is not None and line.version == VERSION]

    def append(self, line: Line) -> None:
        """Add a line: whole and on disk when this returns, after the lines of others, never within one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        data = to_json(line).encode() + b"\n"
        with open(self.path, "a+b") as file:
            wait_for(file)
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":  # a process was killed while it wrote
                    data = b"\n" + data
            file.write(data)
            file.flush()  # all of it, or OSError: a disk that is full takes a part, and that was no result
            os.fsync(file.fileno())

    def check(self) -> None:
        """Raise what would keep results from being written, before anything is computed: OSError, ValueError."""
        with self.alone("start"):
            if self.path.exists():
                open(self.path, "ab").close()

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Hold a name inside the `with`, behind all others that want it."""
        with open(self._claim_path(name), "a", encoding="utf-8") as file:
            wait_for(file)
            yield

    @contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Hold a name inside the `with`; False where another process holds it."""
        with lock(self._claim_path(name)) or nullcontext() as file:
            yield file is not None

    def holder(self, name: str) -> str:
        """Who holds a claim, for messages."""
        return holder_of(self._claim_path(name))

    def _claim_path(self, name: str) -> Path:
        self.claims.mkdir(parents=True, exist_ok=True)
        return self.claims / f"{name.replace('/', '-')}.lock"


def wait_for(file: IO) -> None:
    """Lock a file until it is closed; ValueError that says what to do where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise ValueError(
                f"{file.name} lies on a file system without locks ({error.strerror}): give an --output on another one"
            ) from error
        raise


def finished(lines: Iterable[Line], identity: Identity, marks: Mapping[str, str]) -> dict[str, TaskResult]:
    """The results of an identity by key, of tasks whose data is as in `marks` (key -> data mark)."""
    mine = (line for line in lines if line.identity.mark == identity.mark)
    return {line.result.key: line.result for line in mine if marks.get(line.result.key) == line.data}


def latest(lines: Iterable[Line]) -> dict[Identity, dict[str, TaskResult]]:
    """Results by identity and key, a later line of a task in place of an earlier one; identities in order.

    Identities are told apart by their marks: a folder may have moved, the fingerprint says what the weights are.
    """
    out: dict[Identity, dict[str, TaskResult]] = {}
    for line in lines:
        known = next((identity for identity in out if identity.mark == line.identity.mark), line.identity)
        out.setdefault(known, {})[line.result.key] = line.result
    return out


# --- several processes, one list of tasks: who takes which, until all are done ----------------------------------------
Evaluate = Callable[[Task, tuple[Identity, ...]], Mapping[Identity, TaskResult]]
Tell = Callable[[Task, Mapping[Identity, TaskResult]], None]


def share_tasks(
    tasks: Sequence[Task],
    store: Store,
    identities: Sequence[Identity],
    marks: Mapping[str, str],
    evaluate: Evaluate,
    say: Callable[[str], None] = print,
    tell: Tell = lambda task, results: None,
    poll: float = POLL,
) -> dict[str, str]:
    """Evaluate what is not finished yet and nobody else is at; returns why tasks failed, by key.

    Any number of processes may run this on one store: each task is evaluated once, results are on disk before the claim
    is let go, and the tasks of a process that is killed are taken up by the others, which wait for each other at the
    end. identities: one model with one similarity or several, which share a task's embeddings; marks: data marks by
    key; tell: of a task whose results are on disk. A task whose data cannot be read (OSError, ValueError) does not end
    the others.
    """
    failed: dict[str, str] = {}
    reported = ""
    while True:
        wanted = wanted_of(tasks, store, identities, marks)
        pending = [task for task in tasks if wanted[task.key] and task.key not in failed]
        if not pending:
            return failed
        held = []
        for task in pending:
            # whatever the similarity, but another model may be at the same task
            model = fingerprint(identities[0].fingerprint, identities[0].precision, digits=16)
            name = f"{task.key}-{model}"
            with store.claim(name) as mine:
                if not mine:
                    held.append(f"{task.name} ({store.holder(name)})")
                    continue
                still = wanted_of([task], store, identities, marks)[task.key]  # another may have just let it go
                try:
                    results = evaluate(task, still) if still else {}
                except (OSError, ValueError) as error:
                    failed[task.key] = str(error)
                    say(f"{task.name} failed: {error}")
                else:
                    for identity, result in results.items():
                        store.append(Line(identity, marks[task.key], result))
                    if results:
                        tell(task, results)
        if len(held) == len(pending):
            waiting = f"waiting for {', '.join(held)}"
            if waiting != reported:
                say(waiting)
            reported = waiting
            time.sleep(poll)


def wanted_of(
    tasks: Sequence[Task], store: Store, identities: Sequence[Identity], marks: Mapping[str, str]
) -> dict[str, tuple[Identity, ...]]:
    """Which identities have no result of a task yet, by key."""
    lines = store.lines()
    there = [(identity, finished(lines, identity, marks)) for identity in identities]
    return {task.key: tuple(identity for identity, keys in there if task.key not in keys) for task in tasks}


def shard(tasks: Sequence[Task], index: int, count: int) -> tuple[Task, ...]:
    """This shard's tasks: the largest first, each to the shard with the fewest images, so that all end together."""
    loads, mine = [0] * count, []
    for task in sorted(tasks, key=lambda task: (-task.size, task.key)):
        least = loads.index(min(loads))
        loads[least] += task.size
        if least == index:
            mine.append(task.key)
    return tuple(task for task in tasks if task.key in mine)
