"""Retrieval metrics against hand-worked examples and a plain-Python oracle."""

import math
import random
from itertools import pairwise

import dense_ranking
import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, top_k_accuracy_score

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


def test_a_hand_worked_ranking_with_several_matches():
    # Ranked: item 2 (match), 0 (no), 3 (match), 1 (match); R = 3: AP@R = (1 + 2/3) / 3, R-Precision = 2/3.
    scores = torch.tensor([[0.5, -1.0, 0.9, 0.1]])
    relevant = torch.tensor([[False, True, True, True]])
    got = dense_ranking.rank(scores, relevant)
    assert got.first.tolist() == [1] and got.matches.tolist() == [3]
    assert got.ap_at_r.item() == pytest.approx((1 + 2 / 3) / 3)
    assert got.r_precision.item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("seed", range(4))
def test_rankings_equal_a_loop_over_queries_ties_included(seed):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 6, (23, 17), generator=g).float()  # many ties
    relevant = torch.rand(23, 17, generator=g) < 0.15
    relevant[3], relevant[4] = False, True
    got = dense_ranking.rank(scores, relevant)
    for ours, theirs in zip(got, oracle(scores, relevant)):
        torch.testing.assert_close(ours.double(), theirs, equal_nan=True, rtol=0, atol=1e-12)


def test_ap_at_r_is_sklearns_average_precision_over_the_matches_within_r():
    g = torch.Generator().manual_seed(1)
    scores, relevant = torch.randn(30, 12, generator=g), torch.rand(30, 12, generator=g) < 0.3
    relevant[:, 0] = True
    got = dense_ranking.rank(scores, relevant)
    for i in range(30):
        # Average precision of the matches found within the first R places, scaled by the share that was found.
        top = scores[i].argsort(descending=True)[: int(relevant[i].sum())]
        cut = torch.zeros(12, dtype=torch.bool)
        cut[top] = relevant[i, top]
        found = int(cut.sum())
        expected = average_precision_score(cut, scores[i]) * found / int(relevant[i].sum()) if found else 0.0
        assert got.ap_at_r[i].item() == pytest.approx(expected)


def test_recall_at_k_is_sklearns_top_k_accuracy_for_one_match_per_query():
    g = torch.Generator().manual_seed(2)
    scores = torch.randn(50, 9, generator=g)
    labels = torch.randint(0, 9, (50,), generator=g)
    relevant = torch.nn.functional.one_hot(labels, 9).bool()
    got = metrics.summarise(dense_ranking.rank(scores, relevant), ks=(1, 3))
    for k in (1, 3):
        assert got[f"R@{k}"] == pytest.approx(top_k_accuracy_score(labels, scores, k=k, labels=range(9)))
    assert got["mAP@R"] == got["R-Precision"] == got["R@1"]


def test_k_beyond_the_gallery_and_unmatched_queries_are_harmless():
    scores = torch.tensor([[0.1, 0.2], [0.3, 0.1], [1.0, 0.0]])
    relevant = torch.tensor([[True, False], [True, False], [False, False]])
    got = metrics.summarise(dense_ranking.rank(scores, relevant))
    assert got["R@1"] == 0.5 and got["R@5"] == got["R@10"] == 1.0
    assert got["median_rank"] == 1.5
    assert got["queries"] == 2 and got["queries_without_match"] == 1


def test_no_answerable_query_gives_nan_not_a_number_that_looks_like_a_result():
    got = metrics.summarise(dense_ranking.rank(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)))
    assert got["queries"] == 0 and math.isnan(got["R@1"]) and math.isnan(got["median_rank"])


def test_equal_scores_are_ranked_by_index():
    got = dense_ranking.rank(torch.zeros(4, 4), torch.eye(4, dtype=torch.bool))
    assert got.first.tolist() == [1, 2, 3, 4]


def test_both_directions_and_rsum():
    scores = torch.tensor([[0.9, 0.8, 0.0], [0.1, 0.7, 0.2]])
    relevant = torch.tensor([[False, True, False], [True, False, True]])
    got = dense_ranking.retrieval(scores, relevant, ks=(1, 2))
    assert got["i2t/R@1"] == 0.0 and got["i2t/R@2"] == 1.0
    # Text 1 prefers image 0 and is true of it; text 0 prefers image 0 and is not; text 2 prefers image 1 and is.
    assert got["t2i/R@1"] == pytest.approx(2 / 3)
    assert "rsum" not in got
    scores, relevant = torch.rand(11, 12), torch.rand(11, 12) < 0.2
    got = dense_ranking.retrieval(scores, relevant)
    assert got["rsum"] == pytest.approx(100 * sum(got[f"{way}/R@{k}"] for way in ("i2t", "t2i") for k in (1, 5, 10)))


@pytest.mark.parametrize("seed", range(40))
def test_recalls_beyond_a_gallery_are_left_out_in_both_forms(seed):
    """Of a gallery of four any model has R@5 = R@10 = 1, and rsum sums such ones up."""
    generator = random.Random(seed)
    images, texts = generator.randint(1, 12), generator.randint(1, 12)
    scores, relevant = torch.rand(images, texts), torch.rand(images, texts) < 0.5
    ks = tuple(sorted(generator.sample(range(1, 15), 3)))
    got = dense_ranking.retrieval(scores, relevant, ks)
    for way, gallery in (("i2t", texts), ("t2i", images)):
        assert {name for name in got if name.startswith(f"{way}/R@")} == {f"{way}/R@{k}" for k in ks if k <= gallery}
    assert ("rsum" in got) == (min(images, texts) >= 10)
    large = large_retrieval(PairScores.from_matrix(scores), Relevance.from_dense(relevant), ks)
    assert large == pytest.approx(got, nan_ok=True)
    assert metrics.retrieval_names(images, texts) == list(dense_ranking.retrieval(scores, relevant))


def test_recall_never_falls_with_k_and_perfect_scores_give_one():
    g = torch.Generator().manual_seed(3)
    relevant = torch.rand(20, 30, generator=g) < 0.2
    relevant[:, 0] = True
    drawn = dense_ranking.rank(torch.randn(20, 30, generator=g), relevant)
    curve = list(metrics.summarise(drawn, ks=range(1, 31)).values())
    assert all(a <= b for a, b in pairwise(curve[:30])) and curve[29] == 1.0
    best = metrics.summarise(dense_ranking.rank(relevant.float(), relevant))
    assert best["R@1"] == best["mAP@R"] == best["R-Precision"] == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_tensors_of_any_dtype_with_a_graph_or_without_are_arrays(dtype):
    values = torch.tensor([0.5, -2.0, 3.0], dtype=dtype, requires_grad=True)
    assert as_array(values, np.float64).tolist() == as_array([0.5, -2, 3]).tolist() == [0.5, -2, 3]
    assert as_array(values, np.float64).dtype == np.float64


def test_chance_is_what_random_orders_give():
    g = torch.Generator().manual_seed(5)
    relevant = torch.rand(400, 12, generator=g) < torch.rand(400, 1, generator=g) * 0.5
    ranking = dense_ranking.rank(torch.rand(20000, 12, generator=g), relevant.repeat(50, 1))
    for k in (1, 3, 50):
        expected = metrics.chance_recall(relevant.sum(1), 12, k)
        assert metrics.summarise(ranking, ks=(k,))[f"R@{k}"] == pytest.approx(expected, abs=0.01)
    assert metrics.chance_recall(torch.tensor([1, 0]), 200, 1) == pytest.approx(1 / 200)


def test_bad_matrices_are_refused():
    with pytest.raises(ValueError, match="one \\(queries, gallery\\) shape"):
        dense_ranking.rank(torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.bool))
    scores = torch.zeros(2, 3)
    scores[1, 2] = NAN
    with pytest.raises(ValueError, match="query 1 and item 2 is NaN"):
        dense_ranking.rank(scores, torch.zeros(2, 3, dtype=torch.bool))


def test_plausible_matches_are_labels_that_differ_in_at_most_zeta_places(monkeypatch):
    monkeypatch.setattr(metrics, "QUERIES", 7)
    g = torch.Generator().manual_seed(6)
    a, b = (torch.rand(n, 6, generator=g) < 0.35 for n in (40, 30))
    a[3], b[5] = False, False  # no label: left out on both sides
    scores = torch.randint(0, 9, (40, 30), generator=g).float()
    asked, kept = a.any(1), b.any(1)
    got = metrics.plausible_match(scores.__getitem__, a, b)
    for zeta in (0, 1, 2):
        relevant = torch.tensor([[sum(x != y for x, y in zip(p, q)) <= zeta for q in b.tolist()] for p in a.tolist()])
        values = oracle(scores[asked][:, kept], relevant[asked][:, kept])[3]
        assert got[f"PMRP@{zeta}"] == pytest.approx(values.nanmean().item())
    assert got["PMRP"] == pytest.approx(sum(got[f"PMRP@{zeta}"] for zeta in (0, 1, 2)) / 3)
    assert got["queries"] == asked.sum() < 40


def test_r_precision_of_classes_is_plausible_match_at_zeta_nought():
    # CUB captions: one class each, a pair matches within a class (PCME 4.1.2).
    g = torch.Generator().manual_seed(7)
    classes, others = torch.arange(24) % 4, torch.arange(20) % 4
    scores = torch.randn(24, 20, generator=g)
    one_hot = torch.nn.functional.one_hot
    got = metrics.plausible_match(scores.__getitem__, one_hot(classes), one_hot(others))
    want = metrics.summarise(dense_ranking.rank(scores, classes.unsqueeze(1) == others))["R-Precision"]
    assert got["PMRP@0"] == pytest.approx(want)


def test_labels_of_different_widths_are_refused():
    with pytest.raises(ValueError, match="over one set of classes"):
        metrics.plausible_match(lambda rows: torch.zeros(2, 2), torch.ones(2, 3), torch.ones(2, 4))
