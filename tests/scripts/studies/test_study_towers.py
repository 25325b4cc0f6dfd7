"""The study of towers: its models, what every run begins from, and its tables of results that are known."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import prolip
from prolip.gaussian import Gaussian
from prolip.methods import FURTHER
from prolip.methods.base import Context
from prolip.methods.prolip import ProLIPConfig
from studies.methods import reader_variants
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


def test_every_run_of_the_first_study_begins_where_its_row_says(tmp_path):
    wanted = study_towers.started(tmp_path, 1, "")
    old = [name for name in wanted["variants"] if name.startswith(study_towers.slug(study_towers.OLD))]
    assert len(old) == 2 and all("--init-uncertainty" in wanted["variants"].pop(name) for name in old)
    runs = commands(wanted)
    base = str(tmp_path / "base-s0/model/open_clip_model.safetensors")
    assert {name for name, run in runs.items() if run.model.pretrained != base} == {
        "prolip-random-weights",
        "prolip-random-weights-0",
    }
    assert {run.run.max_steps for name, run in runs.items() if name.endswith("-0")} == {1}
    assert all(run.optim.lr < 1e-20 for name, run in runs.items() if name.endswith("-0"))
    assert {run.run.save_every_steps for name, run in runs.items() if not name.endswith("-0")} == {50}


def note(counts, _, inputs):
    counts.append(inputs[0].shape[1])


def test_readers_of_the_second_study_leave_the_tower_alone_or_read_all_of_its_blocks(tmp_path):
    study_towers.configure(tmp_path, [3])
    images, ids = torch.randn(2, 3, 64, 64), torch.tensor([[49406, 320, 49407, *[0] * 9]] * 2)
    counted, moved = {}, {}
    for name, method in reader_variants.METHODS.items():
        model = prolip.create_model(f"local-dir:{tmp_path / 'towers/reader-s3'}")
        objective = method.objective(model, ProLIPConfig(), Context(total_steps=2))
        counted[name] = []
        for tower in objective.model.towers().values():
            tower.reader.norm_kv.register_forward_pre_hook(partial(note, counted[name]))
        variances = [model.encode_image(images).log_var.sum() + model.encode_text(ids).log_var.sum() for _ in range(2)]
        variances[1].backward()
        inside = [p.grad for tower in model.towers().values() for p in tower.tower.parameters()]
        moved[name] = any(gradient is not None and gradient.any() for gradient in inside)
    assert counted == {"prolip-apart": [64, 12] * 2, "prolip-levels": [3 * 64, 2 * 12] * 2}
    assert moved == {"prolip-apart": False, "prolip-levels": True}


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
