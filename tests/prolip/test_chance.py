import pytest
from scipy.stats import binomtest

from prolip.measures.chance import is_at_chance


@pytest.mark.parametrize("pairs, candidates", [(256, 256), (64, 64), (48, 16), (512, 16), (7, 7), (4, 1)])
def test_at_chance_is_where_the_clopper_pearson_interval_reaches_down_to_chance(pairs, candidates):
    for hits in range(pairs + 1):
        low = binomtest(hits, pairs).proportion_ci(0.95, method="exact").low
        assert is_at_chance(hits, pairs, candidates) == (low <= 1 / candidates), hits


def test_three_hits_of_256_pairs_are_chance_and_four_are_not():
    assert is_at_chance(3, 256, 256)
    assert not is_at_chance(4, 256, 256)


def test_a_model_that_is_worse_than_chance_is_at_chance():
    assert is_at_chance(0, 10_000, 256)


@pytest.mark.parametrize("counts", [(-1, 8, 8), (9, 8, 8), (0, 0, 8), (1, 8, 0)])
def test_counts_that_do_not_fit_are_refused(counts):
    with pytest.raises(ValueError, match="give 0 <= hits <= pairs"):
        is_at_chance(*counts)
