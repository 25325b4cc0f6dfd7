"""A run whose method trains only means is points everywhere: ranked by mean, and without a word of traces."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import evaluate_corpus as corpus
from training_runs import start

from drawings import UNSEEN, VALIDATION

DATA = ["--data", UNSEEN]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Three steps of SigLIP, with the evaluations of its end."""
    return start(tmp_path_factory.mktemp("runs"), "points", "--method", "siglip", "--max-steps", "3", *VALIDATION)


def without_traces(metrics: dict) -> bool:
    return not any(
        re.match("trace/|spearman/|inclusion/|recall_by_trace/|refusal/.*/(image|text|pair)/", key) for key in metrics
    )


def test_evaluations_rank_by_mean_and_report_no_trace(run, tmp_path, capsys):
    figures = json.loads((run / "eval.json").read_text())
    assert without_traces(figures) and "names/i2t/R@1" in figures
    assert json.loads((run / "eval/metrics.json").read_text())["info"]["similarity"] == "mean"
    result = corpus(["--model", f"local-dir:{run}/model", *DATA, "--output", str(tmp_path / "eval")])
    said = capsys.readouterr().out
    assert result.similarity == "mean" and without_traces(result.metrics)
    assert "trace" not in said and "points: this model's method trains only means" in said
    by_csd = corpus(["--model", f"local-dir:{run}/model", *DATA, "--similarity", "csd"])
    # of points they are the same; only the model's own score has match probabilities to calibrate
    own = {key for key in result.metrics if key.startswith("calibration/")}
    assert own and by_csd.similarity == "csd"
    assert by_csd.metrics == {key: value for key, value in result.metrics.items() if key not in own}
