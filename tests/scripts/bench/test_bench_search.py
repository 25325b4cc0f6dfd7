"""The comparison of the search benchmark, and its extrapolation to larger indexes."""

import numpy as np
import pytest

from bench.use import search as bench
from bench.use import search_growth


@pytest.mark.parametrize(("shift", "answer"), [(0.02, "yes"), (0.0, "yes"), (-0.02, "no")])
def test_the_comparison_answers_by_its_interval(shift, answer):
    generator = np.random.default_rng(3)
    common = generator.random((2, 500)) * 0.2
    other = [bench.Point(str(i), common[i] + 0.3 * (i + 1), np.array([1.0, 1.1, 0.9]) * (i + 1)) for i in range(2)]
    one = [bench.Point(p.setting, p.found + shift, p.seconds) for p in other]
    assert f"at every speed: {answer} (" in bench.compare("ivf", one, other)
    apart, (low, high) = bench.differences(one, other)
    np.testing.assert_allclose(apart, shift, atol=1e-12)
    assert (low <= apart + 1e-12).all() and (apart <= high + 1e-12).all()


def test_the_interval_is_that_of_paired_queries():
    """One setting each and equal times: compare with the normal approximation of the difference's mean."""
    generator = np.random.default_rng(5)
    a, b = generator.random(2000), generator.random(2000)
    seconds = np.ones(4)
    _, (low, high) = bench.differences([bench.Point("a", a, seconds)], [bench.Point("b", b, seconds)])
    half = 1.96 * (a - b).std() / 2000**0.5
    np.testing.assert_allclose([low[0], high[0]], (a - b).mean() + half * np.array([-1, 1]), atol=0.15 * half)


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
