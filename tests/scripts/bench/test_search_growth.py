"""`search.py --grow`: one table of an index at several sizes, resumed after a kill, and what it foretells."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from bench.use import search_growth
from prolip.search.ann import IndexSpec
from prolip.search.index import SearchIndex

KINDS = ("ivf", "hnsw", "pq")
WHAT = [
    "add",
    "add, last piece",
    *(by + who for by in ("exactly", *KINDS) for who in ("", ", faiss alone")),
    *(f"{kind}, build" for kind in KINDS),
]


#: As the command's defaults, but small.
OPTIONS = {"items": 900, "at": [300], "dim": 8, "queries": 20, "clusters": 4, "rounds": 1, "threads": 1, "seed": 0}
OPTIONS |= {"trace": 0.05, "trace_spread": 1.0, "top": 10, "index_types": list(KINDS)}
OPTIONS |= {"extrapolate": None, "write": None, "processor_time": False}


def options(**changed) -> SimpleNamespace:
    return SimpleNamespace(**OPTIONS | changed)


def cells(out: str) -> dict[tuple[str, str], list[str]]:
    """The lines of the last table by their first two columns."""
    lines = [line.strip("| ").split(" | ") for line in out.rpartition("| items |")[2].splitlines()[2:]]
    return {(line[0], line[1]): line[2:] for line in lines if len(line) > 2}


class Killed(BaseException):
    pass


def test_a_run_that_was_killed_goes_on_with_what_it_measured_and_made(tmp_path, monkeypatch, capsys):
    """Anywhere: before each row of results is kept."""
    keep, ends, begun = search_growth.Results.add, 0, []
    finish = SearchIndex.finish

    def noted(index, *args, **kwargs):
        begun.append((index.kind.name, len(index), index.store.values["near"]))
        finish(index, *args, **kwargs)

    def broken(results, items, by, row):
        if len(results.rows) == ends:
            raise Killed
        keep(results, items, by, row)

    monkeypatch.setattr(SearchIndex, "finish", noted)
    monkeypatch.setattr(search_growth.Results, "add", broken)
    while True:
        try:
            search_growth.grow(options(extrapolate=1000), tmp_path / "run")
            break
        except Killed:
            ends += 1
    found = cells(capsys.readouterr().out)
    # of what was made, but whose line was not kept, nothing can be measured again
    assert {key for key in found if key[0] != "1,000 (extrapolated)"} >= {
        (size, by) for size in ("300", "900") for by in WHAT if not by.startswith("add") and not by.endswith("build")
    }
    rows = json.loads((tmp_path / "run" / search_growth.RESULTS).read_bytes())["rows"]
    assert len({(row["items"], row["by"]) for row in rows}) == len(rows)
    kinds = [(kind, items) for kind, items, near in begun if near is None]
    assert kinds == [(kind, items) for items in (300, 900) for kind in KINDS], "each was made once"
    index = SearchIndex(tmp_path / "run/index", verify=True)
    assert len(index) == 900 and index.kind == IndexSpec()
    whole = search_growth.gaussians(search_growth.CHUNK, options(), 1)
    assert index.gaussians(range(900)).mean.equal(whole.mean[:900])  # wherever it was broken off


def test_rows_do_not_depend_on_where_a_run_starts(monkeypatch):
    monkeypatch.setattr(search_growth, "CHUNK", 7)
    whole = [*search_growth.parts(options(), 0, 30, {"aside": 0.0})]
    rest = [*search_growth.parts(options(), 11, 30, {"aside": 0.0})]
    means = [np.concatenate([part.z.mean for part in some]) for some in (whole, rest)]
    assert np.array_equal(means[0][11:], means[1]) and [part.position for part in rest] == [14, 21, 28, 30]
    assert [item["key"] for part in rest for item in part.items] == [str(key) for key in range(11, 30)]


def test_what_is_foretold_lies_on_the_law_of_each_search():
    at = (1000, 2000, 5000, 10_000)
    laws = {"exactly": lambda n: 3 + 0.5 * n, "ivf": lambda n: 1 + 0.01 * n, "hnsw": lambda n: 2 + np.log(n)}
    rows = [{"items": n, "by": by, "alone": law(n), "own": 0.5 + n * 1e-6} for by, law in laws.items() for n in at]
    rows += [{"items": n, "by": "ivf, build", "rate": 1 / (2 + 3 * n**0.5), "written": 100.0} for n in at]
    for by, law in laws.items():
        row = search_growth.extrapolated(rows, by, 10**6)
        assert row["alone"] == pytest.approx(law(10**6)) and row["own"] == pytest.approx(1.5) and "recall" not in row
    row = search_growth.extrapolated(rows, "ivf, build", 10**6)
    assert row["rate"] == pytest.approx(1 / 3002) and row["written"] == pytest.approx(100)
    falling = [{"items": n, "by": "add", "rate": float(n), "written": 1.0} for n in at]
    assert search_growth.extrapolated(falling, "add", 10**6)["rate"] == pytest.approx(1 / np.mean([1 / n for n in at]))
