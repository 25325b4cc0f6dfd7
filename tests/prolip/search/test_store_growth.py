"""The cost to add a row does not depend on the size: bytes, sorts, look-ups, memory; and the current format."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

import pytest
import torch
from commits_store import part

from prolip.gaussian import Gaussian
from prolip.scores import CSDScore
from prolip.search import store
from prolip.search.index import Part, SearchIndex

TODAY = Path(__file__).parents[2] / "fixtures" / "search-2.zip"
ASKED = Gaussian(torch.randn(3, 4, generator=torch.Generator().manual_seed(5)), torch.zeros(3, 4) - 3)


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda number: None)


def status(name: str, field: str) -> int:
    """Return a number that the system reports for this process."""
    return int(re.search(rf"^{field}:\s*(\d+)", Path(f"/proc/self/{name}").read_text(), re.M)[1])


def grow(folder, rows: int, dim: int, chunk: int) -> SearchIndex:
    """An index of so many rows; the same Gaussians again and again, as only keys are compared."""
    index = SearchIndex.create(folder, CSDScore(8.0, -3.0), dim)
    mean = torch.randn(chunk, dim, generator=torch.Generator().manual_seed(0))
    z = Gaussian(mean, mean - 3)
    items = ([{"key": f"{row:08}"} for row in range(start, start + chunk)] for start in range(0, rows, chunk))
    index.append("a", (Part(some, z, number) for number, some in enumerate(items, 1)), chunk)
    return index


def test_ten_times_the_rows_write_as_many_bytes_a_row_and_sort_only_their_own_keys(tmp_path, monkeypatch):
    sorts, written, sorted_keys, manifests = [], [], [], []
    plain = store.run_of
    monkeypatch.setattr(store, "run_of", lambda own, start: sorts.append(len(own)) or plain(own, start))
    for number, rows in enumerate((2_000, 20_000)):
        before, sorts[:] = status("io", "wchar"), []
        grow(tmp_path / str(number), rows, 192, 200)
        written.append((status("io", "wchar") - before) / rows)
        sorted_keys.append(sum(sorts) / rows)
        manifests.append((tmp_path / str(number) / store.NAME).stat().st_size)
    assert written[0] > 4 * (193 + 192) and written[1] < 1.2 * written[0]
    assert sorted_keys == [1, 1] and manifests[1] < manifests[0] + 500


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
