"""The task and the metric of docs/developing/add_a_task.md, as its page has them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import miniatures as mini
import numpy as np
import pytest

from prolip.evaluation import table
from prolip.evaluation.cache import FeatureStore
from prolip.evaluation.datasets.webdataset import open_wds
from prolip.evaluation.embed import load_features
from prolip.evaluation.evaluate import compute_features, evaluate_dataset
from prolip.evaluation.tasks import TASKS

PAGE = (Path(__file__).parents[4] / "docs/developing/add_a_task.md").read_text(encoding="utf-8")


def test_the_task_of_the_page_has_metrics_intervals_a_study_and_saved_features(tmp_path, ours, monkeypatch):
    monkeypatch.setattr("prolip.evaluation.tasks.TASKS", TASKS | {})
    monkeypatch.setattr(table, "COLUMNS", (*table.COLUMNS, "mean_reciprocal_rank"))
    before = set(TASKS)
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], {})
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
