"""The 38 tasks of DataComp and its two face sets as data: names, folders, main metrics, groups, where to get them.

Keys, names, sizes, main metrics and metadata columns are those of DataComp's task list and evaluators (Gadre et al.,
2023, mlfoundations/datacomp: tasklist.yml, eval_utils/); the aggregates are those of its aggregate_scores.py and of
ProLIP B.2.
"""
from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["classification", "retrieval", "association", "faces"]

SHIFT, VTAB, RETRIEVAL, FAIRNESS, WILDS, IMAGENET = "shift", "vtab", "retrieval", "fairness", "wilds", "imagenet"


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


def _classes(key: str, name: str, size: int, classes: int, *tags: str, metric: str = "acc1",
             groups: tuple[str, ...] = ()) -> Task:  # fmt: skip
    """A classification task in the clip_benchmark layout."""
    repository = f"djghosh/{wds_folder(key)}"
    folders = (wds_folder(key),)
    return Task(key, name, "classification", size, metric, classes, tags, groups, repository, repository, folders)


def _pairs(key: str, name: str, size: int, shards: str) -> Task:
    """A retrieval task: DataComp's table with a zip, or the same test set in shards."""
    table = key.removeprefix("retrieval/")
    folders = (table, f"wds_{shards}", wds_folder(key), wds_folder(table))
    streamed = f"clip-benchmark/wds_{shards}"
    return Task(key, name, "retrieval", size, "mean_recall@1", None, (RETRIEVAL,), (), f"nlphuji/{table}", streamed,
                folders)  # fmt: skip


def _faces(key: str, name: str, size: int) -> Task:
    """A set of faces with four sets of prompts: race, gender, age, toxic."""
    repository = f"djghosh/{wds_folder(key)}"
    columns = ("age", "gender", "race", "race_binary")
    return Task(key, name, "faces", size, None, None, (FAIRNESS,), columns, repository, repository, (wds_folder(key),))


RECALL = "mean_per_class_recall"
TIME = ("sequence", "year", "month", "day", "hour", "minute", "second")

#: In the order of the paper's Table C.1, the face sets last.
TASKS: tuple[Task, ...] = (
    _classes("vtab/caltech101", "Caltech-101", 6085, 102, VTAB, metric=RECALL),
    _classes("cifar10", "CIFAR-10", 10000, 10),
    _classes("vtab/cifar100", "CIFAR-100", 10000, 100, VTAB),
    _classes("vtab/clevr_count_all", "CLEVR Counts", 15000, 8, VTAB),
    _classes("vtab/clevr_closest_object_distance", "CLEVR Distance", 15000, 6, VTAB),
    _classes("country211", "Country211", 21100, 211),
    _classes("vtab/dtd", "Describable Textures", 1880, 47, VTAB),
    _classes("vtab/eurosat", "EuroSAT", 5400, 10, VTAB),
    _classes("fgvc_aircraft", "FGVC Aircraft", 3333, 100, metric=RECALL),
    _classes("food101", "Food-101", 25250, 101),
    _classes("gtsrb", "GTSRB", 12630, 43),
    _classes("imagenet1k", "ImageNet 1k", 50000, 1000, IMAGENET),
    _classes("imagenet_sketch", "ImageNet Sketch", 50889, 1000, SHIFT),
    _classes("imagenetv2", "ImageNet v2", 10000, 1000, SHIFT),
    _classes("imagenet-a", "ImageNet-A", 7500, 200, SHIFT),
    _classes("imagenet-o", "ImageNet-O", 2000, 200, SHIFT),
    _classes("imagenet-r", "ImageNet-R", 30000, 200, SHIFT),
    _classes("vtab/kitti_closest_vehicle_distance", "KITTI Vehicle Distance", 711, 4, VTAB),
    _classes("mnist", "MNIST", 10000, 10),
    _classes("objectnet", "ObjectNet", 18574, 113, SHIFT),
    _classes("vtab/flowers", "Oxford Flowers-102", 6149, 102, VTAB, metric=RECALL),
    _classes("vtab/pets", "Oxford-IIIT Pet", 3669, 37, VTAB, metric=RECALL),
    _classes("voc2007", "Pascal VOC 2007", 14976, 20),  # cropped objects, one class each
    _classes("vtab/pcam", "PatchCamelyon", 32768, 2, VTAB),
    _classes("renderedsst2", "Rendered SST2", 1821, 2),
    _classes("vtab/resisc45", "RESISC45", 6300, 45, VTAB),
    _classes("cars", "Stanford Cars", 8041, 196),
    _classes("stl10", "STL-10", 8000, 10),
    _classes("sun397", "SUN397", 108754, 397, VTAB),
    _classes("vtab/svhn", "SVHN", 26032, 10, VTAB),
    _classes("wilds/iwildcam", "iWildCam", 42791, 182, WILDS, metric="F1-macro_all", groups=("location", *TIME, "y")),
    _classes("wilds/camelyon17", "Camelyon17", 85054, 2, WILDS, groups=("hospital", "slide", "y")),
    _classes("wilds/fmow", "FMoW", 22108, 62, WILDS, metric="acc_worst_region", groups=("region", "year", "y")),
    _pairs("retrieval/flickr_1k_test_image_text_retrieval", "Flickr", 1000, "flickr30k"),
    _pairs("retrieval/mscoco_2014_5k_test_image_text_retrieval", "MSCOCO", 5000, "mscoco_captions"),
    Task("misc/winogavil", "WinoGAViL", "association", 3563, "jaccard_score_10-12", None, (RETRIEVAL,), (),
         "nlphuji/winogavil", None, ("winogavil", "wds_misc-winogavil_test", "wds_winogavil_test")),
    _classes("fairness/dollar_street", "Dollar Street", 3503, 58, FAIRNESS, metric="acc_top5_wg",
             groups=("income_ds", "income_meta", "region")),
    _classes("fairness/geode", "GeoDE", 12488, 40, FAIRNESS, metric="acc_wg", groups=("region", "country")),
    _faces("fairness/fairface", "FairFace", 10954),
    _faces("fairness/utkface", "UTKFace", 23703),
)  # fmt: skip

BY_KEY = {task.key: task for task in TASKS}
BY_NAME = {task.name: task for task in TASKS}
COUNTED = tuple(task for task in TASKS if task.counted)
TAGS = (IMAGENET, SHIFT, VTAB, RETRIEVAL, WILDS, FAIRNESS)
COUNTED_TAG = "counted"

#: The five figures of the paper's Table 1, each the mean of the main metrics of these tasks.
AGGREGATES: dict[str, tuple[str, ...]] = {
    "ImageNet": tuple(task.key for task in COUNTED if IMAGENET in task.tags),
    "IN dist. shifts": tuple(task.key for task in COUNTED if SHIFT in task.tags),
    "VTAB": tuple(task.key for task in COUNTED if VTAB in task.tags),
    "Retrieval": tuple(task.key for task in COUNTED if RETRIEVAL in task.tags),
    "Average": tuple(task.key for task in COUNTED),
}

#: The region "Other" of FMoW: 4 of its 22,108 images, so that it alone makes many worst regions 0.
FMOW_OTHER = 5

FMOW_REGIONS = ("Asia", "Europe", "Africa", "Americas", "Oceania", "Other")

#: The sets of class names and templates of the face sets, `race:black` and `race:a photo of a {c} person`.
FACE_PROMPTS = ("race", "gender", "age", "toxic")

#: What the values of the column `race` mean; in `gender` 0 is male and 1 female, in `race_binary` 0 is white.
RACES = {
    "fairness/fairface": ("black", "white", "indian", "latino", "middle eastern", "southeast asian", "east asian"),
    "fairness/utkface": ("black", "white", "indian", "asian", "other"),
}


class Aggregate(NamedTuple):
    """One of the five figures: the mean over the tasks that are there, and the keys of those that are not."""

    value: float
    missing: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether it may be compared with a published one."""
        return not self.missing


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
        near = difflib.get_close_matches(name.lower(), [*known, *TAGS, COUNTED_TAG], n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "--list shows all 40"
        raise ValueError(f"there is no task {name!r}: {hint}")
    return task_or_none


def select_tasks(names: Sequence[str] | None) -> tuple[Task, ...]:
    """All 40 without names; otherwise those of the names, tags ("vtab", "shift", ...) or "counted" (the 38), in order.

    Raises ValueError for an unknown name.
    """
    if not names:
        return TASKS
    chosen: set[str] = set()
    for name in names:
        tag = name.lower()
        if tag == COUNTED_TAG:
            chosen |= {task.key for task in COUNTED}
        elif tag in TAGS:
            chosen |= {task.key for task in TASKS if tag in task.tags}
        else:
            chosen.add(find_task(name).key)
    return tuple(task for task in TASKS if task.key in chosen)
