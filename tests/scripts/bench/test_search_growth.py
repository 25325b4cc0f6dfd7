"""`search.py --grow`: one table of an index at several sizes, resumed after a kill, and what it foretells."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.use import search_growth
from prolip.search.index import SearchIndex

ROOT = Path(__file__).resolve().parents[3]

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


@pytest.mark.slow
def test_one_table_has_every_search_at_every_size_and_what_more_items_would_take(forked, tmp_path):
    small = "--grow --items 900 --at 300 --dim 8 --queries 20 --clusters 4 --rounds 1 --threads 1 --extrapolate 9000"
    words = (*small.split(), "--folder", str(tmp_path))
    page, mark = tmp_path / "page.md", "<!-- 8 dimensions: by scripts/bench/use/search.py -->"
    page.write_text("none")
    assert forked.script(ROOT / "scripts/bench/use/search.py", *words, "--write", page) == 2 and mark in forked.err
    page.write_text(f"before\n{mark}\nold\n{mark}\nafter\n")
    code = forked.script(ROOT / "scripts/bench/use/search.py", *words, "--write", page)
    assert code == 0, forked.err[-2000:]
    found = cells(forked.out)
    assert page.read_text() == f"before\n{mark}\n{forked.out[forked.out.rindex('| items |') :]}{mark}\nafter\n"
    sizes = ("300", "900", "9,000 (extrapolated)")
    assert sorted(found) == sorted((size, by) for size in sizes for by in WHAT)
    number = list(search_growth.COLUMNS).index
    for size in sizes[:2]:
        assert found[size, "exactly"][number("recall")] == "1.0000"
        assert float(found[size, "exactly, faiss alone"][number("recall")]) > 0.99
        assert all(float(found[size, kind][number("recall")]) > 0.7 for kind in KINDS)
        assert found[size, "ivf"][number("recall")] == found[size, "ivf, faiss alone"][number("recall")]
        assert 4 * 17 < int(found[size, "add"][number("written")]) < 1000
        assert int(found[size, "add"][number("rate")].replace(",", "")) > 10
        assert 8 < int(found[size, "ivf"][number("files")]) < 14
    assert found["900", "ivf"][0] == "8 of 14 lists" and found["900", "hnsw"][0] == "128 candidates"
    assert found[sizes[2], "exactly"][number("recall")] == "-" != found[sizes[2], "exactly"][number("alone")]
    assert len(SearchIndex(tmp_path / "index", verify=True)) == 900 and not [*(tmp_path / "index").glob("near-*")]


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
