"""Where the 40 datasets lie: a folder that holds their folders, a URL above them, or the hub itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from prolip.data.faults import FaultCounter, ShardFault
from prolip.data.reading.stream import ReadPolicy, check_address, is_local, local_path
from prolip.evaluation.datasets.base import DamagedData, Dataset
from prolip.evaluation.datasets.places import join
from prolip.evaluation.datasets.tables import CAPTION_TABLES, open_caption_table, open_winogavil
from prolip.evaluation.datasets.wds import is_wds, open_wds
from prolip.evaluation.suites.datacomp.tasks import Task

#: The data directory that means: read each dataset from the hub while it is evaluated.
HUB = "hf-hub"


class Found(NamedTuple):
    """The datasets that are there, by key, and why others cannot be read."""

    datasets: dict[str, Dataset]
    missing: dict[str, str]


#: Of an address that did not answer when other data was looked for there: now it does so at once, or is still gone.
PROBE = ReadPolicy(connect_timeout=3, read_timeout=10, retries=1)


def open_task(
    task: Task, data_dir: str, damage: FaultCounter | None = None, policy: ReadPolicy | None = None
) -> Dataset:
    """The dataset of a task below `data_dir`: the first of its folders that is there.

    data_dir: a folder, a URL, or "hf-hub"; policy: time-outs and retries of the latter two. FileNotFoundError or
    DamagedData where there is none to be read.
    """
    if data_dir == HUB:
        if task.streamed is None:
            raise FileNotFoundError("it cannot be read from the hub, it is a table with a zip: fetch it")
        return open_wds(f"hf-hub:{task.streamed}", name=task.name, damage=damage, policy=policy)
    if is_local(data_dir):
        root = Path(local_path(data_dir))
        folder = next((root / name for name in task.folders if (root / name).is_dir()), None)
        if folder is None:
            raise FileNotFoundError(f"no folder {' or '.join(task.folders)}")
        reader: Callable[..., Dataset] = open_wds
        if task.kind == "association":
            reader = open_winogavil
        elif task.kind == "retrieval" and any((folder / table).is_file() for table in CAPTION_TABLES):
            reader = open_caption_table
        return reader(str(folder), name=task.name, damage=damage)
    if task.kind == "association":
        raise FileNotFoundError("a table with a zip is read from a local folder only")
    for name in task.folders:
        try:
            return open_wds(join(data_dir, name), name=task.name, damage=damage, policy=policy)
        except FileNotFoundError as error:
            last = error
    raise last


def find_datasets(tasks: Sequence[Task], data_dir: str, skip_damaged: bool = False) -> Found:
    """Open every dataset: reads no image, but sees that all shards are there. Errors become entries of `missing`.

    Minutes are waited for an address that does not answer, once and not for each of 40. Raises FileNotFoundError where
    `data_dir` itself is no folder.
    """
    if data_dir != HUB and is_local(check_address(data_dir)):
        folder = Path(local_path(data_dir))
        if not folder.is_dir():
            raise FileNotFoundError(
                f"--data {data_dir} is no folder: give the one that the datasets are fetched to"
                f", or {HUB} to read them over the network"
            )
        check_level(tasks, folder)
    found, gone = Found({}, {}), False
    for task in tasks:
        try:
            if gone:
                open_task(task, data_dir, policy=PROBE)
            dataset = open_task(task, data_dir, FaultCounter() if skip_damaged else None)
            kind = "classification" if task.kind == "faces" else task.kind
            if dataset.kind != kind:
                what = f"it says that it is {dataset.kind}, wanted {kind}"
                raise DamagedData(f"{what}: is it the folder of another dataset?")
        except (OSError, ValueError) as error:
            found.missing[task.key] = str(error)
            gone = gone or isinstance(error.__cause__, ShardFault)
        else:
            gone = False
            found.datasets[task.key] = dataset
    return found


def check_level(tasks: Sequence[Task], folder: Path) -> None:
    """FileNotFoundError where the folder of a data set is given, or one above the folder that holds them."""
    names = {name for task in tasks for name in task.folders}
    here = folder.resolve()
    if any((here / name).is_dir() for name in names):
        return
    inside = next((place for place in (here, *here.parents[:2]) if is_wds(place) or place.name in names), None)
    if inside is not None:
        raise FileNotFoundError(
            f"--data {folder} is a data set or inside one: give the folder that holds it, {inside.parent}"
        )
    below = sorted(place for place in here.glob("*") if any((place / name).is_dir() for name in names))
    if below:
        raise FileNotFoundError(f"--data {folder} is one level too high: give {below[0]}, which holds data sets")


def missing_report(tasks: Sequence[Task], found: Found, data_dir: str) -> str:
    """What is missing and the commands that fetch it; empty if nothing is."""
    absent = [task for task in tasks if task.key in found.missing]
    if not absent:
        return ""
    root = local_path(data_dir) if data_dir != HUB and is_local(data_dir) else "DATA"
    lines = [f"{len(absent)} of {len(tasks)} datasets cannot be read at {data_dir}:"]
    for task in absent:
        folder = f"{root}/{task.repository.split('/')[1]}"
        lines.append(f"  {task.name}: {found.missing[task.key]}")
        lines.append(f"    hf download --repo-type dataset {task.repository} --local-dir {folder}")
    return "\n".join(lines)
