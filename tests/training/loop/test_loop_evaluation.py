"""The loop around an evaluation: one model at a time, nothing compiled, and nothing that ends the run."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from torch import nn
from training_runs import make

from training.health.log import Stopwatch
from training.loop import evaluate_when_due
from training.state import Evaluated


def evaluated(tmp_path, measuring, metric=None, **optim):
    run = make(tmp_path, optim=optim)
    run.at.step, run.evals.validation = run.total_steps, measuring(run)
    object.__setattr__(run.config.val, "best_metric", metric)
    evaluate_when_due(run, Stopwatch())
    run.outputs.log.close()
    return run


class Measuring:
    """Replacement of the test sets; leaves the model in evaluation mode."""

    def __init__(self, run):
        self.run = run

    def measure(self, model, here, between, last):
        self.run.trained.objective.model.eval()
        return Evaluated({"f": 1.0})


def test_evaluation_leaves_the_model_in_training_mode(tmp_path):
    run = evaluated(tmp_path, Measuring, ema_decay=0.9)
    assert run.trained.objective.model.training and run.evals.metrics == {"f": 1.0, "ema/f": 1.0}


def test_models_in_shards_are_made_whole_one_at_a_time(tmp_path, monkeypatch):
    copies: list[weakref.ref] = []

    def whole(model, here, everywhere):
        assert all(copy() is None for copy in copies)
        copy = nn.Linear(1, 1)
        copies.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr("training.loop.whole_model", whole)
    evaluated(tmp_path, Measuring, ema_decay=0.9)
    assert len(copies) == 2 and copies[1]() is None


class Layer(nn.Linear):
    """A module of our own: torch before 2.14 compiles none of its own by itself."""

    def forward(self, x):
        return super().forward(x)


def test_an_evaluation_compiles_nothing(tmp_path):
    """Evaluation batches have sizes of their own: each would be compiled for minutes."""
    layer, compiled = Layer(3, 3), []
    layer.compile(backend=lambda graph, inputs: compiled.append(graph) or graph.forward, dynamic=False)

    class Embedding(Measuring):
        def measure(self, model, here, between, last):
            return Evaluated({f"{rows}": layer(torch.ones(rows, 3)).sum().item() for rows in (5, 7)})

    layer(torch.ones(2, 3))
    assert evaluated(tmp_path, Embedding).evals.results[""].metrics.keys() == {"5", "7"} and len(compiled) == 1
    layer(torch.ones(9, 3))
    assert len(compiled) == 2


@pytest.mark.parametrize("metric", ["f", "ema/f"])
def test_the_best_is_chosen_among_the_models_that_its_figure_is_of(tmp_path, monkeypatch, metric):
    saved = []
    monkeypatch.setattr("training.evaluate.save_pretrained", lambda model, folder, tokenizer: saved.append(model))
    trained = evaluated(tmp_path, Measuring, metric, ema_decay=0.9).trained
    assert saved == [trained.objective.model if metric == "f" else trained.averages["ema"].module]


def test_a_best_model_that_cannot_be_kept_does_not_end_the_run(tmp_path, capsys, monkeypatch):
    def fail(*args, **more):
        raise OSError("no room")

    monkeypatch.setattr("training.evaluate.save_pretrained", fail)
    run = evaluated(tmp_path, Measuring, "f")
    assert "warning: the best model was NOT saved; the run continues: OSError: no room" in capsys.readouterr().out
    assert json.loads((run.outputs.folder / "metrics.jsonl").read_text())["f"] == 1.0
