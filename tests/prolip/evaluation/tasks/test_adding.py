"""The task, the metric and the data set of docs/developing/add_a_task.md, as its page has them."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import miniatures as mini
import numpy as np
import pytest
from PIL import Image

from prolip.evaluation import table
from prolip.evaluation.cache import FeatureStore
from prolip.evaluation.datasets import registry
from prolip.evaluation.datasets.webdataset import open_wds
from prolip.evaluation.embed import load_features
from prolip.evaluation.evaluate import compute_features, evaluate_dataset
from prolip.evaluation.tasks import TASKS

PAGE = (Path(__file__).parents[4] / "docs/developing/add_a_task.md").read_text(encoding="utf-8")
TASK, _, METRIC, FORMAT, REGISTERED = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_task_of_the_page_has_metrics_intervals_a_study_and_saved_features(tmp_path, ours, monkeypatch):
    monkeypatch.setattr("prolip.evaluation.tasks.TASKS", TASKS | {})
    monkeypatch.setattr(table, "COLUMNS", (*table.COLUMNS, "mean_reciprocal_rank"))
    before = set(TASKS)
    exec(TASK, {})
    dataset = replace(open_wds(mini.wds_classification(tmp_path / "wds_ages", images=30)), kind="ordinal")
    from prolip.evaluation import tasks

    monkeypatch.setattr("prolip.evaluation.evaluate.TASKS", tasks.TASKS)
    store = FeatureStore(tmp_path / "features")
    features = compute_features(dataset, ours, store)
    scores = ours.score.pairwise(features.image, features.text).numpy()
    labels, order = features.labels.numpy(), (-scores).argsort(1, kind="stable")
    ranks = (order == labels[:, None]).argmax(1) + 1
    found = evaluate_dataset(dataset, features, draws=20, study=True)
    assert found.main_metric == "mean_reciprocal_rank" and found.value == pytest.approx(np.mean(1 / ranks))
    assert found.metrics["mean_absolute_error"] == pytest.approx(np.abs(order[:, 0] - labels).mean())
    low, high = found.info["intervals"]["mean_reciprocal_rank"]
    assert low < found.value < high
    assert found.study.metrics()["refusal/image/error"] == pytest.approx(found.metrics["mean_absolute_error"])
    (kept,) = load_features(store)
    assert evaluate_dataset(kept.dataset, kept).metrics == found.metrics
    assert "mean_reciprocal_rank" in table.format_table([found]) and set(TASKS) == before


def test_the_metric_of_the_page_is_the_mean_of_classes_and_has_an_interval(tmp_path, ours, monkeypatch):
    from prolip.evaluation import tasks

    monkeypatch.setattr("prolip.evaluation.tasks.TASKS", TASKS | {})
    exec(METRIC, {})
    monkeypatch.setattr("prolip.evaluation.evaluate.TASKS", tasks.TASKS)
    features = compute_features(open_wds(mini.wds_classification(tmp_path / "wds_few", images=30)), ours)
    labels, scores = features.labels.numpy(), ours.score.pairwise(features.image, features.text).numpy()
    ranks = ((-scores).argsort(1, kind="stable") == labels[:, None]).argmax(1) + 1
    found = evaluate_dataset(features.dataset, features, draws=20)
    by_class = [np.mean(1 / ranks[labels == label]) for label in np.unique(labels)]
    assert found.metrics["class_mrr"] == pytest.approx(np.mean(by_class)) and "acc1" in found.metrics
    low, high = found.info["intervals"]["class_mrr"]
    assert low < found.metrics["class_mrr"] < high
    assert "class_mrr" in tasks.TASKS["classification"].names(features.dataset)


def test_the_data_set_of_the_page_is_opened_by_its_word_and_evaluated(tmp_path, ours, monkeypatch):
    module = ModuleType("prolip.evaluation.datasets.scenes")
    exec(FORMAT, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(registry, "READERS", registry.READERS | {})
    exec(REGISTERED, vars(registry))
    for name, colour in (("cat.png", "green"), ("dog.png", "black")):
        Image.new("RGB", (64, 64), colour).save(tmp_path / name)
    (tmp_path / "scenes.tsv").write_text("cat.png\ta green cat\ndog.png\ta black dog\n")
    dataset = registry.open_dataset(f"scenes:{tmp_path}")
    samples = list(dataset.samples())
    assert [sample.captions for sample in samples] == [("a green cat",), ("a black dog",)]
    assert samples[1].image == (tmp_path / "dog.png").read_bytes()
    assert 0 <= evaluate_dataset(dataset, ours).metrics["i2t/R@1"] <= 1
    with pytest.raises(ValueError, match="scenes:FOLDER has no splits"):
        registry.open_dataset(f"scenes:{tmp_path}", "val")
    (tmp_path / "dog.png").write_bytes(b"")
    assert len(list(registry.open_dataset(f"scenes:{tmp_path}", "0.5").samples())) < 2
