"""The 38 tasks of DataComp and its two face sets: names, main metrics, groups of images, and places of the data.

After mlfoundations/datacomp (Gadre et al., 2023): tasklist.yml, eval_utils/, aggregate_scores.py; and ProLIP B.2.
Pascal VOC 2007 has cropped objects, one class each.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from prolip.data.faults import DamagedData, FaultCounter, ShardFault
from prolip.data.reading.stream import check_address, is_local, local_path
from prolip.evaluation.datasets.base import Dataset
from prolip.evaluation.datasets.published import CAPTION_TABLES, open_caption_table, open_winogavil
from prolip.evaluation.datasets.sources import join
from prolip.evaluation.datasets.webdataset import open_wds
from prolip.utils.flags import did_you_mean
from prolip.utils.messages import listing

#: The data directory for reading each data set from the hub during its evaluation.
HUB = "hf-hub"


@dataclass(frozen=True)
class SuiteTask:
    """One entry of the suite."""

    key: str  # key and name are DataComp's
    name: str
    kind: Literal["classification", "retrieval", "association", "faces"]
    size: int  # test images (WinoGAViL: instances)
    main_metric: str | None  # a key of the task's metrics, None for the face sets, which are in no average
    classes: int | None  # of the published test set
    tags: tuple[str, ...]  # its aggregates
    groups: tuple[str, ...]  # columns of the `.npy` next to each image
    repository: str  # the data set on the hub
    streamed: str | None  # the repository to read over the network, None without shards
    folders: tuple[str, ...]  # possible names of its folder

    @property
    def counted(self) -> bool:
        """True for the 38 tasks of the average."""
        return self.main_metric is not None


def read_task(line: Mapping[str, str]) -> SuiteTask:
    """Read a line of tasks.csv; without a repository it has clip_benchmark's layout, by the organisation djghosh."""
    folder = f"wds_{line['key'].removeprefix('fairness/').replace('/', '-')}_test"
    own = None if line["repository"] else f"djghosh/{folder}"
    values: dict[str, Any] = {name: value or None for name, value in line.items()}
    values |= {column: tuple(line[column].split()) for column in ("tags", "groups", "folders")}
    values |= {"size": int(line["size"]), "classes": int(line["classes"]) if line["classes"] else None}
    values |= {name: values[name] or own for name in ("repository", "streamed")}
    return SuiteTask(**values | {"folders": values["folders"] or (folder,)})


with open(Path(__file__).parent / "tasks.csv", encoding="utf-8", newline="") as _file:
    #: In the order of the paper's Table C.1, the face sets last.
    TASKS: tuple[SuiteTask, ...] = tuple(map(read_task, csv.DictReader(_file)))
BY_KEY = {task.key: task for task in TASKS}
COUNTED = tuple(task for task in TASKS if task.counted)
TAGS = ("imagenet", "shift", "vtab", "retrieval", "wilds", "fairness")
COUNTED_TAG = "counted"
#: The five averages of the paper's Table 1, each the mean of the main metrics of these tasks.
_TAG = {"ImageNet": "imagenet", "IN dist. shifts": "shift", "VTAB": "vtab", "Retrieval": "retrieval"}
AGGREGATES = {name: tuple(task.key for task in COUNTED if tag in task.tags) for name, tag in _TAG.items()}
AGGREGATES["Average"] = tuple(task.key for task in COUNTED)


class Aggregate(NamedTuple):
    """The mean over the available tasks, and the keys of the missing ones."""

    value: float
    missing: tuple[str, ...]


def aggregate(values: Mapping[str, float]) -> dict[str, Aggregate]:
    """Return the five averages of the paper's Table 1 from main metrics by key."""
    out = {}
    for name, keys in AGGREGATES.items():
        there = [values[key] for key in keys if key in values]
        missing = tuple(key for key in keys if key not in values)
        out[name] = Aggregate(sum(there) / len(there) if there else float("nan"), missing)
    return out


def select_tasks(names: Sequence[str] | None) -> tuple[SuiteTask, ...]:
    """Return tasks by keys, names ("Stanford Cars"), folders and tags ("vtab", "counted": the 38); default all."""
    known = {COUNTED_TAG: {task.key for task in COUNTED}}
    known |= {tag: {task.key for task in TASKS if tag in task.tags} for tag in TAGS}
    for task in TASKS:
        words = (task.key, task.key.split("/")[-1], task.name, *task.folders)
        known = {word.lower(): {task.key} for word in words} | known
    for name in names or ():
        if name.lower() not in known:
            raise ValueError(f"there is no task {name!r}: {did_you_mean(name, known, '--list shows all 40')}")
    chosen = {key for name in names or () for key in known[name.lower()]}
    return tuple(task for task in TASKS if task.key in chosen or not names)


def shard(tasks: Sequence[SuiteTask], index: int, count: int) -> tuple[SuiteTask, ...]:
    """Return this shard's tasks: the largest first, each to the shard with the fewest images, to balance times."""
    loads, mine = [0] * count, []
    for task in sorted(tasks, key=lambda task: (-task.size, task.key)):
        least = loads.index(min(loads))
        loads[least] += task.size
        if least == index:
            mine.append(task.key)
    return tuple(task for task in tasks if task.key in mine)


# --- places of the data sets ------------------------------------------------------------------------------------------
class FoundSets(NamedTuple):
    """The available data sets, by key, and why others cannot be read."""

    datasets: dict[str, Dataset]
    missing: dict[str, str]

    def report(self, tasks: Sequence[SuiteTask], data_dir: str) -> str:
        """Return the missing data sets and the commands that download them."""
        root = local_path(data_dir) if data_dir != HUB and is_local(data_dir) else "DATA"
        lines = [f"{len(self.missing)} of {len(tasks)} data sets cannot be read at {data_dir}:"]
        if not self.datasets and root != "DATA":
            lines = [f"{root} has {listing(root)}; give --data the folder directly above the data sets", *lines]
        for key, reason in self.missing.items():
            name, repository = BY_KEY[key].name, BY_KEY[key].repository
            lines.append(f"  {name}: {reason}")
            fetch = f"hf download --repo-type dataset {repository} --local-dir {root}/{repository.split('/')[1]}"
            lines.append(f"    {fetch}")
        return "\n".join(lines)


def open_task(task: SuiteTask, data_dir: str, damage: FaultCounter | None = None) -> Dataset:
    """Open the data set of a task: the first of its folders below `data_dir`, a folder, a URL, or "hf-hub"."""
    if is_local(data_dir) and data_dir != HUB:
        root = Path(local_path(data_dir))
        folder = next((root / name for name in task.folders if (root / name).is_dir()), None)
        if folder is None:
            raise FileNotFoundError(f"no folder {' or '.join(task.folders)}")
        tabled = task.kind == "retrieval" and any((folder / table).is_file() for table in CAPTION_TABLES)
        reader = open_caption_table if tabled else open_winogavil if task.kind == "association" else open_wds
        return reader(str(folder), name=task.name, damage=damage)
    if task.streamed is None:
        raise FileNotFoundError("a table with a zip is readable from a local folder only: fetch it")
    places = [f"hf-hub:{task.streamed}"] if data_dir == HUB else [join(data_dir, name) for name in task.folders]
    for place in places:
        try:
            return open_wds(place, name=task.name, damage=damage)
        except FileNotFoundError as error:
            last = error
    raise last


def find_datasets(tasks: Sequence[SuiteTask], data_dir: str, skip_damaged: bool = False) -> FoundSets:
    """Open every data set and check that it has all shards; errors become entries of `missing`.

    After one address does not answer, the others are not tried.
    """
    if data_dir != HUB and is_local(check_address(data_dir)) and not Path(local_path(data_dir)).is_dir():
        raise FileNotFoundError(f"--data {data_dir} is not a folder: give the one above the data sets, or {HUB}")
    found, silent = FoundSets({}, {}), ""
    for task in tasks:
        try:
            if silent:
                raise ConnectionError(f"not tried, as {silent}")
            dataset = open_task(task, data_dir, FaultCounter() if skip_damaged else None)
            kind = "classification" if task.kind == "faces" else task.kind
            if dataset.kind != kind:
                raise DamagedData(f"it is a {dataset.kind} set, expected {kind}: give the folder of the right data set")
            found.datasets[task.key] = dataset
        except (OSError, ValueError) as error:
            found.missing[task.key] = str(error)
            cause = error.__cause__
            if isinstance(cause, ShardFault) and not cause.message.startswith("HTTP"):
                silent = str(error)
    return found
