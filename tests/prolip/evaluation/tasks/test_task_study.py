"""The study of a task's features, kind by kind, against a few lines of NumPy and scikit-learn."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from prolip.embedder import ModelCard
from prolip.evaluation.datasets.base import Dataset
from prolip.evaluation.embed import Features
from prolip.evaluation.evaluate import evaluate_all, evaluate_dataset, study_features
from prolip.evaluation.metrics.calibration import reliability
from prolip.evaluation.metrics.selective import recall_auroc
from prolip.evaluation.table import format_uncertainty
from prolip.gaussian import Gaussian
from prolip.measures import pairwise_csd_similarity

N, C, D = 30, 6, 5


def gaussian(rows: int, seed: int) -> Gaussian:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.nn.functional.normalize(torch.randn(rows, D, generator=generator), dim=-1)
    return Gaussian(mean, torch.randn(rows, D, generator=generator) - 3)


def features_of(kind: str, labels: torch.Tensor | None = None, probabilistic: bool = True, **more) -> Features:
    dataset = Dataset("made", kind, lambda share: iter(()), "0", "memory", tuple("abcdef"), ("{c}",))
    card = ModelCard("m", "", probabilistic=probabilistic, logit_scale=10.0, logit_bias=-3.0)
    keys = tuple(map(str, range(N)))
    texts = 2 * N if labels is None else C
    return Features(dataset, card, keys, gaussian(N, 0), labels, text=gaussian(texts, 1), **more)


def scores_of(features: Features) -> np.ndarray:
    return pairwise_csd_similarity(features.image, features.text).numpy()


def test_of_sets_of_labels_the_error_is_what_each_images_precision_lacks():
    labels = (torch.rand(N, C, generator=torch.Generator().manual_seed(2)) < 0.3).long()
    labels[3] = 0  # has no precision
    features = features_of("multilabel", labels)
    error, uncertainties = study_features(features).samples["refusal"]
    kept = labels.any(1).numpy()
    assert not kept.all()
    scores = scores_of(features)
    wanted = [1 - average_precision_score(row, own) for row, own in zip(labels.numpy()[kept], scores[kept])]
    np.testing.assert_allclose(error, wanted, atol=1e-6)
    np.testing.assert_allclose(uncertainties["score"], -scores.max(1)[kept], atol=1e-5)
    np.testing.assert_allclose(uncertainties["image"], features.image.trace.numpy()[kept], atol=1e-6)
    assert_calibrated(study_features(features), scores, labels.numpy())
    assert_top1(study_features(features), scores.max(1), labels.numpy()[np.arange(N), scores.argmax(1)] > 0)
    assert not study_features(features, "mean").reliability  # scale and bias belong to csd


def assert_calibrated(study, scores: np.ndarray, true: np.ndarray) -> None:
    """The Brier score and the shares of `calibration/match`, from all pairs with scale 10 and bias -3."""
    found = study.metrics()
    probability = 1 / (1 + np.exp(3 - 10 * scores))
    assert found["calibration/match/brier"] == pytest.approx(np.mean((probability - true) ** 2), rel=1e-5)
    assert found["calibration/match/mean_probability"] == pytest.approx(probability.mean(), rel=1e-5)
    assert found["calibration/match/base_rate"] == pytest.approx(true.mean()) and found["calibration/match/ece"] > 0
    ratio = probability.mean() / true.mean()
    assert found["calibration/match/probability_over_base_rate"] == pytest.approx(ratio, rel=1e-5)


def assert_top1(study, best: list[float], right: list[bool]) -> None:
    """`calibration/match_top1`, from the best score of each query and whether it matches."""
    wanted = reliability(1 / (1 + np.exp(3 - 10 * np.array(best))), np.array(right)).metrics("calibration/match_top1")
    got = study.metrics()
    assert {key: got[key] for key in wanted} == pytest.approx(wanted, rel=1e-4)


def test_of_classes_it_is_the_wrong_class():
    labels = torch.randint(C, (N,), generator=torch.Generator().manual_seed(3))
    features = features_of("classification", labels)
    study = study_features(features)
    error, uncertainties = study.samples["refusal"]
    chosen = scores_of(features).argmax(1)
    np.testing.assert_array_equal(error, chosen != labels.numpy())
    pair = features.image.trace + features.text.trace[torch.from_numpy(chosen)]
    np.testing.assert_allclose(uncertainties["pair"], pair.numpy(), rtol=1e-6)
    assert {"calibration/match", "calibration/match_top1", "calibration/confidence"} == set(study.reliability)
    assert_top1(study, scores_of(features).max(1), chosen == labels.numpy())
    assert error.mean() == pytest.approx(1 - evaluate_dataset(features.dataset, features).value)


def test_of_captions_it_is_no_match_in_the_first_place_by_the_most_complete_labels():
    owners = torch.arange(N).repeat_interleave(2)
    features = features_of("retrieval", captions=("x",) * (2 * N), owners=owners)
    own = study_features(features).samples["refusal/i2t"].error
    nearest = scores_of(features).argmax(1)
    np.testing.assert_array_equal(own, owners.numpy()[nearest] != np.arange(N))
    further = frozenset((str(image), int(text)) for image, text in enumerate(nearest) if image % 2)
    more = dataclasses.replace(features, dataset=dataclasses.replace(features.dataset, relevance=further))
    complete = study_features(more).samples["refusal/i2t"].error
    np.testing.assert_array_equal(complete, own * (np.arange(N) % 2 == 0))


def test_of_captioned_images_with_classes_r_auroc_is_that_of_the_images():
    owners, labels = torch.arange(N).repeat_interleave(2), torch.arange(N) % 4
    features = features_of("retrieval", captions=("x",) * (2 * N), owners=owners)
    assert not study_features(features).extra
    found = study_features(dataclasses.replace(features, labels=labels)).metrics()
    assert found["refusal/R-AUROC"] == recall_auroc(features.image, labels, features.image.trace)["R-AUROC"] != 0.5
    points = dataclasses.replace(features.model, probabilistic=False)
    assert not study_features(dataclasses.replace(features, labels=labels, model=points)).extra


def test_a_result_says_that_it_has_too_many_images_for_r_auroc(monkeypatch):
    labels, owners = torch.arange(N) % C, torch.arange(N).repeat_interleave(2)
    pairs = features_of("retrieval", captions=("x",) * (2 * N), owners=owners)
    both = features_of("classification", labels), dataclasses.replace(pairs, labels=labels)
    points = features_of("classification", labels, probabilistic=False)
    assert set(study_features(points).samples["refusal"].uncertainties) == {"score"}
    assert not any(study_features(one).too_large_for for one in both)
    monkeypatch.setattr("prolip.evaluation.tasks.base.NEIGHBOURS", N - 1)
    for one in both:
        (result,) = evaluate_all([one], study=True)
        assert result.info["too_large_for"] == ["refusal/R-AUROC", "refusal/1-NN"]
        names = " ".join(result.metrics).replace("i2t/", "")
        assert "refusal/R-AUROC" not in result.metrics and "refusal/score/aurc" in names
        assert "R-AUROC left out: too many images" in format_uncertainty([result])
    assert not study_features(points).too_large_for  # they have none at any size


@pytest.mark.parametrize("right", [1, 9, 10, N - 9])
def test_the_table_counts_correct_answers_and_leaves_out_the_auroc_of_few(right):
    features = features_of("classification", torch.zeros(N, dtype=torch.long))
    chosen = torch.from_numpy(scores_of(features).argmax(1))
    labels = torch.where(torch.arange(N) < right, chosen, (chosen + 1) % C)
    (result,) = evaluate_all([dataclasses.replace(features, labels=labels)], study=True)
    head, *lines = format_uncertainty([result]).splitlines()
    assert head.split()[:3] == ["refused", "correct", "error"] and head.split()[-1] == "AUROC"
    value = f"{result.metrics['refusal/image/auroc']:.4f}" if right == 10 else "-"
    (line,) = (line.split() for line in lines if line.split()[:3] == ["made", "csd", "image"])
    assert line[3:5] == [str(right), f"{1 - right / N:.4f}"] and line[-1] == value
    graded = features_of("multilabel", torch.nn.functional.one_hot(labels, C))
    assert "made  csd  image          -" in format_uncertainty(evaluate_all([graded], study=True))
