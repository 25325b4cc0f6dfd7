"""The benchmark of search runs, prints every kind both ways, and draws them; what it compares."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_search", ROOT / "scripts/bench/use/search.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("shift", "answer"), [(0.02, "yes"), (0.0, "yes"), (-0.02, "no")])
def test_the_comparison_answers_by_its_interval(bench, shift, answer):
    generator = np.random.default_rng(3)
    common = generator.random((2, 500)) * 0.2
    other = [bench.Point(str(i), common[i] + 0.3 * (i + 1), np.array([1.0, 1.1, 0.9]) * (i + 1)) for i in range(2)]
    one = [bench.Point(p.setting, p.found + shift, p.seconds) for p in other]
    assert f"at every speed: {answer} (" in bench.compare("ivf", one, other)
    apart, (low, high) = bench.differences(one, other)
    np.testing.assert_allclose(apart, shift, atol=1e-12)
    assert (low <= apart + 1e-12).all() and (apart <= high + 1e-12).all()


def test_the_interval_is_that_of_paired_queries(bench):
    """Of one setting each and equal times: the difference's mean, by the normal approximation."""
    generator = np.random.default_rng(5)
    a, b = generator.random(2000), generator.random(2000)
    seconds = np.ones(4)
    _, (low, high) = bench.differences([bench.Point("a", a, seconds)], [bench.Point("b", b, seconds)])
    half = 1.96 * (a - b).std() / 2000**0.5
    np.testing.assert_allclose([low[0], high[0]], (a - b).mean() + half * np.array([-1, 1]), atol=0.15 * half)
