"""Search indexes on disk: kills, damage, two writers, readers during a write, keys in runs."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil

import numpy as np
import pytest
import torch
from commits_store import known, made, part

import faults
from forked import one_thread
from prolip.cli.main import main
from prolip.gaussian import Gaussian
from prolip.methods import find_score
from prolip.scores import CSDScore
from prolip.search import store
from prolip.search.exact import nearest
from prolip.search.index import Part, SearchIndex
from prolip.search.store import DELETED, ENDS, ITEMS, LOG_VAR, MEAN, NAME, SHARDS, VECTOR

ASKED = Gaussian(torch.randn(3, 4, generator=torch.Generator().manual_seed(5)), torch.zeros(3, 4) - 3)


def test_a_kill_at_one_call_of_each_kind_leaves_the_old_or_the_new_index(tmp_path):
    report = faults.check("commits_store:replace,finish,broken", tmp_path)
    assert report.count("the old state") > 1 and report.count("the new state") > 1


@pytest.mark.slow
@pytest.mark.parametrize("commit", ["append", "replace", "delete", "shards", "finish", "broken"])
def test_a_kill_or_a_full_disk_at_any_call_leaves_the_old_or_the_new_index(tmp_path, commit):
    report = faults.check(f"commits_store:{commit}", tmp_path, every=True)
    assert "the old state" in report and "the new state" in report


def test_runs_are_merged_part_by_part(monkeypatch):
    monkeypatch.setattr(store, "MERGED", 7)
    rng, runs = np.random.default_rng(0), []
    for size in (100, 3, 0, 40, 40):
        runs.append(np.zeros(size, dtype=store.ENTRY))
        runs[-1]["hash"], runs[-1]["row"] = np.sort(rng.integers(0, 20, size)), rng.integers(0, 10**6, size)
    parts = list(store.merged(runs))
    whole = np.concatenate(parts)
    assert max(map(len, parts)) <= 35 and (np.diff(whole["hash"].astype(int)) >= 0).all()
    assert sorted(whole.tolist()) == sorted(entry for run in runs for entry in run.tolist())


@pytest.mark.parametrize("hashes", [2**64, 5])
def test_rows_of_keys_are_those_of_a_dictionary_also_where_hashes_of_keys_are_equal(tmp_path, monkeypatch, hashes):
    monkeypatch.setattr(os, "fsync", lambda number: None)
    monkeypatch.setattr(store, "BLOCK", 8)
    plain = store.hashes_of
    monkeypatch.setattr(store, "hashes_of", lambda keys: plain(keys) % np.uint64(hashes - 1))
    index, rng, want, rows = SearchIndex.create(tmp_path, CSDScore(8.0, -3.0), 4), random.Random(0), {}, 0
    for number in range(60):
        some = rng.sample(range(40), rng.randint(1, 6))
        names, there = [f"k{x}" for x in some], [f"k{x}" for x in some if f"k{x}" in want]
        if rng.random() < 0.25 and there:
            index.delete(there)
            want = {key: row for key, row in want.items() if key not in there}
        else:
            replace = rng.random() < 0.5
            z = torch.full((len(some), 4), float(number))
            parts = [Part([{"key": key, "print": str(number)} for key in names], Gaussian(z, z), number)]
            if there and not replace:
                with pytest.raises(ValueError, match="or occur twice"):
                    index.append(f"source {number}", parts)
                continue
            index.append(f"source {number}", parts, replace=replace)
            want |= dict(zip(names, range(rows, rows + len(some))))
            rows += len(some)
        opened = SearchIndex(tmp_path, verify=True)
        for one in (index, opened):
            assert one.find([f"k{x}" for x in range(40)]).tolist() == [want.get(f"k{x}", -1) for x in range(40)]
            assert len(one) == len(want)
        assert [(key, row) for key, _, row in known(opened)] == sorted(want.items(), key=lambda pair: pair[1])
    assert len(opened.store.deleted) > 20


def test_columns_that_are_not_needed_at_first_are_filled_up(tmp_path):
    """Points, then Gaussians, then points; means that are their vectors at first."""
    index = SearchIndex.create(tmp_path, find_score("mean")(), 4)
    unit = torch.eye(4)
    points, wide = Gaussian(unit, torch.full((4, 4), -torch.inf)), Gaussian(2 * unit, torch.zeros(4, 4))
    index.append("a", [Part([{"key": f"a{i}"} for i in range(4)], points, 4)])
    assert not (tmp_path / MEAN).exists() and not (tmp_path / LOG_VAR).exists()
    index.append("b", [Part([{"key": f"b{i}"} for i in range(4)], wide, 4)])
    index.append("c", [Part([{"key": f"c{i}"} for i in range(4)], points, 4)])
    mean, log_var = SearchIndex(tmp_path, verify=True).gaussians(range(12))
    assert mean.equal(torch.cat([points.mean, wide.mean, points.mean]))
    assert log_var.equal(torch.cat([points.log_var, wide.log_var, points.log_var]))


FILES = (VECTOR, LOG_VAR, ITEMS, ENDS, DELETED, SHARDS, "keys-*.run", NAME)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    index = made(folder, "hnsw")
    index.delete(["k1", "k2"])
    index.store.note_shards("first", {"/data/0.tar": "1 2 "})
    index.finish()
    return folder / "index"


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def flip(path, place=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 4
    path.write_bytes(data)


def text(path):
    path.write_text("nothing of the kind " * 1000)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [cut, flip, lambda path: path.unlink()], ids=["cut", "flipped", "gone"])
def test_a_damaged_file_is_refused_by_name(tmp_path, whole, name, damage):
    shutil.copytree(whole, tmp_path / "index")
    path = next((tmp_path / "index").glob(name))
    damage(path)
    whole_size = path.exists() and path.stat().st_size >= (whole / path.name).stat().st_size
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        SearchIndex(tmp_path / "index", verify=whole_size and name != NAME)
    said = str(error.value)
    assert (str(path) in said or "no index in" in said) and "\n" not in said
    assert "copy" in said or "build" in said


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
@pytest.mark.parametrize("damage", [text, lambda path: path.unlink()], ids=["text", "gone"])
def test_a_damaged_approximate_index_is_named_left_out_and_made_again(tmp_path, kind, damage):
    index = made(tmp_path, kind)
    index.finish()
    want = index.search(ASKED, 5, probe=100).rows
    (path,) = (tmp_path / "index").glob("near-*")
    size = path.stat().st_size
    del index  # which has it mapped
    damage(path)
    if path.exists() and damage is text:
        os.truncate(path, size)
    index = SearchIndex(tmp_path / "index")
    assert index.search(ASKED, 5, exactly=True).rows.equal(want)
    for refused in (lambda: index.search(ASKED), index.finish, lambda: index.store.verify()):
        with pytest.raises(ValueError, match=f"{path.name} is damaged.* finish {index.store.folder} --rebuild"):
            index.append("more", [part(60, 1)], replace=True)
            refused()
    index.finish(rebuild=True)
    opened = SearchIndex(tmp_path / "index", verify=True)
    assert opened._read().ntotal == len(opened.store) and opened.search(ASKED, 5, probe=100).rows.shape == (3, 5)


def test_numbers_that_are_nan_are_no_answers(tmp_path):
    for value in (np.nan, np.inf):
        index = made(tmp_path / str(value))
        path = tmp_path / str(value) / "index" / VECTOR
        data = np.fromfile(path, "<f4")
        data[:] = value
        data.tofile(path)
        with pytest.raises(ValueError, match="--verify"):
            SearchIndex(path.parent).search(ASKED, 3)
        with pytest.raises(ValueError, match=VECTOR):
            SearchIndex(path.parent, verify=True)
        with pytest.raises(ValueError, match=VECTOR):
            index.store.verify()


def held(folder, started, go) -> None:
    one_thread()
    index = SearchIndex(folder)

    def parts():
        yield part(100, 20)
        started.set()
        go.wait(60)
        yield part(120, 20)

    index.append("other", parts(), 20)


def test_a_second_writer_is_refused_by_one_line_and_loses_nothing(tmp_path, capsys):
    index, stale = made(tmp_path), SearchIndex(tmp_path / "index")
    context = multiprocessing.get_context("fork")
    started, go = context.Event(), context.Event()
    process = context.Process(target=held, args=(tmp_path / "index", started, go))
    process.start()
    assert started.wait(60)
    for change in (
        lambda: index.append("mine", [part(200, 5)]),
        lambda: index.delete(["k1"]),
        index.finish,
        lambda: index.store.write(sources=[]),
    ):
        said = rf"written by process {process.pid} on .*, since 20.*Wait"
        with pytest.raises(BlockingIOError, match=said) as error:
            change()
        assert "\n" not in str(error.value)
    assert main(["search", "delete", str(tmp_path / "index"), "--keys", "k1"]) == 2
    err = capsys.readouterr().err
    assert f"written by process {process.pid}" in err and err.count("\n") == 1
    assert len(SearchIndex(tmp_path / "index")) == 80 and len(stale) == 60  # readers need no lock
    assert stale.search(ASKED).rows.max() < 60
    go.set()
    process.join()
    with pytest.raises(ValueError, match="another process has read other since then"):
        index.append("other", [part(300, 1)])
    stale.append("mine", [part(200, 5)])
    found = SearchIndex(tmp_path / "index", verify=True)
    assert len(found) == 105 and [x["address"] for x in found.store.values["sources"]] == ["first", "other", "mine"]
    assert (found.find([f"k{row}" for row in (0, 59, 100, 139, 200, 204)]) >= 0).all()


def writes(folder, end) -> None:
    one_thread()
    index, number = SearchIndex(folder), 1000
    while not end.is_set():
        index.append(f"source {number}", [part(number, 3)])
        index.delete([f"k{number}"])
        index.finish(rebuild=number % 5 == 0)
        number += 3


def test_a_reader_opens_and_keeps_a_whole_state_while_a_writer_commits(tmp_path, monkeypatch):
    index, opened = made(tmp_path, "hnsw"), 0
    index.finish()
    first = SearchIndex(tmp_path / "index")
    context = multiprocessing.get_context("fork")
    end = context.Event()
    process = context.Process(target=writes, args=(tmp_path / "index", end))
    process.start()
    try:
        while (index := SearchIndex(tmp_path / "index")).store.values["made"] < 25:
            index.store.verify()
            rows, every = len(index.store), known(index)
            assert rows >= 60 and len(every) == len(index) and rows - 60 >= len(index.store.deleted)
            assert index.find([key for key, _, _ in every[-5:]]).tolist() == [row for _, _, row in every[-5:]]
            if index.store.near is not None:
                index._read()
            opened += 1
            assert process.is_alive()
    finally:
        end.set()
        process.join()
    assert opened > 3 and process.exitcode == 0
    assert not (tmp_path / "index" / first.store.values["near"]["file"]).exists()
    assert first.search(ASKED, 5).rows.equal(nearest(first.score, ASKED, first.store.gallery, 5).rows)
    assert len(first) == 60 and first.find(["k59"]).tolist() == [59]
    assert not [name for name in os.listdir(tmp_path / "index") if name.endswith(".tmp")]


def test_an_index_whose_build_was_broken_off_says_how_far_it_goes(tmp_path, caplog):
    index = SearchIndex.create(tmp_path, CSDScore(8.0, -3.0), 4)

    def broken():
        yield part(0, 20)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        index.append("images:a\x1b[31m", broken(), 20)
    opened = SearchIndex(tmp_path)
    source = opened.source("images:a\x1b[31m")
    assert source["position"] == 20 and not source["done"] and not opened.source("b")["done"]
    assert (opened.search(ASKED).rows >= 0).all() and (opened.search(ASKED).rows >= 0).all()
    (record,) = caplog.records
    assert "has only the first 20 items of images:a\\x1b[31m" in record.getMessage()
    index.append("images:a\x1b[31m", [])
    caplog.clear()
    SearchIndex(tmp_path).search(ASKED)
    assert not caplog.records
