import pytest
import torch
from scipy.stats import binomtest

from prolip.measures.chance import OwnFirst, is_at_chance, warn_once


@pytest.mark.parametrize("pairs, candidates", [(256, 256), (64, 64), (48, 16), (512, 16), (7, 7), (4, 1)])
def test_at_chance_is_where_the_clopper_pearson_interval_reaches_down_to_chance(pairs, candidates):
    for hits in range(pairs + 1):
        low = binomtest(hits, pairs).proportion_ci(0.95, method="exact").low
        assert is_at_chance(hits, pairs, candidates) == (low <= 1 / candidates), hits


@pytest.mark.parametrize("counts", [(-1, 8, 8), (9, 8, 8), (0, 0, 8), (1, 8, 0)])
def test_counts_that_do_not_fit_are_refused(counts):
    with pytest.raises(ValueError, match="use 0 <= hits <= pairs"):
        is_at_chance(*counts)


def test_own_first_counts_the_rows_whose_own_candidate_scores_highest():
    scores = torch.tensor([[3.0, 1, 1], [0, 2, 0], [5, 0, 1], [0, 0, 1]])
    found = OwnFirst.of(scores, torch.tensor([0, 1, 2, 2]))
    assert found == (3, 4, 3) and str(found).startswith("the model finds an image's own caption first in 75.0%")


def test_equal_scores_are_no_knowledge_and_one_candidate_is_no_test():
    assert OwnFirst.of(torch.zeros(64, 64), torch.arange(64)).at_chance
    assert not OwnFirst.of(torch.zeros(64, 1), torch.zeros(64, dtype=torch.int64)).at_chance


def test_a_warning_is_given_once(caplog):
    for _ in range(3):
        warn_once("of this test alone")
    assert caplog.messages == ["of this test alone"]


@pytest.mark.parametrize("saved", [None, "x", [1], [1, 2, None], [3, 2, 5], [-1, 2, 5], [0, 0, 5], [True, 2, 5], {}])
def test_counts_in_a_file_that_are_none_say_nothing(saved):
    assert OwnFirst.read([0, 60, 60]).at_chance
    assert not OwnFirst.read(saved).at_chance
