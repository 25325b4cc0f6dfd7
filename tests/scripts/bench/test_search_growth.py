"""`search.py --grow`: what it foretells of larger indexes."""

import numpy as np
import pytest

from bench.use import search_growth


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
