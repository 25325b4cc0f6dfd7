"""Retrieval metrics against hand-worked examples and a plain-Python oracle."""

import math
import random

import dense_ranking
import numpy as np
import pytest
import torch

from prolip.evaluation.metrics import as_array
from prolip.evaluation.metrics import ranking as metrics
from prolip.evaluation.metrics.streaming import PairScores, Relevance
from prolip.evaluation.metrics.streaming import retrieval as large_retrieval

NAN = float("nan")


def oracle(scores, relevant):
    """Every query by loops: first rank, R, AP@R, R-Precision."""
    rows = []
    for row_scores, row_relevant in zip(scores.tolist(), relevant.tolist()):
        order = sorted(range(len(row_scores)), key=lambda j: (-row_scores[j], j))
        hits = [row_relevant[j] for j in order]
        r = sum(hits)
        if r == 0:
            rows.append((0, 0, NAN, NAN))
            continue
        precision = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits))]
        ap = sum(precision[i] for i in range(r) if hits[i]) / r
        rows.append((hits.index(True) + 1, r, ap, sum(hits[:r]) / r))
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*rows)]


@pytest.mark.parametrize("seed", range(2))
def test_rankings_equal_a_loop_over_queries_ties_included(seed):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 6, (23, 17), generator=g).float()  # many ties
    relevant = torch.rand(23, 17, generator=g) < 0.15
    relevant[3], relevant[4] = False, True
    got = dense_ranking.rank(scores, relevant)
    for ours, theirs in zip(got, oracle(scores, relevant)):
        torch.testing.assert_close(ours.double(), theirs, equal_nan=True, rtol=0, atol=1e-12)


def test_k_beyond_the_gallery_and_unmatched_queries_are_harmless():
    scores = torch.tensor([[0.1, 0.2], [0.3, 0.1], [1.0, 0.0]])
    relevant = torch.tensor([[True, False], [True, False], [False, False]])
    got = metrics.summarise(dense_ranking.rank(scores, relevant))
    assert got["R@1"] == 0.5 and got["R@5"] == got["R@10"] == 1.0
    assert got["median_rank"] == 1.5
    assert got["queries"] == 2 and got["queries_without_match"] == 1
    none = metrics.summarise(dense_ranking.rank(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)))
    assert none["queries"] == 0 and math.isnan(none["R@1"]) and math.isnan(none["median_rank"])
    half = torch.tensor([0.5, -2.0, 3.0], dtype=torch.bfloat16, requires_grad=True)
    assert as_array(half, np.float64).tolist() == [0.5, -2, 3]


@pytest.mark.parametrize("seed", range(6))
def test_recalls_beyond_a_gallery_are_left_out_in_both_forms(seed):
    """Any model has R@5 = R@10 = 1 on a gallery of four, and rsum would add these ones."""
    generator = random.Random(seed)
    images, texts = (11, 12) if not seed else (generator.randint(1, 12), generator.randint(1, 12))
    scores, relevant = torch.rand(images, texts), torch.rand(images, texts) < 0.5
    ks = tuple(sorted(generator.sample(range(1, 15), 3)))
    got = dense_ranking.retrieval(scores, relevant, ks)
    for way, gallery in (("i2t", texts), ("t2i", images)):
        assert {name for name in got if name.startswith(f"{way}/R@")} == {f"{way}/R@{k}" for k in ks if k <= gallery}
    whole = dense_ranking.retrieval(scores, relevant)
    recalls = [whole.get(f"{way}/R@{k}", 0) for way in ("i2t", "t2i") for k in (1, 5, 10)]
    assert whole.get("rsum") == (pytest.approx(100 * sum(recalls)) if min(images, texts) >= 10 else None)
    large = large_retrieval(PairScores.from_matrix(scores), Relevance.from_dense(relevant), ks)
    assert large == pytest.approx(got, nan_ok=True)
    assert metrics.retrieval_names(images, texts) == list(dense_ranking.retrieval(scores, relevant))


def test_chance_is_what_random_orders_give():
    g = torch.Generator().manual_seed(5)
    relevant = torch.rand(400, 12, generator=g) < torch.rand(400, 1, generator=g) * 0.5
    ranking = dense_ranking.rank(torch.rand(20000, 12, generator=g), relevant.repeat(50, 1))
    for k in (1, 3, 50):
        expected = metrics.chance_recall(relevant.sum(1), 12, k)
        assert metrics.summarise(ranking, ks=(k,))[f"R@{k}"] == pytest.approx(expected, abs=0.01)
    assert metrics.chance_recall(torch.tensor([1, 0]), 200, 1) == pytest.approx(1 / 200)


def test_plausible_matches_are_labels_that_differ_in_at_most_zeta_places(monkeypatch):
    monkeypatch.setattr(metrics, "QUERIES", 7)
    g = torch.Generator().manual_seed(6)
    a, b = (torch.rand(n, 6, generator=g) < 0.35 for n in (40, 30))
    a[3], b[5] = False, False  # no label: left out on both sides
    scores = torch.randint(0, 9, (40, 30), generator=g).float()
    asked, kept = a.any(1), b.any(1)
    got = metrics.plausible_match(scores.__getitem__, a, b)
    with pytest.raises(ValueError, match="over one set of classes"):
        metrics.plausible_match(scores.__getitem__, a, b[:, :5])
    for zeta in (0, 1, 2):
        relevant = torch.tensor([[sum(x != y for x, y in zip(p, q)) <= zeta for q in b.tolist()] for p in a.tolist()])
        values = oracle(scores[asked][:, kept], relevant[asked][:, kept])[3]
        assert got[f"PMRP@{zeta}"] == pytest.approx(values.nanmean().item())
    assert got["PMRP"] == pytest.approx(sum(got[f"PMRP@{zeta}"] for zeta in (0, 1, 2)) / 3)
    assert got["queries"] == asked.sum() < 40
