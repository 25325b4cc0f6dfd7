"""What the loop does around an evaluation: one model at a time, nothing compiled, and nothing that ends the run."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from torch import nn
from training_runs import make

from training.evaluate import Best
from training.log import Stopwatch
from training.loop import evaluate_when_due
from training.state import Evaluated


@pytest.fixture(autouse=True)
def due(monkeypatch):
    """An evaluation is due at any step."""
    monkeypatch.setattr("training.loop.evaluation_due", lambda *facts: True)


def test_evaluation_leaves_the_model_in_training_mode(tmp_path):
    run = make(tmp_path, optim={"ema_decay": 0.9})

    class Measuring:
        def measure(self, model, here, between, last):
            model.eval()
            return Evaluated({"names/i2t/R@1": float(model is run.trained.averages["ema"].module)})

    run.evals.validation = Measuring()
    evaluate_when_due(run, Stopwatch())
    assert run.trained.objective.model.training
    assert run.evals.metrics == {"names/i2t/R@1": 0.0, "ema/names/i2t/R@1": 1.0}


class Measuring:
    """Stands in for the test sets."""

    def measure(self, model, here, between, last):
        return Evaluated({"f": 1.0})


def test_models_in_shards_are_made_whole_one_at_a_time(tmp_path, monkeypatch):
    run = make(tmp_path, optim={"ema_decay": 0.9})
    copies: list[weakref.ref] = []

    def whole(model, here, everywhere):
        assert all(copy() is None for copy in copies)
        copy = nn.Linear(1, 1)
        copies.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr("training.loop.whole_model", whole)
    run.evals.validation = Measuring()
    evaluate_when_due(run, Stopwatch())
    assert len(copies) == 2 and copies[1]() is None and run.evals.metrics == {"f": 1.0, "ema/f": 1.0}


class Layer(nn.Linear):
    """A module of our own: torch before 2.14 compiles none of its own by itself."""

    def forward(self, x):
        return super().forward(x)


def test_an_evaluation_compiles_nothing(tmp_path):
    """Its batches have sizes of their own: each would be compiled for minutes."""
    run, compiled = make(tmp_path), []
    layer = Layer(3, 3)
    layer.compile(backend=lambda graph, inputs: compiled.append(graph) or graph.forward, dynamic=False)

    class Embedding:
        def measure(self, model, here, between, last):
            return Evaluated({f"{rows}": layer(torch.ones(rows, 3)).sum().item() for rows in (5, 7)})

    layer(torch.ones(2, 3))
    run.evals.validation = Embedding()
    evaluate_when_due(run, Stopwatch())
    assert len(compiled) == 1 and run.evals.results[""].metrics.keys() == {"5", "7"}
    layer(torch.ones(9, 3))
    assert len(compiled) == 2


@pytest.mark.parametrize("metric, kept", [("f", "plain"), ("ema/f", "averaged")])
def test_the_best_is_chosen_among_the_models_that_its_figure_is_of(tmp_path, monkeypatch, metric, kept):
    run = make(tmp_path, optim={"ema_decay": 0.9})
    run.evals.validation, run.evals.best, saved = Measuring(), Best(tmp_path / "best", metric), []
    monkeypatch.setattr("training.evaluate.save_pretrained", lambda model, folder, tokenizer: saved.append(model))
    (tmp_path / "best").mkdir()
    evaluate_when_due(run, Stopwatch())
    assert saved == [{"plain": run.trained.objective.model, "averaged": run.trained.averages["ema"].module}[kept]]


def test_a_best_model_that_cannot_be_kept_does_not_end_the_run(tmp_path, capsys):
    run = make(tmp_path)
    (tmp_path / "file").touch()
    run.evals.validation, run.evals.best = Measuring(), Best(tmp_path / "file" / "best", "f")
    evaluate_when_due(run, Stopwatch())
    run.outputs.log.close()
    assert "warning: the best model was NOT kept, the run goes on: FileExistsError" in capsys.readouterr().out
    assert json.loads((run.outputs.folder / "metrics.jsonl").read_text())["f"] == 1.0
