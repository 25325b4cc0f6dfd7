"""The suite from the command line to the tables: find the data, share the tasks, write every result."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from prolip.embedder import Embedder
from prolip.evaluation.datasets.base import Dataset, fingerprint
from prolip.evaluation.evaluate import TaskResult
from prolip.evaluation.prompts import check_prompts
from prolip.evaluation.suites.datacomp.catalogue import BY_KEY, TASKS, SuiteTask, find_datasets, select_tasks, shard
from prolip.evaluation.suites.datacomp.evaluate import SuiteOptions, evaluate_task
from prolip.evaluation.suites.datacomp.report import WRITERS, SuiteRow, grids, our_rows
from prolip.evaluation.suites.datacomp.results import ModelIdentity, ResultFolder, latest, main_value, share_tasks
from prolip.evaluation.table import aligned
from prolip.methods import find_score
from prolip.prompts.weights import PromptWeights
from prolip.utils.outputs import check_output, replacing

Say = Callable[[str], None]
GENDER = "acc_gender_avg"  # shown for the face sets, which have no main metric
SHOWN = 8  # notes below the printed table


class Outcome(NamedTuple):
    """The outcome of a run: rows of all results in its folder, and why tasks failed or were missing, by key."""

    rows: Sequence[SuiteRow]
    failed: dict[str, str]
    missing: dict[str, str]


def run(load: Callable[[], Embedder], data: str, output: str, options: SuiteOptions, say: Say = print) -> Outcome:
    """Run the suite on a model, checking inputs first: `load` is called when all else is right.

    data: a folder or URL with the data sets, or "hf-hub"; output: a folder for results and tables, which keeps finished
    tasks. ValueError, FileNotFoundError.
    """
    tasks = select_tasks(options.tasks)
    for similarity in filter(None, options.similarities):
        find_score(similarity)
    mine = shard(tasks, *options.part)
    found = find_datasets(mine, data, options.skip_damaged)
    if found.missing:
        say(found.report(mine, data))
        if not (options.allow_missing and found.datasets):
            raise FileNotFoundError(
                f"{len(found.missing)} of {len(mine)} data sets are missing: fetch them as shown above, choose others "
                "with --tasks, or continue without them with --allow-missing (averages that need them are omitted)"
            )
    prompts = weights_of(options.prompts, found.datasets, len(mine) == len(tasks))
    store = ResultFolder(output)
    with store.alone("start"):  # raises errors that would prevent writing results
        if store.path.exists():
            open(store.path, "ab").close()
    if folder := options.store.folder:
        check_output(folder, folder=True)
    embedder = load()
    similarities = [embedder.card.scored_by(similarity).name for similarity in options.similarities]
    for one in prompts:
        for dataset in found.datasets.values():
            if one.are_of(dataset.classnames, dataset.templates):
                check_prompts(one, dataset, embedder.card)
    todo = [task for task in mine if task.key in found.datasets]
    failed = evaluate_tasks(todo, found.datasets, embedder, similarities, store, options, prompts, say)
    return Outcome(write_tables(output, say) if store.lines() else [], failed, found.missing)


def weights_of(paths: Sequence[str], datasets: Mapping[str, Dataset], whole: bool) -> tuple[PromptWeights, ...]:
    """Read weights of prompts. ValueError for two files of one task, or, if `whole`, for weights of no task."""
    given = tuple(PromptWeights.load(path) for path in paths)
    for path, one in zip(paths, given):
        if whole and not any(one.are_of(dataset.classnames, dataset.templates) for dataset in datasets.values()):
            raise ValueError(
                f"--prompts {path}: the {len(one.classnames)} classes and {len(one.templates)} prompts of"
                f" {one} belong to no task here: choose its task, or remove it"
            )
        if other := next((x for x in given if x is not one and x.are_of(one.classnames, one.templates)), None):
            raise ValueError(f"--prompts: {one} and {other} are of the same task: give one of them")
    return given


def evaluate_tasks(
    tasks: Sequence[SuiteTask],
    datasets: Mapping[str, Dataset],
    embedder: Embedder,
    similarities: Sequence[str],
    store: ResultFolder,
    options: SuiteOptions,
    prompts: Sequence[PromptWeights],
    say: Say,
) -> dict[str, str]:
    """Evaluate tasks without a result, in parallel with other processes, printing a line each; return errors by key."""
    marks = {key: fingerprint(d.fingerprint, d.classnames, d.templates, digits=16) for key, d in datasets.items()}
    name, model = embedder.name, embedder.fingerprint
    if given := sorted(f"{one.rule} [{one.digest}]" for one in prompts):
        name, model = ", ".join([name, *given]), fingerprint(model, given)
    identities = [ModelIdentity(name, model, similarity, embedder.precision) for similarity in similarities]
    if kept := sum(not wanted for wanted in store.wanted(tasks, identities, marks).values()):
        drawn = " and get no plots" if options.plots else ""
        say(
            f"{kept} of {len(tasks)} tasks are finished{drawn}: their results stay in {store.path}. To "
            "evaluate them again, give another --output, or delete their lines"
        )
    done: dict[str, int] = {}  # images by key
    started = time.perf_counter()

    def evaluate(task: SuiteTask, wanted: tuple[ModelIdentity, ...]) -> dict[ModelIdentity, TaskResult]:
        chosen = [identity.similarity for identity in wanted]
        results = evaluate_task(task, datasets[task.key], embedder, chosen, options, prompts)
        return {identity: results[identity.similarity] for identity in wanted}

    def tell(task: SuiteTask, results: Mapping[ModelIdentity, TaskResult]) -> None:
        first = next(iter(results.values()))
        done[task.key] = first.info["images"]
        position = tasks.index(task) + 1
        values = "  ".join(f"{identity.similarity} {percent(result)}" for identity, result in results.items())
        rate = (time.perf_counter() - started) / max(1, sum(done.values()))
        left = timedelta(seconds=round(rate * sum(x.size for x in tasks[position:] if x.key not in done)))
        say(
            f"[{position:2}/{len(tasks)}] {task.name:<22} {first.main_metric or GENDER:<22} {values}  "
            f"{first.info['images']} images, {first.info['seconds']:.1f} s, about {left} to go"
        )

    return share_tasks(tasks, store, identities, marks, evaluate, say, tell)


def percent(result: TaskResult) -> str:
    """Return the main metric in percent; for faces the accuracy of gender."""
    value = main_value(result)
    return f"{100 * (result.metrics[GENDER] if value is None else value):6.2f}"


def write_tables(output: str | os.PathLike, say: Say = print) -> Sequence[SuiteRow]:
    """Write the tables of a folder's results, one process at a time, so that the last has all; print Table 1."""
    with ResultFolder(output).alone("tables"):
        rows = our_rows(latest([output]))
        save_tables(rows, output)
    say(f"{summary(rows)}\nresults and tables: {output}")
    return rows


def save_tables(rows: Sequence[SuiteRow], output: str | os.PathLike) -> None:
    """Write `tables.md`, `.csv`, `.json` and `.tex`."""
    for ending, write in WRITERS.items():
        with replacing(Path(output) / f"tables.{ending}") as path:
            path.write_text(write(rows), encoding="utf-8")


def summary(rows: Sequence[SuiteRow]) -> str:
    """Format our rows task by task, Table 1, and the first notes of ours."""
    out, notes = [], [note for row in rows if row.results for note in row.notes]
    for row in rows:
        out += ["", row.label] if row.results else []
        for task in TASKS:
            if task.key in row.results:
                star = "*" if task.key in row.marked else ""
                out.append(f"  {task.name:<24}{task.main_metric or GENDER:<24}{percent(row.results[task.key])}{star}")
    grid = grids(rows)[0]
    more = [f"and {len(notes) - SHOWN} more notes in tables.md"] if len(notes) > SHOWN else []
    return "\n".join([*out, "", *aligned(grid.header, grid.rows, 17), "", *notes[:SHOWN], *more])


def catalogue_text() -> str:
    """Format all entries: key, metric, tags, images, repository."""
    lines = [f"{'task':<52}{'metric':<24}{'averages':<20}{'images':>7}  repository"]
    for task in BY_KEY.values():
        tags = ", ".join(task.tags) + ("" if task.counted else " (in no average)")
        lines.append(f"{task.key:<52}{task.main_metric or '-':<24}{tags:<20}{task.size:>7}  {task.repository}")
    return "\n".join(lines)
