"""The 38 tasks of DataComp and its two face sets as data: names, folders, main metrics, groups, where to get them.

Keys, names, sizes, main metrics and metadata columns are those of DataComp's task list and evaluators (Gadre et al.,
2023, mlfoundations/datacomp: tasklist.yml, eval_utils/); the aggregates are those of its aggregate_scores.py and of
ProLIP B.2. Pascal VOC 2007 is of cropped objects, one class each.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from prolip.utils.flags import did_you_mean

Kind = Literal["classification", "retrieval", "association", "faces"]


@dataclass(frozen=True)
class Task:
    """One entry of the suite.

    key, name: DataComp's; kind: how it is scored; size: test images (WinoGAViL: instances); main_metric: a key of the
    task's metrics, None for the face sets, which count in no average; classes: as many as the paper's test has;
    tags: the aggregates it belongs to; groups: columns of the `.npy` beside each image, in their order; repository:
    the dataset on the Hugging Face Hub that is fetched; streamed: the one that is read over the network, None where
    there is none in shards; folders: names that its folder may have, the first is that of the repository.
    """

    key: str
    name: str
    kind: Kind
    size: int
    main_metric: str | None
    classes: int | None
    tags: tuple[str, ...]
    groups: tuple[str, ...]
    repository: str
    streamed: str | None
    folders: tuple[str, ...]

    @property
    def counted(self) -> bool:
        """Whether it is one of the 38 of the average."""
        return self.main_metric is not None


def wds_folder(key: str) -> str:
    """DataComp's local folder of a task: / becomes -, the prefix of the fairness tasks is dropped."""
    return f"wds_{key.removeprefix('fairness/').replace('/', '-')}_test"


def read_task(line: Mapping[str, str]) -> Task:
    """A line of tasks.csv; without a repository it is clip_benchmark's layout by the organisation djghosh."""
    folder = wds_folder(line["key"])
    own = f"djghosh/{folder}"
    kind: Kind = line["kind"]  # type: ignore[assignment]
    classes = int(line["classes"]) if line["classes"] else None
    tags, groups, folders = (tuple(line[column].split()) for column in ("tags", "groups", "folders"))
    repository, streamed = (line["repository"], line["streamed"] or None) if line["repository"] else (own, own)
    return Task(
        line["key"],
        line["name"],
        kind,
        int(line["size"]),
        line["main_metric"] or None,
        classes,
        tags,
        groups,
        repository,
        streamed,
        folders or (folder,),
    )


def read_lines(name: str) -> list[dict[str, str]]:
    """The lines of a table beside this module, by column."""
    with open(Path(__file__).parent / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


#: In the order of the paper's Table C.1, the face sets last.
TASKS: tuple[Task, ...] = tuple(map(read_task, read_lines("tasks.csv")))
BY_KEY = {task.key: task for task in TASKS}
COUNTED = tuple(task for task in TASKS if task.counted)
TAGS = ("imagenet", "shift", "vtab", "retrieval", "wilds", "fairness")
COUNTED_TAG = "counted"

#: The five figures of the paper's Table 1, each the mean of the main metrics of these tasks.
_TAG = {"ImageNet": "imagenet", "IN dist. shifts": "shift", "VTAB": "vtab", "Retrieval": "retrieval"}
AGGREGATES = {name: tuple(task.key for task in COUNTED if tag in task.tags) for name, tag in _TAG.items()}
AGGREGATES["Average"] = tuple(task.key for task in COUNTED)

#: The region "Other" of FMoW: 4 of its 22,108 images, so that it alone makes many worst regions 0.
FMOW_OTHER = 5

#: The sets of class names and templates of the face sets, `race:black` and `race:a photo of a {c} person`.
FACE_PROMPTS = ("race", "gender", "age", "toxic")


class Aggregate(NamedTuple):
    """One of the five figures: the mean over the tasks that are there, and the keys of those that are not.

    Only where none is missing may it be compared with a published one.
    """

    value: float
    missing: tuple[str, ...]


def aggregate(values: Mapping[str, float]) -> dict[str, Aggregate]:
    """The five figures of the paper's Table 1 from main metrics by key. An incomplete one names what it lacks."""
    out = {}
    for name, keys in AGGREGATES.items():
        there = [values[key] for key in keys if key in values]
        missing = tuple(key for key in keys if key not in values)
        out[name] = Aggregate(sum(there) / len(there) if there else float("nan"), missing)
    return out


def find_task(name: str) -> Task:
    """The task of a key, a name ("Stanford Cars") or a folder's name. Raises ValueError with the near matches."""
    known: dict[str, Task] = {}
    for task in TASKS:
        short = task.key.split("/")[-1]
        known |= {alias.lower(): task for alias in (task.key, short, task.name, *task.folders)}
    task_or_none = known.get(name.lower())
    if task_or_none is None:
        hint = did_you_mean(name, [*known, *TAGS, COUNTED_TAG], "--list shows all 40")
        raise ValueError(f"there is no task {name!r}: {hint}")
    return task_or_none


def select_tasks(names: Sequence[str] | None) -> tuple[Task, ...]:
    """All 40 without names; otherwise those of the names, tags ("vtab", "shift", ...) or "counted" (the 38), in order.

    Raises ValueError for an unknown name.
    """
    if not names:
        return TASKS
    tagged = {tag: {task.key for task in TASKS if tag in task.tags} for tag in TAGS}
    tagged[COUNTED_TAG] = {task.key for task in COUNTED}
    chosen: set[str] = set()
    for name in names:
        chosen |= tagged.get(name.lower()) or {find_task(name).key}
    return tuple(task for task in TASKS if task.key in chosen)
