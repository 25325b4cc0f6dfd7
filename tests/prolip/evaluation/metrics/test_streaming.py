"""Retrieval from blocks of scores and lists of matches, against the dense metrics and worked examples."""

import dense_ranking
import pytest
import torch
from embedding import similarity_scores

from prolip.evaluation.metrics import ranking as metrics
from prolip.evaluation.metrics import streaming as large
from prolip.evaluation.metrics.streaming import Nearest, PairScores, Relevance
from prolip.gaussian import Gaussian
from prolip.methods import find_score


def tied_problem(seed, queries=23, gallery=17, share=0.15):
    """Scores of few values, and relevance with an unanswerable query and one that everything answers."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(-2, 4, (queries, gallery), generator=g).float()
    relevant = torch.rand(queries, gallery, generator=g) < share
    relevant[3], relevant[4] = False, True
    return scores, relevant


def gaussians(count, seed, dim=6):
    g = torch.Generator().manual_seed(seed)
    mean = torch.nn.functional.normalize(torch.randn(count, dim, generator=g), dim=-1)
    return Gaussian(mean, torch.randn(count, dim, generator=g) - 3)


def assert_same(got, wanted):
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), equal_nan=True, rtol=0, atol=1e-12)


@pytest.mark.parametrize("elements, bits, sort_from", [(1, 16, 1), (40, 32, 3), (10**9, 64, 256)])
def test_ranks_are_those_of_sorting_the_whole_matrix_ties_included(in_blocks, elements, bits, sort_from, monkeypatch):
    in_blocks(elements)
    monkeypatch.setattr(large, "SORT_FROM", sort_from)  # matches from which a query's row is sorted
    for seed in range(3):
        scores, relevant = tied_problem(seed)
        rows = scores.to(getattr(torch, f"float{bits}")).__getitem__
        (got,) = large.rank_sparse(rows, Relevance.from_dense(relevant))
        assert_same(got, dense_ranking.rank(scores, relevant))


def test_several_relevances_share_one_pass(in_blocks):
    scores, relevant = tied_problem(1)
    other = tied_problem(2)[1]
    asked = []

    def rows(some):
        asked.append(some)
        return scores[some]

    in_blocks(5 * 17)
    nearest = Nearest(23)
    got = large.rank_sparse(rows, Relevance.from_dense(relevant), Relevance.from_dense(other), others=[nearest])
    assert nearest.item.tolist() == [row.index(max(row)) for row in scores.tolist()]
    for ranking, truth in zip(got, (relevant, other), strict=True):
        assert_same(ranking, dense_ranking.rank(scores, truth))
    assert [(s.start, s.stop) for s in asked] == [(0, 5), (5, 10), (10, 15), (15, 20), (20, 23)]


def test_matches_that_the_gallery_lacks_count_in_r():
    # R = 3, two of them in the gallery at ranks 1 and 3: AP@R = (1/1 + 2/3) / 3 and R-Precision = 2/3.
    relevance = Relevance.from_ids({7: [10, 12, 99], 8: [98]}, query_ids=[7, 8, 9], gallery_ids=[10, 11, 12])
    assert relevance.absent.tolist() == [1, 1, 0]
    scores = torch.tensor([[0.9, 0.5, 0.1], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    (got,) = large.rank_sparse(scores.__getitem__, relevance)
    assert got.matches.tolist() == [3, 0, 0] and got.first.tolist() == [1, 0, 0]
    assert got.ap_at_r[0].item() == pytest.approx((1 + 2 / 3) / 3)
    assert got.r_precision[0].item() == pytest.approx(2 / 3)
    assert metrics.summarise(got)["queries_without_match"] == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("similarity", ["csd", "mean"])
def test_what_is_computed_once_for_all_blocks_changes_no_score(similarity, dtype):
    image, text = (Gaussian(2 * z.mean, z.log_var).to(dtype) for z in (gaussians(70, 0), gaussians(90, 1)))
    scores = PairScores.from_gaussians(image, text, find_score(similarity)())
    rows, whole = slice(3, 70), similarity_scores(image, text, similarity)
    with torch.autocast("cpu", torch.bfloat16):
        got = scores.image_rows(rows)
    torch.testing.assert_close(got, whole[rows], rtol=0, atol=1e-14 if dtype == torch.float64 else 1e-6)
    assert got.dtype == whole.dtype


@pytest.mark.parametrize("similarity", ["csd", "mean", "log_inclusion"])
def test_scores_of_gaussians_are_one_matrix_in_both_directions(similarity):
    image, text = gaussians(7, 0), gaussians(9, 1)
    whole = similarity_scores(image, text, similarity)
    scores = PairScores.from_gaussians(image, text, find_score(similarity)())
    torch.testing.assert_close(scores.image_rows(slice(2, 5)), whole[2:5])
    torch.testing.assert_close(scores.text_rows(slice(2, 5)), whole.mT[2:5])
    some, others = torch.tensor([6, 0, 3]), torch.tensor([8, 1])
    part = scores.subset(some, others)
    assert (part.images, part.texts) == (3, 2)
    torch.testing.assert_close(part.image_rows(slice(1, 3)), whole[[0, 3]][:, others])
    torch.testing.assert_close(part.text_rows(slice(0, 1)), whole[some][:, [8]].mT)


def test_relevance_is_the_same_from_pairs_ids_and_a_matrix():
    want = Relevance.from_pairs([0, 0, 0, 2], [2, 0, 2, 1], 3, 3)
    assert list(zip(want.query.tolist(), want.item.tolist())) == [(0, 0), (0, 2), (2, 1)]
    dense = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0]])
    ids = Relevance.from_ids({50: [12, 10], 70: [11]}, [50, 60, 70], [10, 11, 12])
    pairs = Relevance.from_pairs(torch.tensor([2, 0, 0, 0]), torch.tensor([1, 2, 0, 2]), 3, 3)
    for got in (Relevance.from_dense(dense), ids, pairs, want.transposed().transposed()):
        for a, b in zip((got.query, got.item, got.absent), (want.query, want.item, want.absent)):
            assert a.tolist() == b.tolist()
    back = want.transposed()
    assert list(zip(back.query.tolist(), back.item.tolist())) == [(0, 0), (1, 2), (2, 0)]
    row, item = want.within(slice(1, 3))
    assert row.tolist() == [1] and item.tolist() == [1]


def test_wrong_inputs_are_refused_by_name(in_blocks):
    scores, relevant = tied_problem(0)
    relevance = Relevance.from_dense(relevant)
    with pytest.raises(ValueError, match="names item 17, but there are 17"):
        Relevance.from_pairs([0, 0], [3, 17], 23, 17)
    with pytest.raises(ValueError, match="names query -1, but there are 23"):
        Relevance.from_pairs([-1], [0], 23, 17)
    with pytest.raises(ValueError, match="one score matrix together"):
        large.rank_sparse(scores.__getitem__, relevance, relevance.transposed())
    with pytest.raises(ValueError, match=r"shape \(23, 16\), expected \(23, 17\)"):
        large.rank_sparse(lambda rows: scores[rows, :16], relevance)
    with pytest.raises(ValueError, match="relevance of 17 images and 23 texts for scores of 23 and 17"):
        large.retrieval(PairScores.from_matrix(scores), relevance.transposed())
    scores[20, 2] = float("nan")
    in_blocks(40)
    with pytest.raises(ValueError, match="query 20 and item 2 is NaN"):
        large.rank_sparse(scores.__getitem__, relevance)


def test_a_shortlist_takes_the_first_of_equal_items():
    """40 alike by the cheap score, all of them better by the other one when it looks."""
    coarse = torch.zeros(3, 40)

    def block(rows, columns):
        return coarse[rows][:, columns]

    scores = PairScores(3, 40, block, 3, block, lambda i, j: (1 + j).double())
    for rows in (slice(0, 3), slice(1, 2)):
        ranked = scores.image_rows(rows).argsort(dim=1, descending=True, stable=True)
        assert ranked[:, :5].tolist() == [[2, 1, 0, 3, 4]] * len(ranked)
    coarse[1, 7] = torch.nan
    with pytest.raises(ValueError, match="query 1 .* is NaN"):
        list(scores.blocks())
