"""Classification metrics against scikit-learn, clip_benchmark's average precision and worked examples."""
import math

import numpy as np
import pytest
import torch
from clip_benchmark.metrics.zeroshot_classification import average_precision_per_class
from sklearn import metrics as sk

from prolip.evaluation.metrics import classification as cl


def problem(seed=0, samples=80, classes=6, unseen=1):
    """Scores and labels; the last `unseen` classes have no sample."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes - unseen, (samples,), generator=g)
    scores = torch.randn(samples, classes, generator=g)
    return scores + torch.nn.functional.one_hot(labels, classes), labels


@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_k_is_sklearns(k):
    scores, labels = problem()
    want = sk.top_k_accuracy_score(labels, scores, k=k, labels=range(6))
    assert cl.top_k_accuracy(scores, labels, (k,))[f"top{k}"] == pytest.approx(want)


def test_k_beyond_the_classes_is_left_out():
    scores, labels = problem(classes=3)
    assert list(cl.top_k_accuracy(scores, labels, (1, 3, 5))) == ["top1", "top3"]


def test_ties_go_to_the_lower_class_in_ranks_and_predictions_alike():
    g = torch.Generator().manual_seed(1)
    scores, labels = torch.randint(0, 3, (50, 5), generator=g).float(), torch.randint(0, 5, (50,), generator=g)
    order = [sorted(range(5), key=lambda c: (-row[c], c)) for row in scores.tolist()]
    assert cl.label_ranks(scores, labels).tolist() == [o.index(y) + 1 for o, y in zip(order, labels.tolist())]
    assert cl.predictions(scores).tolist() == [o[0] for o in order]


def test_per_class_figures_are_over_classes_with_a_sample():
    scores, labels = problem()
    predicted = cl.predictions(scores)
    assert 5 in predicted and 5 not in labels
    recalls = [float((predicted[labels == c] == c).double().mean()) for c in range(5)]
    assert cl.mean_per_class_recall(predicted, labels) == pytest.approx(np.mean(recalls))
    f1 = sk.f1_score(labels, predicted, average=None, labels=range(6))
    assert cl.macro_f1(predicted, labels) == pytest.approx(f1[:5].mean())
    seen = predicted != 5
    assert cl.mean_per_class_recall(predicted[seen], labels[seen]) == pytest.approx(
        sk.balanced_accuracy_score(labels[seen], predicted[seen])
    )


def test_macro_f1_of_a_worked_example():
    # Truth 0 0 1 1 1, answers 0 1 1 1 2. Class 0: precision 1, recall 1/2, F1 2/3. Class 1: 2/3 and 2/3, F1 2/3.
    assert cl.macro_f1(np.array([0, 1, 1, 1, 2]), np.array([0, 0, 1, 1, 1])) == pytest.approx(2 / 3)


def test_confusion_has_the_truth_in_rows_and_every_class():
    got = cl.confusion_matrix(torch.tensor([0, 2, 2, 1]), torch.tensor([0, 0, 2, 2]), 4)
    assert got.tolist() == [[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]


def test_the_summary_holds_them_all():
    scores, labels = problem()
    got = cl.classification(scores, labels, (1, 3))
    assert got["top1"] == pytest.approx(sk.accuracy_score(labels, cl.predictions(scores)))
    assert set(got) == {"top1", "top3", "mean_per_class_recall", "macro_f1", "classes"} and got["classes"] == 6


REGIONS = ("Asia", "Europe", "Africa", "Americas", "Oceania", "Other")


def test_the_worst_region_with_and_without_a_tiny_one():
    hits = np.array([1, 1, 0, 1, 1, 1, 0, 0, 1, 0], dtype=float)
    groups = np.array([0, 0, 0, 1, 1, 1, 3, 3, 3, 5])
    got = cl.group_metrics(lambda rows: hits[rows].mean(), groups, REGIONS, excluded=("Other",))
    assert got["group/Asia"] == pytest.approx(2 / 3) and got["group/Europe"] == 1 and got["size/Other"] == 1
    assert got["worst_group"] == 0.0 and got["worst_group_kept"] == pytest.approx(1 / 3)
    assert "group/Africa" not in got  # no sample, no figure
    by_size = cl.group_metrics(lambda rows: hits[rows].mean(), torch.from_numpy(groups), REGIONS, minimum=2)
    assert by_size["worst_group_kept"] == got["worst_group_kept"]
    plain = cl.group_metrics(lambda rows: hits[rows].mean(), groups)
    assert plain["worst_group_kept"] == plain["worst_group"] == 0 and plain["group/5"] == 0


def test_top_k_by_group_is_sklearns_within_each_group():
    scores, labels = problem(2)
    groups = np.arange(len(labels)) % 3
    got = cl.group_accuracy(scores, labels, groups, k=2, names={0: "low", 1: "middle", 2: "high"})
    for number, name in enumerate(("low", "middle", "high")):
        rows = groups == number
        want = sk.top_k_accuracy_score(labels[rows], scores[rows], k=2, labels=range(6))
        assert got[f"group/{name}"] == pytest.approx(want)
    assert got["worst_group"] == min(got[f"group/{name}"] for name in ("low", "middle", "high"))


def test_any_metric_goes_by_group():
    scores, labels = problem(3)
    predicted, groups = cl.predictions(scores), np.arange(len(labels)) % 2
    got = cl.group_metrics(lambda rows: cl.macro_f1(predicted[rows], labels[rows]), groups)
    assert got["group/1"] == pytest.approx(cl.macro_f1(predicted[1::2], labels[1::2]))


def test_multilabel_is_clip_benchmarks_average_precision():
    g = torch.Generator().manual_seed(4)
    scores, targets = torch.randn(60, 5, generator=g), torch.rand(60, 5, generator=g) < 0.3
    targets[:, 3] = False
    theirs = average_precision_per_class(scores, targets)
    np.testing.assert_allclose(np.nan_to_num(cl.average_precision(scores, targets)), theirs, atol=1e-6)
    got = cl.multilabel(scores, targets)
    assert got["mAP_all_classes"] == pytest.approx(theirs.mean().item(), abs=1e-6)
    assert got["mAP"] == pytest.approx(theirs[[0, 1, 2, 4]].mean().item(), abs=1e-6)
    assert got["classes_without_sample"] == 1 and math.isnan(cl.average_precision(scores, targets)[3])


def test_infinite_and_half_precision_scores_have_a_precision():
    scores, targets = torch.tensor([[1e30], [5.0], [-1e30], [-2.0]]), torch.tensor([[1], [0], [1], [0]])
    want = cl.multilabel(scores, targets)["mAP"]
    assert want == pytest.approx((1 + 2 / 4) / 2)
    assert cl.multilabel(scores.where(scores.abs() < 1e30, scores * torch.inf), targets)["mAP"] == want
    half = torch.randn(40, 3, generator=torch.Generator().manual_seed(5)).bfloat16().requires_grad_()
    labels = torch.eye(3)[torch.arange(40) % 3]
    assert cl.multilabel(half, labels) == cl.multilabel(half.double(), labels)


def test_average_precision_of_a_worked_example():
    # Ranked: match, no, match: AP = (1/1 + 2/3) / 2.
    got = cl.multilabel(np.array([[0.9], [0.5], [0.1]]), np.array([[1], [0], [1]]))
    assert got["mAP"] == pytest.approx(5 / 6)


def test_jaccard_is_sklearns_over_instances():
    rng = np.random.default_rng(0)
    chosen, true = rng.random((20, 8)) < 0.4, rng.random((20, 8)) < 0.4
    true[:, 0] = True
    sets = [[set(np.flatnonzero(row)) for row in table] for table in (chosen, true)]
    want = sk.jaccard_score(true, chosen, average="samples")
    assert cl.jaccard(*sets)["jaccard"] == pytest.approx(want)
    assert cl.jaccard([{1, 2}, set(), {3}], [{1, 2}, set(), {4}]) == {"jaccard": 2 / 3, "exact": 2 / 3}


def test_the_best_candidates_are_the_first_of_equals():
    assert cl.best(torch.tensor([0.1, 0.5, 0.5, 0.9, 0.5]), 3) == {3, 1, 2}
    assert cl.best([1.0, 2.0], 5) == {0, 1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cl.label_ranks(torch.zeros(2, 3), torch.zeros(3)), "give \\(samples, classes\\)"),
        (lambda: cl.label_ranks(torch.zeros(2, 3), torch.tensor([0, 3])), "from 0 to 3, but there are 3 classes"),
        (lambda: cl.label_ranks(torch.full((1, 2), torch.nan), torch.tensor([0])), "sample 0 has a NaN"),
        (lambda: cl.group_metrics(len, [0, 6], REGIONS), "group 6 has no name"),
        (lambda: cl.group_metrics(len, [0, -1], REGIONS), "group -1 has no name"),
        (lambda: cl.group_metrics(len, [0, 7], {0: "a"}), "group 7 has no name: names are given for 0"),
        (lambda: cl.group_metrics(len, [0], REGIONS, excluded=("other",)), "excluded groups \\['other'\\]"),
        (lambda: cl.group_metrics(len, [0], REGIONS, excluded=("Asia",)), "no group is left"),
        (lambda: cl.average_precision(np.zeros((2, 3)), np.zeros((2, 2))), "multi-hot"),
        (lambda: cl.average_precision(np.full((2, 1), np.nan), np.ones((2, 1))), "NaN scores"),
        (lambda: cl.jaccard([{1}], []), "1 answers for 0 instances"),
    ],
)
def test_wrong_inputs_are_refused_with_what_is_wanted(call, message):
    with pytest.raises(ValueError, match=message):
        call()
