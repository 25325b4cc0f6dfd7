"""The suite from the command line to the tables: see what is there, share the work, keep every result, compare."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from prolip.embedder import Embedder
from prolip.evaluation.cache import FeatureStore
from prolip.evaluation.datasets.base import Dataset, fingerprint
from prolip.evaluation.embed import Features, image_features, stored_texts
from prolip.evaluation.metrics.study import Study
from prolip.evaluation.suites.datacomp import scores
from prolip.evaluation.suites.datacomp.places import Found, find_datasets, missing_report
from prolip.evaluation.suites.datacomp.published import PublishedRow
from prolip.evaluation.suites.datacomp.store import (
    Identity,
    Line,
    Store,
    Tell,
    latest,
    main_value,
    shard,
    share_tasks,
    wanted_of,
)
from prolip.evaluation.suites.datacomp.tables import WRITERS, Report, build_report, table_1, text_of
from prolip.evaluation.suites.datacomp.tasks import BY_KEY, FACE_PROMPTS, TASKS, Task, select_tasks
from prolip.evaluation.table import aligned
from prolip.evaluation.task import TaskResult, check_prompts, compute_features
from prolip.evaluation.tasks import KINDS, classification
from prolip.evaluation.tasks.base import Metrics, class_prompts, own_labels, score_matrix, uncertainty_of
from prolip.gaussian import Gaussian
from prolip.methods import find_score
from prolip.prompts.weights import PromptWeights
from prolip.scores import Score, Similarity
from prolip.utils.outputs import check_output, replacing

Say = Callable[[str], None]
#: Shown of the face sets, which have no main metric.
GENDER = "acc_gender_avg"
#: Notes below the printed table.
SHOWN = 8


class Outcome(NamedTuple):
    """What a run left: the report of all results in its folder, and why tasks failed or were missing, by key."""

    report: Report
    failed: dict[str, str]
    missing: dict[str, str]


@dataclass(frozen=True)
class Settings:
    """How entries are evaluated. uncertainty: with the figures of refusal and calibration; plots: a folder for their
    pictures; store: where embeddings are kept; prompts: weights, each for the task whose classes and prompts it
    has; the rest as in `compute_features`."""

    uncertainty: bool = True
    plots: Path | None = None
    batch_size: int = 256
    workers: int | None = None
    progress: bool = False
    store: FeatureStore | None = None
    prompts: tuple[PromptWeights, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is evaluated. tasks: keys, names or tags, default all; similarities: scores, None for the model's own;
    prompts: files of their weights; part: (I, N), tasks of part I of N; allow_missing: do without data sets that are
    not there; skip_damaged: leave out damaged samples."""

    tasks: Sequence[str] | None = None
    similarities: Sequence[str | None] = (None,)
    prompts: Sequence[str] = ()
    part: tuple[int, int] = (0, 1)
    allow_missing: bool = False
    skip_damaged: bool = False


def run(  # noqa: PLR0913 (what, where from, where to, how)
    load: Callable[[], Embedder],
    data: str,
    output: str,
    choice: Choice | None = None,
    settings: Settings | None = None,
    published: Sequence[PublishedRow] = (),
    say: Say = print,
) -> Outcome:
    """The suite by a model, cheapest mistakes first: `load` is called when all else is right.

    data: a folder or URL that holds the data sets, or "hf-hub"; output: a folder for results and tables, which keeps
    what is finished. Raises ValueError and FileNotFoundError for what the user can mend: unknown names, missing
    datasets, a model that cannot be loaded.
    """
    choice, settings = choice or Choice(), settings or Settings()
    tasks = select_tasks(choice.tasks)
    for similarity in choice.similarities:
        if similarity:
            find_score(similarity)
    mine = shard(tasks, *choice.part)
    found = find_datasets(mine, data, choice.skip_damaged)
    refuse_missing(mine, found, data, choice.allow_missing, say)
    prompts = weights_of(choice.prompts, found.datasets, len(mine) == len(tasks))
    store = Store(output)
    store.check()
    if settings.store and settings.store.folder:
        check_output(settings.store.folder, folder=True)
    embedder = load()
    similarities = [embedder.card.scored_by(similarity).name for similarity in choice.similarities]
    for one in prompts:
        for dataset in found.datasets.values():
            if one.are_of(dataset.classnames, dataset.templates):
                check_prompts(one, dataset, embedder.card)
    settings = replace(settings, prompts=prompts)
    failed = evaluate_all(mine, found.datasets, embedder, similarities, store, settings, say)
    report = write_tables([output], output, published, say) if store.lines() else Report((), ())
    return Outcome(report, failed, found.missing)


def weights_of(paths: Sequence[str], datasets: Mapping[str, Dataset], whole: bool) -> tuple[PromptWeights, ...]:
    """Weights of prompts in files, each for the task whose classes and prompts it has.

    whole: whether these are all chosen tasks and not a shard of them. ValueError for weights of none, or two of one.
    """
    given = tuple(PromptWeights.load(path) for path in paths)
    for path, one in zip(paths, given):
        if whole and not any(one.are_of(dataset.classnames, dataset.templates) for dataset in datasets.values()):
            raise ValueError(
                f"--prompts {path}: the {len(one.classnames)} classes and {len(one.templates)} prompts of"
                f" {one} are those of no task here: choose its task, or drop it"
            )
        if other := next((x for x in given if x is not one and x.are_of(one.classnames, one.templates)), None):
            raise ValueError(f"--prompts: {one} and {other} are both of one task: give one of them")
    return given


def row_of(embedder: Embedder, prompts: Sequence[PromptWeights]) -> tuple[str, str]:
    """Name and fingerprint of a row of results: that of a model, or of a model with these weights of prompts."""
    if not prompts:
        return embedder.name, embedder.fingerprint
    given = sorted(f"{one.rule} [{one.digest}]" for one in prompts)
    return ", ".join([embedder.name, *given]), fingerprint(embedder.fingerprint, given)


def refuse_missing(tasks: Sequence[Task], found: Found, data: str, allow_missing: bool, say: Say) -> None:
    """Say what to fetch from where; FileNotFoundError unless the rest may be evaluated without it."""
    report = missing_report(tasks, found, data)
    if not report:
        return
    say(report)
    if not allow_missing:
        raise FileNotFoundError(
            f"{len(found.missing)} of {len(tasks)} datasets are missing: fetch them as said above, choose others with "
            "--tasks, or go on without them with --allow-missing (averages that need them are then left out)"
        )
    if not found.datasets:
        raise FileNotFoundError("no dataset is there at all: is --data the folder that holds wds_cars_test?")


def evaluate_all(
    tasks: Sequence[Task],
    datasets: Mapping[str, Dataset],
    embedder: Embedder,
    similarities: Sequence[str],
    store: Store,
    settings: Settings,
    say: Say = print,
) -> dict[str, str]:
    """Evaluate the tasks that have a dataset and no result yet, beside other processes; what failed, by key."""
    todo = [task for task in tasks if task.key in datasets]
    marks = {key: fingerprint(d.fingerprint, d.classnames, d.templates, digits=16) for key, d in datasets.items()}
    identities = [Identity(*row_of(embedder, settings.prompts), s, embedder.precision) for s in similarities]
    kept = [key for key, wanted in wanted_of(todo, store, identities, marks).items() if not wanted]
    if kept:
        drawn = " and get no plots" if settings.plots else ""
        say(
            f"{len(kept)} of {len(todo)} tasks are finished{drawn}: their results in {store.path} are kept; to "
            "evaluate them again, give another --output, or delete their lines"
        )

    def evaluate(task: Task, wanted: tuple[Identity, ...]) -> dict[Identity, TaskResult]:
        results = evaluate_entry(task, datasets[task.key], embedder, [i.similarity for i in wanted], settings)
        return {identity: results[identity.similarity] for identity in wanted}

    return share_tasks(todo, store, identities, marks, evaluate, say, progress(todo, say))


# --- one entry: its dataset through a model, once, and the figures of every similarity asked for ----------------------
def evaluate_entry(
    task: Task, dataset: Dataset, embedder: Embedder, similarities: Sequence[str], settings: Settings | None = None
) -> dict[str, TaskResult]:
    """The result of a task by similarity; images and texts are embedded once.

    Metrics as `datacomp.scores` names them, with `refusal/...` and `calibration/...` of `metrics.study` beside them.
    Raises ValueError (DamagedData) for data that cannot be scored.
    """
    chosen = {similarity: embedder.card.scored_by(similarity) for similarity in similarities}
    settings = settings or Settings()
    store = settings.store or FeatureStore()
    started = time.perf_counter()
    compute = image_features if task.kind == "faces" else compute_features
    own = next((one for one in settings.prompts if one.are_of(dataset.classnames, dataset.templates)), None)
    weighed: dict[str, Any] = {} if own is None else {"prompts": own}
    features = compute(
        dataset,
        embedder,
        store,
        batch_size=settings.batch_size,
        workers=settings.workers,
        progress=settings.progress,
        **weighed,
    )
    faces = face_classes(dataset, embedder, store) if task.kind == "faces" else {}
    embedded = time.perf_counter() - started
    out = {}
    for similarity, score in chosen.items():
        started = time.perf_counter()
        metrics, study = score_task(task, features, faces, score)
        metrics |= study.metrics() if settings.uncertainty else {}
        if settings.plots is not None:
            from prolip.evaluation.plots import write_plots  # late: only plots need matplotlib

            write_plots(study, task.name, settings.plots / f"{task.key.replace('/', '-')}-{similarity}")
        seconds = round(embedded + time.perf_counter() - started, 2)
        info = facts_of_entry(features, similarity) | {"seconds": seconds}
        info |= {"too_large_for": list(study.too_large_for)} if settings.uncertainty and study.too_large_for else {}
        if task.main_metric is not None and task.main_metric not in metrics:
            named = ", ".join(key for key in metrics if "/" not in key)
            raise ValueError(
                f"the data gives no {task.main_metric}, the main metric of {task.name}: is it the whole "
                f"set? It gives {named}"
            )
        out[similarity] = TaskResult(task.key, metrics, task.main_metric or "", info)
    return out


def facts_of_entry(features: Features, similarity: Similarity) -> dict[str, Any]:
    """What a reader of a result asks: on what, and how uncertain; `size` is what the published figures count."""
    dataset = features.dataset
    out: dict[str, Any] = {"size": len(dataset.associations) or len(features.keys), "images": len(features.keys)}
    if dataset.kind == "classification" and features.text is not None:
        out["classes"] = len(features.text.mean)
    out |= {"similarity": similarity, "source": dataset.source, "probabilistic": features.model.probabilistic}
    out |= {"prompts": dataset.info["prompts"]} if "prompts" in dataset.info else {}
    if features.model.probabilistic:
        uncertainty = uncertainty_of(features)
        out["image_trace"] = float(uncertainty(features.image).mean())
        out |= {} if features.text is None else {"text_trace": float(uncertainty(features.text).mean())}
    return out | ({"damaged": features.damaged} if features.damaged else {})


def score_task(task: Task, features: Features, faces: Mapping[str, Gaussian], score: Score) -> tuple[Metrics, Study]:
    """The metrics of a task, and what its uncertainty is worth; faces: classes of the four prompts of the face sets."""
    if task.kind == "faces":
        predicted = {what: score_matrix(replace(features, text=z), score).argmax(1) for what, z in faces.items()}
        columns = scores.group_columns(task, features.groups, len(features.keys))
        # uncertainty against errors of gender, which both sets label alike
        gender = torch.from_numpy(columns[:, task.groups.index("gender")])
        study = classification.study(replace(features, labels=gender, text=faces["gender"]), score)
        return scores.face_metrics(task, predicted, features.groups), study
    kind = KINDS[task.kind]
    metrics = kind.evaluate(features, score, False).metrics
    if task.kind == "retrieval":
        metrics = scores.retrieval_metrics(metrics)
    if task.kind == "classification":
        predictions = classification.predictions(features, score)
        metrics |= scores.added_metrics(task, *predictions, own_labels(features), features.groups)
    return metrics, kind.study(features, score)


def face_classes(dataset: Dataset, embedder: Embedder, store: FeatureStore) -> dict[str, Gaussian]:
    """The classes of race, gender, age and toxic, each with the prompts of its own."""
    names = scores.split_prompts(dataset.classnames, "class names")
    templates = scores.split_prompts(dataset.templates, "templates")
    return {what: stored_texts(*class_prompts(names[what], templates[what]), embedder, store) for what in FACE_PROMPTS}


# --- what is said and written -----------------------------------------------------------------------------------------
def progress(tasks: Sequence[Task], say: Say) -> Tell:
    """Says a line per task: its number, its figures, how long it took, how long the rest may take this process."""
    done: dict[str, int] = {}  # images by key
    started = time.perf_counter()

    def tell(task: Task, results: Mapping[Identity, TaskResult]) -> None:
        first = next(iter(results.values()))
        done[task.key] = first.info["images"]
        position = [other.key for other in tasks].index(task.key) + 1
        figures = "  ".join(f"{identity.similarity} {figure(result)}" for identity, result in results.items())
        rate = (time.perf_counter() - started) / max(1, sum(done.values()))
        left = rate * sum(other.size for other in tasks[position:] if other.key not in done)
        say(
            f"[{position:2}/{len(tasks)}] {task.name:<22} {first.main_metric or GENDER:<22} {figures}  "
            f"{first.info['images']} images, {first.info['seconds']:.1f} s, about {duration(left)} to go"
        )

    return tell


def figure(result: TaskResult) -> str:
    """The main metric in percent; of faces the accuracy of gender."""
    value = main_value(result)
    return f"{100 * (result.metrics[GENDER] if value is None else value):6.2f}"


def duration(seconds: float) -> str:
    """Hours and minutes, or minutes, or seconds."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def write_tables(
    folders: Sequence[str | os.PathLike], output: str | os.PathLike, published: Sequence[PublishedRow], say: Say = print
) -> Report:
    """Read the results of all folders, write `tables.md`, `.csv`, `.json`, `.tex` to `output`, and print Table 1.

    One process at a time reads and writes, so that the last one's tables hold the results of all. Raises
    FileNotFoundError for a folder without results.
    """
    read_results(folders)  # nothing is made where there is nothing to show
    with Store(output).alone("tables"):
        report = build_report(latest(read_results(folders)), published)
        for ending, write in WRITERS.items():
            with replacing(Path(output) / f"tables.{ending}") as path:
                path.write_text(write(report), encoding="utf-8")
    say(summary(report))
    say(f"results and tables: {output}")
    return report


def read_results(folders: Sequence[str | os.PathLike]) -> list[Line]:
    """The lines of all folders. FileNotFoundError for one that has none."""
    lines = []
    for folder in folders:
        of_folder = Store(folder).lines()
        if not of_folder:
            raise FileNotFoundError(f"no result in {Store(folder).path}: nothing was evaluated there yet")
        lines += of_folder
    return lines


def summary(report: Report) -> str:
    """Our rows task by task, Table 1 with the published rows, and the first notes of ours."""
    out = []
    for row in report.ours:
        out += ["", row.label]
        for task in TASKS:
            if task.key in row.results:
                star = "*" if task.key in row.marked else ""
                out.append(f"  {task.name:<24}{task.main_metric or GENDER:<24}{figure(row.results[task.key])}{star}")
    grid = table_1(report)
    rows = [(label, [text_of(cell, grid.decimals) for cell in cells]) for label, cells in grid.rows]
    out += ["", *aligned(grid.header, rows, 17)]
    notes = [note for row in report.ours for note in row.notes]
    more = [f"and {len(notes) - SHOWN} more notes in tables.md"] if len(notes) > SHOWN else []
    return "\n".join([*out, "", *notes[:SHOWN], *more])


def listing() -> str:
    """All entries: key, metric, tags, images, what to fetch."""
    lines = [f"{'task':<52}{'metric':<24}{'averages':<20}{'images':>7}  repository"]
    for task in BY_KEY.values():
        tags = ", ".join(task.tags) + ("" if task.counted else " (in no average)")
        lines.append(f"{task.key:<52}{task.main_metric or '-':<24}{tags:<20}{task.size:>7}  {task.repository}")
    return "\n".join(lines)
