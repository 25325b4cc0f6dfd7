"""Results on disk: one JSON line per finished task; locks (flock) that end with their process claim tasks.

OUTPUT/results.jsonl        a line per task, model and similarity; the last one of each counts
OUTPUT/claims/*.lock        locked while a process evaluates a task; names the process
"""

from __future__ import annotations

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
from prolip.evaluation.evaluate import TaskResult
from prolip.evaluation.suites.datacomp.catalogue import BY_KEY, SuiteTask
from prolip.utils.documents import loads
from prolip.utils.outputs import holder_of, lock

#: Share of a test set that may be missing: the hub differs from DataComp's count by a few instances.
TOLERANCE = 0.01
POLL = 5.0  # seconds between checks of tasks of other processes
VERSION = 1  # increased when a metric changes, so that older lines do not count


@dataclass(frozen=True)
class ModelIdentity:
    """All that a result depends on, except its task."""

    model: str  # its name, for readers
    fingerprint: str  # of its weights, preprocessing and tokenizer
    similarity: str
    precision: str

    @property
    def mark(self) -> str:
        """Equal for equal weights, similarity and precision, also if the folder has moved."""
        return fingerprint(self.fingerprint, self.similarity, self.precision, digits=16)

    @property
    def label(self) -> str:
        """Label of a table row."""
        return f"{self.model} ({self.similarity}{'' if self.precision == 'fp32' else f', {self.precision}'})"


@dataclass(frozen=True)
class Line:
    """A result with its identity and data."""

    identity: ModelIdentity
    data: str  # fingerprint of images, class names and prompts
    result: TaskResult
    version: int = VERSION


def main_value(result: TaskResult) -> float | None:
    """Return the main metric, None for the face sets."""
    return result.value if result.main_metric else None


def is_complete(result: TaskResult) -> bool:
    """Return True for data like the published values': all classes, undamaged, within TOLERANCE all images."""
    task, info = BY_KEY[result.key], result.info
    classes = info.get("classes", task.classes) == task.classes
    return classes and not info.get("damaged") and abs(info.get("size", 0) - task.size) <= TOLERANCE * task.size


def to_json(line: Line) -> str:
    """Format one line: DataComp's keys (key, dataset, metrics with main_metric) and ours. NaN becomes null."""
    result = line.result
    metrics = result.to_dict()["metrics"]
    metrics["main_metric"] = metrics.get(result.main_metric)
    values: dict[str, Any] = {"key": result.key, "dataset": BY_KEY[result.key].name, "metrics": metrics}
    values |= {"main": result.main_metric, "identity": asdict(line.identity), "data": line.data}
    return json.dumps(values | {"info": result.info, "version": line.version}, allow_nan=False)


def from_json(text: str) -> Line | None:
    """Parse a line of `to_json`; None for an interrupted line, another file, or an unknown task."""
    try:
        values = loads(text)
        numbers = {k: math.nan if v is None else v for k, v in values["metrics"].items() if k != "main_metric"}
        result = TaskResult(values["key"], numbers, values["main"], values["info"])
        line = Line(ModelIdentity(**values["identity"]), values["data"], result, values["version"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return line if result.key in BY_KEY and (not result.main_metric or result.main_metric in numbers) else None


class ResultFolder:
    """The folder of results, which several processes may use at once."""

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self.path = self.folder / "results.jsonl"
        self.claims = self.folder / "claims"

    def lines(self) -> list[Line]:
        """Return all readable lines of the current version, in the order of the file."""
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        read = (from_json(line) for line in text.split("\n") if line.strip())
        return [line for line in read if line is not None and line.version == VERSION]

    def wanted(
        self, tasks: Iterable[SuiteTask], identities: Sequence[ModelIdentity], marks: Mapping[str, str]
    ) -> dict[str, tuple[ModelIdentity, ...]]:
        """Return the identities without a result of a task, by key, on data as in `marks`."""
        there = {(line.identity.mark, line.result.key, line.data) for line in self.lines()}
        return {
            key: tuple(one for one in identities if (one.mark, key, marks.get(key)) not in there)
            for key in (task.key for task in tasks)
        }

    def append(self, line: Line) -> None:
        """Add a line, complete and on disk at return, after the lines of other processes, never within one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        data = to_json(line).encode() + b"\n"
        with open(self.path, "a+b") as file:
            wait_for(file)
            if size := file.seek(0, os.SEEK_END):
                file.seek(size - 1)
                data = data if file.read(1) == b"\n" else b"\n" + data  # a process was killed while it wrote
            file.write(data)
            file.flush()  # OSError for a part of a line on a full disk, which is no result
            os.fsync(file.fileno())

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Lock a name inside the `with`, waiting for it."""
        with open(self._claim_path(name), "a", encoding="utf-8") as file:
            wait_for(file)
            yield

    @contextmanager
    def claim(self, name: str) -> Iterator[str]:
        """Lock a name inside the `with`; yields "", or the process that has locked it."""
        with lock(self._claim_path(name)) or nullcontext() as file:
            yield holder_of(self._claim_path(name)) if file is None else ""

    def _claim_path(self, name: str) -> Path:
        self.claims.mkdir(parents=True, exist_ok=True)
        return self.claims / f"{name.replace('/', '-')}.lock"


def wait_for(file: IO) -> None:
    """Lock a file until it is closed; ValueError with a remedy if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        what = f"{file.name} cannot be locked ({error.strerror})"
        raise ValueError(f"{what}: give an --output on another disk") from error


def latest(folders: Iterable[str | os.PathLike]) -> dict[ModelIdentity, dict[str, TaskResult]]:
    """Return results by identity (the first of a mark) and key, the last line of a task; FileNotFoundError for none."""
    out: dict[ModelIdentity, dict[str, TaskResult]] = {}
    first: dict[str, ModelIdentity] = {}
    for folder in map(ResultFolder, folders):
        lines = folder.lines()
        if not lines:
            raise FileNotFoundError(f"no result in {folder.path}: evaluate a model there first")
        for line in lines:
            out.setdefault(first.setdefault(line.identity.mark, line.identity), {})[line.result.key] = line.result
    return out


# --- several processes, one list of tasks -----------------------------------------------------------------------------
ByIdentity = Mapping[ModelIdentity, TaskResult]


def share_tasks(
    tasks: Sequence[SuiteTask],
    store: ResultFolder,
    identities: Sequence[ModelIdentity],
    marks: Mapping[str, str],
    evaluate: Callable[[SuiteTask, tuple[ModelIdentity, ...]], ByIdentity],
    say: Callable[[str], None] = print,
    tell: Callable[[SuiteTask, ByIdentity], None] = lambda task, results: None,
    poll: float = POLL,
) -> dict[str, str]:
    """Evaluate tasks that are neither finished nor claimed; return why tasks failed (OSError, ValueError), by key.

    Any number of processes may run this on one folder: each task is evaluated once, and the last processes take over
    the tasks of a killed one. identities: of one model, which share a task's embeddings; marks: data marks by key;
    the second callback receives a task whose results are on disk.
    """
    failed: dict[str, str] = {}
    reported = ""
    # for any similarity; another model may evaluate the same task
    model = fingerprint(identities[0].fingerprint, identities[0].precision, digits=16)
    while True:
        wanted = store.wanted(tasks, identities, marks)
        pending = [task for task in tasks if wanted[task.key] and task.key not in failed]
        if not pending:
            return failed
        held = []
        for task in pending:
            with store.claim(f"{task.key}-{model}") as holder:
                if holder:
                    held.append(f"{task.name} ({holder})")
                    continue
                still = store.wanted([task], identities, marks)[task.key]  # another may have just finished it
                try:
                    results = evaluate(task, still) if still else {}
                except (OSError, ValueError) as error:
                    failed[task.key] = str(error)
                    say(f"{task.name} failed: {error}")
                    continue
                for identity, result in results.items():
                    store.append(Line(identity, marks[task.key], result))
                if results:
                    tell(task, results)
        if len(held) == len(pending):
            if (waiting := f"waiting for {', '.join(held)}") != reported:
                say(waiting)
            reported = waiting
            time.sleep(poll)
