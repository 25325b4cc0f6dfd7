"""The study of towers: its models, what every run begins from, and its tables of results that are known."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import prolip
from prolip.gaussian import Gaussian
from prolip.methods import FURTHER
from studies.methods import towers as study_towers
from training.main import parse


def commands(sweep) -> dict:
    """The configuration of every variant's training."""
    flags = {name: study_towers.sweep.flags_of(sweep, name) for name in sweep["variants"]}
    return {name: parse(["--config", sweep["recipe"], *words]) for name, words in flags.items()}


def test_both_models_of_the_second_study_have_the_same_towers_but_for_uncertainty(tmp_path, monkeypatch):
    study_towers.configure(tmp_path, [3])
    places = [tmp_path / "towers" / f"{name}-s3" for name in ("in-tower", "reader")]
    own, reader = (prolip.create_model(f"local-dir:{place}") for place in places)
    depths = [[len(tower.blocks) for tower in model.towers().values()] for model in (own, reader)]
    assert depths[0] == depths[1] == [3, 2]
    assert own.mask_token_id == reader.mask_token_id == 49408
    ids = torch.tensor([[49406, 320, 49407, *[0] * 9]])
    for model in (own, reader):
        assert model.eval().encode_text(ids).log_var.mean().item() == pytest.approx(-10, abs=0.5)
    monkeypatch.setenv(FURTHER, "studies.methods.reader_variants")
    runs = commands(study_towers.compared(tmp_path, 3, ""))
    assert [run.model.model.rpartition("/")[2] for run in runs.values()] == ["in-tower-s3", *["reader-s3"] * 3]
    assert [run.method for run in runs.values()] == ["prolip", "prolip", "prolip-apart", "prolip-levels"]
    assert {run.run.max_steps for run in runs.values()} == {study_towers.READER_STEPS}


def test_what_is_asked_of_a_text_is_the_trace_at_which_the_gradient_of_ppcl_is_zero():
    torch.manual_seed(0)
    image, text = (Gaussian(F.normalize(torch.randn(n, 8), dim=-1), torch.randn(n, 8) - 4) for n in (40, 6))
    relation = np.zeros((6, 40), dtype=bool)
    relation[np.arange(5), np.arange(5)] = relation[0, 7] = True
    result = SimpleNamespace(
        model_score=SimpleNamespace(scale=12.0, bias=-4.0), image=image, text=text, text_relation=relation
    )
    found = study_towers.asked(result)
    assert np.isnan(found[5])
    trace = torch.tensor(found[:5], requires_grad=True)
    logits = 12 * ((text.mean @ image.mean.mT)[:5] - (trace[:, None] + image.trace) / 2) - 4
    own = torch.from_numpy(relation[:5])
    matches = torch.stack([-F.logsigmoid(row[mask]).mean() for row, mask in zip(logits, own)])
    (matches - 127 * F.logsigmoid(-logits).mean(1)).sum().backward()
    assert trace.grad.abs().max() < 1e-4 * 12
