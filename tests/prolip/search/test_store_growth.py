"""What a row costs to add does not depend on how many are there: bytes, sorts, look-ups, memory; and today's format."""

from __future__ import annotations

import multiprocessing
import os
import re
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from commits_store import part

from forked import one_thread
from prolip.gaussian import Gaussian
from prolip.scores import CSDScore
from prolip.search import keys, store
from prolip.search.index import CHUNK, Part, SearchIndex
from prolip.search.sources import Read, Rebuild

TODAY = Path(__file__).parents[2] / "fixtures" / "search-2.zip"
ASKED = Gaussian(torch.randn(3, 4, generator=torch.Generator().manual_seed(5)), torch.zeros(3, 4) - 3)


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda number: None)


def status(name: str, field: str) -> int:
    """A number that the system tells of this process."""
    return int(re.search(rf"^{field}:\s*(\d+)", Path(f"/proc/self/{name}").read_text(), re.M)[1])


def grow(folder, rows: int, dim: int, chunk: int) -> SearchIndex:
    """An index of so many rows; the same Gaussians again and again, as only keys are compared."""
    index = SearchIndex.create(folder, CSDScore(8.0, -3.0), dim)
    mean = torch.randn(chunk, dim, generator=torch.Generator().manual_seed(0))
    z = Gaussian(mean, mean - 3)
    items = ([{"key": f"{row:08}"} for row in range(start, start + chunk)] for start in range(0, rows, chunk))
    index.append("a", (Part(some, z, number) for number, some in enumerate(items, 1)), chunk)
    return index


# --- rows ------------------------------------------------------------------------------------------------------------
def test_ten_times_the_rows_write_as_many_bytes_a_row_and_sort_only_their_own_keys(tmp_path, monkeypatch):
    sorts, written, sorted_keys, manifests = [], [], [], []
    plain = keys.run_of
    monkeypatch.setattr(store, "run_of", lambda own, start: sorts.append(len(own)) or plain(own, start))
    for number, rows in enumerate((2_000, 20_000)):
        before, sorts[:] = status("io", "wchar"), []
        grow(tmp_path / str(number), rows, 192, 200)
        written.append((status("io", "wchar") - before) / rows)
        sorted_keys.append(sum(sorts) / rows)
        manifests.append((tmp_path / str(number) / store.NAME).stat().st_size)
    assert written[0] > 4 * (193 + 192) and written[1] < 1.2 * written[0]
    assert sorted_keys == [1, 1] and manifests[1] < manifests[0] + 500


def test_from_one_million_rows_to_ten_a_row_is_written_and_its_key_is_compared_hardly_more_often():
    """Merges and comparisons grow as the logarithm; a row's bytes, 1,540 of them vectors, by less than 1.05."""
    bytes_a_row, compared = [], []
    for rows in (10**6, 10**7):
        sizes, merged, halvings = [], 0, 0.0
        for _ in range(rows // CHUNK):
            halvings += sum(np.log2(size) for size in sizes)
            count = keys.absorbed(sizes, CHUNK)
            sizes[len(sizes) - count :] = [CHUNK + sum(sizes[len(sizes) - count :])]
            merged += sizes[-1]
        bytes_a_row.append(4 * (193 + 192) + keys.ENTRY.itemsize * merged / rows)
        compared.append(halvings / (rows // CHUNK))
        assert merged / rows < np.log2(rows / CHUNK) and len(sizes) < np.log2(rows / CHUNK)
        assert compared[-1] < np.log2(rows) * np.log2(rows / CHUNK) / 2
    assert bytes_a_row[1] < 1.05 * bytes_a_row[0]


def peaks_of_adding(folder: Path, numbers: tuple[int, ...], peaks) -> None:
    """How far memory rises while an index of so many rows is made, each in KiB."""
    os.fsync = lambda number: None
    one_thread()
    grow(folder / "first", CHUNK, 32, CHUNK)  # whatever is loaded once
    for place, rows in enumerate(numbers):
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        before = status("status", "VmRSS")
        grow(folder / str(place), rows - rows % CHUNK, 32, CHUNK)
        peaks[place] = status("status", "VmHWM") - before


@pytest.mark.slow
def test_memory_of_an_add_does_not_grow_with_the_rows(tmp_path):
    """50,000 rows of 32 dimensions are 13 MB, 200,000 are 52.

    A process of its own measures: in this one earlier tests have left free memory, which would hide a part of either.
    """
    spawn = multiprocessing.get_context("spawn")
    peaks = spawn.Array("q", 2)
    process = spawn.Process(target=peaks_of_adding, args=(tmp_path, (50_000, 200_000), peaks))
    process.start()
    process.join()
    assert process.exitcode == 0 and peaks[1] - peaks[0] < 10 * 1024, peaks[:]  # KiB; also runs that are mapped, 3.2 MB


def test_each_deletion_is_read_once_by_a_writer_however_many_there_are(tmp_path, monkeypatch):
    index, read = grow(tmp_path, 100, 4, 100), []
    plain = np.maximum
    monkeypatch.setattr(np, "maximum", lambda log, other: read.append(len(log)) or plain(log, other))
    z = Gaussian(torch.zeros(100, 4), torch.zeros(100, 4))
    again = [Part([{"key": f"{row:08}"} for row in range(100)], z, position) for position in range(20)]
    index.append("b", again, 100, replace=True)
    assert len(index) == 100 and index.store.deleted.tolist() == list(range(2000))
    assert 2000 <= sum(read) <= 2000 + 100


def test_a_new_source_looks_at_no_item_of_the_others(tmp_path, monkeypatch):
    index, looked = grow(tmp_path, 500, 4, 100), []
    plain = index.store.items
    monkeypatch.setattr(index.store, "items", lambda rows: looked.extend(rows) or plain(rows))
    (tmp_path / "texts").write_text("one\ntwo\n")
    data = f"texts:{tmp_path / 'texts'}"

    def read(words) -> Rebuild:
        with index.writing():
            rebuild = Rebuild(index, data)
            reads = (Read({"key": word}, "", None) for word in words)
            rebuild.run(rebuild.parts(reads, 10, lambda some: Gaussian(*torch.zeros(2, len(some), 4))), 10)
        return rebuild

    assert read(["one", "two"]).added == 2 and not looked
    assert read(["two"]).removed == 1 and len(index) == 501  # and now it is looked for
    assert index.find(["one", "two", f"{7:08}"]).tolist() == [-1, 501, 7]


# --- today's format --------------------------------------------------------------------------------------------------
def test_an_index_of_the_second_version_answers_as_before_and_goes_on(tmp_path):
    """It was written at commit df68a8e2: 70 rows, 8 of them deleted or replaced, 2 of them to stay deleted."""
    with zipfile.ZipFile(TODAY) as archive:
        archive.extractall(tmp_path)
    index = SearchIndex(tmp_path, verify=True)
    want = [["k25", "k43", "k33", "k5", "k4"], ["k11", "k23", "k17", "k35", "k26"], ["k33", "k38", "k5", "k45", "k2"]]
    for exactly in (True, False):
        found = index.search(ASKED, 5, exactly=exactly)
        assert [[item["key"] for item in index.items(rows)] for rows in found.rows.tolist()] == want
        assert found.scores[:, 0].tolist() == pytest.approx([1.9961234164624022, 7.2371285544323545, 3.674360461253789])
    assert index.store.deleted.tolist() == [3, 7, 41, 55, 56, 57, 58, 59] and len(index) == 62
    assert index.store.are_unwanted(["k3", "k7", "k41", "k55", "k0"]).tolist() == [True, False, True, False, False]
    assert index.store.shards("first") == {"/data/0.tar": "1 2 ", "/data/1.tar": None}
    assert index.find(["k55", "k3", "k64"]).tolist() == [60, -1, 69]
    index.append("third", [part(100, 30)])
    index.finish()
    opened = SearchIndex(tmp_path, verify=True)
    assert len(opened) == 92 and opened.find(["k100", "k55", "k3"]).tolist() == [70, 60, -1]
    assert opened.search(ASKED, 5, probe=200).rows.equal(opened.search(ASKED, 5, exactly=True).rows)
