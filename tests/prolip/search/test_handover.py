"""The Python of docs/guides/vector_databases.md: databases that rank vectors by L2 return our answers."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch
from galleries import GALLERY, QUERIES, parts_of

from prolip.cli.main import main
from prolip.methods import find_score
from prolip.search.index import SearchIndex

PAGE = (Path(__file__).parents[3] / "docs/guides/vector_databases.md").read_text()
OPENING, QDRANT, POSTGRES = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)


@pytest.fixture
def names(tmp_path, photos, small_model, monkeypatch, capsys) -> dict:
    """The names that the first snippet defines, with a small index and model."""
    monkeypatch.chdir(tmp_path)
    assert main(["search", "build", "runs/index", "--data", f"images:{photos}", "--model", small_model]) == 0
    names: dict = {}
    exec(OPENING.replace("local-dir:runs/demo/model", small_model), names)
    assert capsys.readouterr().out.splitlines()[1:] == [str(tuple(names["query"].shape))]
    return names


@pytest.mark.parametrize("name", ["csd", "mean", "wasserstein2"])
def test_by_l2_the_nearest_vectors_are_the_answers(tmp_path, name):
    index = SearchIndex.create(tmp_path, find_score(name)(), GALLERY.mean.shape[1])
    index.append("a", parts_of(GALLERY), 400)
    index.delete(["k3", "k700"])
    items, vectors = zip(*((items, vectors) for items, _, vectors in index.batches()))
    keys = [item["key"] for some in items for item in some]
    distance = torch.cdist(index.query_vectors(QUERIES).double(), torch.cat(vectors).double())
    found = index.search(QUERIES, 10)
    want = [[item["key"] for item in index.items(rows)] for rows in found.rows.tolist()]
    near = [[keys[row] for row in rows] for rows in distance.argsort(dim=1)[:, :10].tolist()]
    assert len(keys) == len(index) and sum(a == b for a, b in zip(near, want)) >= 0.95 * len(want)  # float32 vectors
    assert all(set(a) == set(b) for a, b in zip(near, want))


def test_the_file_for_postgres_ranks_as_the_index_does(names):
    exec(POSTGRES, names)
    index, embedder = names["index"], names["embedder"]
    with open("items.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    vectors = torch.tensor([json.loads(row[2]) for row in rows])
    z = embedder.embed_texts(["a red car"])
    order = torch.cdist(index.query_vectors(z), vectors)[0].argsort().tolist()
    found = [item["key"] for item in index.items(index.search(z, 12).rows[0].tolist())]
    assert [rows[row][0] for row in order] == found
    traces = {item["key"]: trace for items, z, _ in index.batches() for item, trace in zip(items, z.trace.tolist())}
    assert {row[0]: float(row[1]) for row in rows} == pytest.approx(traces)


def test_qdrant_ranks_as_the_index_does(names, capsys):
    pytest.importorskip("qdrant_client")
    exec(QDRANT, names)
    index, embedder = names["index"], names["embedder"]
    found = index.search(embedder.embed_texts(["an animal"]), 3).rows[0].tolist()
    said = [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == [item["key"] for item in index.items(found)]
