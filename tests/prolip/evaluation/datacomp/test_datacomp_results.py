"""Truncated lines, lines of other models, of other data; claims that end with their process."""

import csv
import fcntl
import json
import math
import multiprocessing
import os
import resource
import signal
import threading
import time
from dataclasses import replace

import pytest

from prolip.evaluation.evaluate import TaskResult
from prolip.evaluation.suites.datacomp import results, run
from prolip.evaluation.suites.datacomp.catalogue import COUNTED, TASKS, select_tasks

ME = results.ModelIdentity("local-dir:a", "f" * 32, "csd", "fp32")
BY_MEAN = results.ModelIdentity("local-dir:a", "f" * 32, "mean", "fp32")
FEW = select_tasks(["cifar10", "cars", "mnist", "gtsrb", "fmow", "fairface"])
MARKS = {task.key: "d" for task in TASKS}
fork = multiprocessing.get_context("fork")  # the children touch no tensor


def result(task, value=0.5):
    if task.main_metric is None:
        return TaskResult(task.key, {"acc_race_avg": value}, "", {"size": 3})
    return TaskResult(task.key, {task.main_metric: value, "acc1": value}, task.main_metric, {"size": 3})


def line(task, value=0.5, identity=ME, data="d"):
    return results.Line(identity, data, result(task, value))


def left(store, identity=ME):
    """The keys that have no result yet."""
    return {key for key, wanted in store.wanted(FEW, [identity], MARKS).items() if wanted}


@pytest.mark.parametrize("task", [COUNTED[0], TASKS[-1]], ids=["counted", "faces"])
def test_a_line_survives_the_file_and_has_the_keys_of_datacomp(task):
    written = line(task)
    assert results.from_json(results.to_json(written)) == written
    values = json.loads(results.to_json(written))
    assert values["key"] == task.key and values["dataset"] == task.name
    assert values["metrics"]["main_metric"] == (0.5 if task.counted else None)
    text = results.to_json(results.Line(ME, "d", TaskResult("cars", {"acc1": 0.25, "odd": math.nan}, "acc1", {})))
    assert '"odd": null' in text and math.isnan(results.from_json(text).result.metrics["odd"])


def test_a_line_cut_anywhere_is_skipped_and_the_next_one_is_whole(tmp_path):
    whole = results.to_json(line(FEW[0]))
    for length in (0, 1, 40, len(whole) - 1):
        folder = tmp_path / str(length)
        folder.mkdir()
        store = results.ResultFolder(folder)
        store.path.write_text(results.to_json(line(FEW[1])) + "\n" + whole[:length])
        store.append(line(FEW[2]))
        assert [read.result.key for read in store.lines()] == [FEW[1].key, FEW[2].key]


@pytest.fixture
def full_disk():
    """Return a function that limits the size of files from then on."""
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_fills_while_a_line_is_written_is_an_error_and_leaves_the_lines_before_whole(tmp_path, full_disk):
    store = results.ResultFolder(tmp_path)
    store.append(line(FEW[0]))
    before = store.path.read_bytes()
    full_disk(len(before) + 50)
    with pytest.raises(OSError, match="File too large"):
        store.append(line(FEW[1]))
    assert store.path.read_bytes()[: len(before)] == before and not store.path.read_bytes().endswith(b"\n")
    full_disk(10**6)
    store.append(line(FEW[2]))
    assert [read.result.key for read in store.lines()] == [FEW[0].key, FEW[2].key]


def test_two_commands_that_write_at_once_lose_no_line(tmp_path, monkeypatch):
    store, read, rows = results.ResultFolder(tmp_path), threading.Event(), run.our_rows
    store.append(line(FEW[0]))

    def slow(found):  # between what the first command has read and what it writes, the second one ends
        if not read.is_set():
            read.set()
            time.sleep(0.3)
        return rows(found)

    monkeypatch.setattr(run, "our_rows", slow)
    first = threading.Thread(target=run.write_tables, args=(tmp_path,))
    first.start()
    assert read.wait(10)
    second = threading.Thread(target=store.append, args=(line(FEW[1]),))
    with open(store.path) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second.start()
        second.join(0.1)
        assert second.is_alive() and len(store.lines()) == 1
    second.join(10)
    run.write_tables(tmp_path)
    first.join(10)
    (row,) = csv.DictReader((tmp_path / "tables.csv").read_text().splitlines())
    assert row["CIFAR-10"] and row["GTSRB"]


def test_lines_of_another_model_similarity_precision_data_or_scoring_are_not_taken(tmp_path):
    store, task = results.ResultFolder(tmp_path), FEW[0]
    for other in (replace(ME, fingerprint="e" * 32), BY_MEAN, replace(ME, precision="amp_bf16")):
        store.append(line(task, identity=other))
    store.append(line(task, data="other data"))
    old = json.loads(results.to_json(line(task)))
    store.path.open("a").write(json.dumps({**old, "version": 0}) + "\n")
    assert left(store) == {one.key for one in FEW}
    moved = replace(ME, model="local-dir:moved")  # the weights are the same
    for value in (0.75, 0.5):
        store.append(line(task, value, moved))
    store.append(line(FEW[1], 0.2))
    assert left(store) == {one.key for one in FEW[2:]}
    found = results.latest([tmp_path])[ME]  # by the first name of a model; the last line of a task counts
    assert {key: results.main_value(r) for key, r in found.items()} == {task.key: 0.5, FEW[1].key: 0.2}


def test_a_result_is_complete_on_all_images_only():
    task = FEW[0]
    whole = {"size": task.size - 20, "classes": 10}
    assert results.is_complete(TaskResult(task.key, {}, "acc1", whole))
    for change in ({"size": 0.98 * task.size}, {"classes": 9}, {"damaged": {"kinds": {"bad image": 1}}}):
        assert not results.is_complete(TaskResult(task.key, {}, "acc1", whole | change))


def test_only_what_lacks_is_computed_and_a_failed_task_does_not_end_the_others(tmp_path):
    store, seen, said = results.ResultFolder(tmp_path), [], []
    store.append(line(FEW[1]))

    def evaluate(task, wanted):
        seen.append(task.key)
        if task is FEW[2]:
            raise ValueError("a shard is damaged")
        return {identity: result(task) for identity in wanted}

    failed = results.share_tasks(FEW, store, [ME], MARKS, evaluate, said.append)
    assert failed == {FEW[2].key: "a shard is damaged"} and any("damaged" in text for text in said)
    assert seen == [task.key for task in FEW if task is not FEW[1]]
    assert results.share_tasks(FEW[:2], store, [ME], MARKS, evaluate, said.append) == {} and len(seen) == len(FEW) - 1
    assert store.wanted(FEW[1:3], [ME, BY_MEAN], MARKS) == {FEW[1].key: (BY_MEAN,), FEW[2].key: (ME, BY_MEAN)}


def work(folder, log, pause, ready=None):
    def evaluate(task, wanted):
        with open(log, "a") as file:
            file.write(f"{task.key} {os.getpid()}\n")
        time.sleep(pause)
        return {identity: result(task) for identity in wanted}

    if ready is not None:
        ready.wait()
    results.share_tasks(FEW, results.ResultFolder(folder), [ME], MARKS, evaluate, lambda text: None, poll=0.02)


def test_each_task_is_evaluated_once_and_that_of_a_killed_process_by_one_that_waits_for_it(tmp_path):
    log = tmp_path / "log"
    victim = fork.Process(target=work, args=(tmp_path, log, 60))
    victim.start()
    while not log.exists() or not log.read_text():
        time.sleep(0.01)
    ready = fork.Barrier(2)  # the slow one finds tasks that were open when it looked and are finished now
    both = [fork.Process(target=work, args=(tmp_path, log, pause, ready)) for pause in (0.02, 0.2)]
    for process in both:
        process.start()
    while len(results.ResultFolder(tmp_path).lines()) < len(FEW) - 1:  # everything but the victim's task
        time.sleep(0.01)
    time.sleep(0.1)
    assert all(process.is_alive() for process in both) and left(results.ResultFolder(tmp_path)) == {FEW[0].key}
    os.kill(victim.pid, signal.SIGKILL)
    for process in both:
        process.join(20)
        assert process.exitcode == 0
    victim.join()
    taken = [entry.split() for entry in log.read_text().splitlines()]
    assert taken[0][0] == taken[-1][0] == FEW[0].key and len({pid for _, pid in taken}) == 3
    assert sorted(key for key, _ in taken[1:]) == sorted(task.key for task in FEW)
    assert not left(results.ResultFolder(tmp_path))


def test_a_held_claim_names_its_holder(tmp_path):
    store = results.ResultFolder(tmp_path)
    with store.claim("cars") as mine, results.ResultFolder(tmp_path).claim("cars") as other:
        assert not mine and f"process {os.getpid()}" in other
    with results.ResultFolder(tmp_path).claim("cars") as again:
        assert not again
