"""What the loop does around an evaluation: one model at a time, nothing compiled, and nothing that ends the run."""
from __future__ import annotations

import json
import weakref

import pytest
import torch
from test_loop import make
from torch import nn

from training.found import Found, figures
from training.log import Stopwatch
from training.loop import evaluate
from training.validation import Best


def test_evaluation_leaves_the_model_in_training_mode(tmp_path):
    run = make(tmp_path, optim={"ema_decay": 0.9})

    class Measuring:
        def measure(self, model, here, between):
            model.eval()
            return Found({"names/i2t/R@1": float(model is run.ema.module)})

    run.validation = Measuring()
    evaluate(run, Stopwatch())
    assert run.objective.model.training
    assert figures(run.found) == {"names/i2t/R@1": 0.0, "ema/names/i2t/R@1": 1.0}


class Measured:
    """Stands in for the test sets."""

    def measure(self, model, here, between):
        return Found({"f": 1.0})


def test_models_in_shards_are_made_whole_one_at_a_time(tmp_path, monkeypatch):
    run = make(tmp_path, optim={"ema_decay": 0.9})
    copies: list[weakref.ref] = []

    def whole(model, here, everywhere):
        assert all(copy() is None for copy in copies)
        copy = nn.Linear(1, 1)
        copies.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr("training.loop.whole_model", whole)
    run.validation = Measured()
    evaluate(run, Stopwatch())
    assert len(copies) == 2 and copies[1]() is None and figures(run.found) == {"f": 1.0, "ema/f": 1.0}


def test_an_evaluation_compiles_nothing(tmp_path):
    """Its batches have sizes of their own: each would be compiled for minutes."""
    run, compiled = make(tmp_path), []
    layer = nn.Linear(3, 3)
    layer.compile(backend=lambda graph, inputs: compiled.append(graph) or graph.forward, dynamic=False)

    class Embedding:
        def measure(self, model, here, between):
            return Found({f"{rows}": layer(torch.ones(rows, 3)).sum().item() for rows in (5, 7)})

    layer(torch.ones(2, 3))
    run.validation = Embedding()
    evaluate(run, Stopwatch())
    assert len(compiled) == 1 and run.found[""].figures.keys() == {"5", "7"}
    layer(torch.ones(9, 3))
    assert len(compiled) == 2


@pytest.mark.parametrize("metric, kept", [("f", "plain"), ("ema/f", "averaged")])
def test_the_best_is_chosen_among_the_models_that_its_figure_is_of(tmp_path, monkeypatch, metric, kept):
    run = make(tmp_path, optim={"ema_decay": 0.9})
    run.validation, run.best, saved = Measured(), Best(tmp_path / "best", metric), []
    monkeypatch.setattr("training.validation.save_pretrained", lambda model, folder, tokenizer: saved.append(model))
    (tmp_path / "best").mkdir()
    evaluate(run, Stopwatch())
    assert saved == [{"plain": run.objective.model, "averaged": run.ema.module}[kept]]


def test_a_best_model_that_cannot_be_kept_does_not_end_the_run(tmp_path, capsys):
    run = make(tmp_path)
    (tmp_path / "file").touch()
    run.validation, run.best = Measured(), Best(tmp_path / "file" / "best", "f")
    evaluate(run, Stopwatch())
    run.log.close()
    assert "warning: the best model was NOT kept, the run goes on: NotADirectoryError" in capsys.readouterr().out
    assert json.loads((run.folder / "metrics.jsonl").read_text())["f"] == 1.0
