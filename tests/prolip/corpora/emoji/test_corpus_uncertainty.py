"""The uncertainty figures on Gaussians whose answers are known."""

import math

import numpy as np
import pytest
import torch

from prolip.corpora.emoji import uncertainty
from prolip.corpora.emoji.corpus import LEVELS, Concept, Corpus, Drawing
from prolip.corpora.emoji.result import CorpusResult
from prolip.gaussian import Gaussian


def make_corpus() -> Corpus:
    concepts = (
        Concept("1", "cat", ("pet", "heart"), "mammal", "nature"),
        Concept("2", "dog", ("pet",), "mammal", "nature"),
        Concept("3", "rose", ("heart",), "heart", "nature"),
    )
    return Corpus(concepts, tuple(Drawing(f"k{i}", "s", i % 3, b"") for i in range(5)))


def gaussians(traces, dim=4):
    """Unit means in one direction, isotropic variances of the given traces."""
    traces = torch.tensor(traces, dtype=torch.float64)
    mean = torch.zeros(len(traces), dim, dtype=torch.float64)
    mean[:, 0] = 1
    return Gaussian(mean, (traces / dim).log().unsqueeze(1).expand(-1, dim))


PAPER = {"group": 0.8, "subgroup": 0.4, "keyword": 0.2, "name": 0.1}


def test_hierarchy_pairs_are_those_of_the_concepts_without_repeats():
    corpus = make_corpus()
    table = corpus.caption_table()

    def pairs(inner, outer):
        found = uncertainty.hierarchy_pairs(corpus, table, inner, outer)
        left = [d.key for d in corpus.drawings] if inner == "image" else table.texts
        return {(left[i], table.texts[j]) for i, j in found}

    assert pairs("name", "group") == {("cat", "nature"), ("dog", "nature"), ("rose", "nature")}
    assert pairs("keyword", "subgroup") == {("pet", "mammal"), ("heart", "mammal")}  # not ("heart", "heart")
    assert len(uncertainty.hierarchy_pairs(corpus, table, "subgroup", "group")) == 2
    words = {0: ("pet", "heart"), 1: ("pet",), 2: ("heart",)}  # of concept i % 3
    assert pairs("image", "keyword") == {(f"k{i}", text) for i in range(5) for text in words[i % 3]}


def test_traces_in_the_papers_order_give_full_inclusion_and_positive_correlations(monkeypatch):
    corpus = make_corpus()
    table = corpus.caption_table()
    text = gaussians([PAPER[LEVELS[level]] for level in table.text_level])
    image = gaussians([0.01, 0.02, 0.03, 0.04, 0.05])
    result = CorpusResult(corpus, image, text, np.arange(len(table.texts)), {}, {})
    figures = uncertainty.trace_metrics(result)
    rates = {key: value for key, value in figures.items() if key.startswith("inclusion/") and key.count("/") == 1}
    # "heart" is a subgroup as well as a keyword of the mammal "cat", with one trace: neither includes the other.
    assert rates.pop("inclusion/keyword_in_subgroup") == 0.5
    assert len(rates) == 9 and set(rates.values()) == {1.0}
    assert figures["trace/group"] == pytest.approx(0.8) and figures["trace/name"] == pytest.approx(0.1)
    assert figures["spearman/trace_generality"] > 0.9 and figures["spearman/trace_true_matches"] > 0.5
    assert figures["trace/text_over_image"] > 1
    # "heart" is a keyword too, and counts there with its one trace.
    assert figures["trace/keyword"] == pytest.approx((0.2 + 0.4) / 2)
    monkeypatch.setattr(uncertainty, "PAIRS", 2)
    assert uncertainty.trace_metrics(result) == pytest.approx(figures, nan_ok=True)


def test_expected_numbers_of_matches_against_true_ones_by_hand():
    found = uncertainty.matches_metrics(np.array([2.0, 4.0, 1.0, 9.0, 50.0]), np.array([1, 1, 3, 9, 0]))
    assert found["matches/within_factor_2"] == pytest.approx(2 / 4)  # the last fits nothing
    assert found["matches/median_factor"] == pytest.approx(math.sqrt(2 * 3))
    assert found["matches/expected_over_true"] == pytest.approx((2 * 4 / 3 * 1) ** 0.25)
