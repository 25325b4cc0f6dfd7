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


@pytest.mark.parametrize("k", [1, 5])
def test_ranks_give_sklearns_top_k(k):
    scores, labels = problem()
    want = sk.top_k_accuracy_score(labels, scores, k=k, labels=range(6))
    assert float((cl.label_ranks(scores, labels) <= k).double().mean()) == pytest.approx(want)


def test_ties_go_to_the_lower_class():
    g = torch.Generator().manual_seed(1)
    scores, labels = torch.randint(0, 3, (50, 5), generator=g).float(), torch.randint(0, 5, (50,), generator=g)
    order = [sorted(range(5), key=lambda c: (-row[c], c)) for row in scores.tolist()]
    assert cl.label_ranks(scores, labels).tolist() == [o.index(y) + 1 for o, y in zip(order, labels.tolist())]


def test_the_summary_is_over_classes_with_a_sample():
    scores, labels = problem()
    predicted, got = scores.argmax(1), cl.classification(scores, labels)
    assert 5 in predicted and 5 not in labels
    recalls = [float((predicted[labels == c] == c).double().mean()) for c in range(5)]
    f1 = sk.f1_score(labels.numpy(), predicted.numpy(), average=None, labels=range(6))
    assert got["mean_per_class_recall"] == pytest.approx(np.mean(recalls))
    assert got["macro_f1"] == cl.macro_f1(predicted, labels) == pytest.approx(f1[:5].mean())
    assert got["top1"] == pytest.approx(sk.accuracy_score(labels, predicted)) and got["classes"] == 6
    assert "top5" in got and "top5" not in cl.classification(scores[:, :4], labels % 4)  # k beyond the classes


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cl.label_ranks(torch.zeros(2, 3), torch.zeros(3)), "give \\(samples, classes\\)"),
        (lambda: cl.label_ranks(torch.zeros(2, 3), torch.tensor([0, 3])), "from 0 to 3, but there are 3 classes"),
        (lambda: cl.label_ranks(torch.full((1, 2), torch.nan), torch.tensor([0])), "sample 0 has a NaN"),
        (lambda: cl.average_precision(np.zeros((2, 3)), np.zeros((2, 2))), "multi-hot"),
        (lambda: cl.average_precision(np.full((2, 1), np.nan), np.ones((2, 1))), "NaN scores"),
    ],
)
def test_wrong_inputs_are_refused_with_what_is_wanted(call, message):
    with pytest.raises(ValueError, match=message):
        call()
