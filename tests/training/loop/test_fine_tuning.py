"""Whole runs with backbones that are first frozen and learn more slowly, and with an average of the last epochs."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_runs import (
    DATA,
    assert_same_state,
    batches,
    make,
    metrics,
    newest,
    one_step,
    parameters,
    stop_after,
    words,
)

import prolip
from training.checkpoint.files import load_checkpoint
from training.health.signals import EXIT_STOPPED
from training.main import main

#: Epochs of three steps: the image backbone is frozen for six and warms up for three, the text backbone for three
#: and three.
RECIPE = shlex.split(
    "--train-num-samples 24 --epochs 5 --warmup 0 --lr 1e-2 --grad-clip-norm 2 --image-freeze-epochs 2 "
    "--text-freeze-epochs 1 --unfreeze-warmup-epochs 1 --image-lr-mult 0.1 --text-lr-mult 0.5 "
    "--layer-decay 0.7 --lr-scheduler step --lr-milestones 0.6"
)


def checkpoint(folder: Path, step: int) -> dict:
    return load_checkpoint(folder / "checkpoints" / f"step_{step}.pt")


def backbones() -> dict[str, set[str]]:
    found = prolip.create_model("ProLIP-ViT-test").backbones()
    return {tower: {f"model.{name}" for name in names} for tower, names in found.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The recipe in one go, with the average of the last three epochs."""
    folder = tmp_path_factory.mktemp("runs")
    assert main(words(folder, "whole", *RECIPE, "--swa-epochs", 3, "--save-frequency", 1)) == 0
    return folder / "whole"


@pytest.mark.parametrize("opt", ["adamw", "muon", "lion", "sgd"])
def test_a_backbone_stands_still_bit_for_bit_until_its_stage_ends_and_moves_at_once(tmp_path, opt):
    """Under every optimiser: as if it were not there, also for decay, moments and clipping."""
    stages = {"image_freeze_epochs": 4 / 3, "text_freeze_epochs": 1 / 3, "unfreeze_warmup_epochs": 1}
    run = make(tmp_path, optim={"opt": opt, "lr": 1e-2, "wd": 0.2, "grad_clip_norm": 1.0} | stages, max_steps=8)
    start, batch, own = parameters(run), next(batches(run)), backbones()
    state, named = run.trained.optimizer.state, dict(run.trained.objective.named_parameters())
    for step in range(6):
        before, norms = parameters(run), one_step(run, batch, step)
        after = parameters(run)
        for tower, steps in (("image", 4), ("text", 1)):
            moved = {name for name in own[tower] if not torch.equal(after[name], before[name])}
            if step < steps:
                assert all(torch.equal(after[name], start[name]) for name in own[tower])
                assert not any(named[name] in state for name in own[tower])
            else:
                assert len(moved) > len(own[tower]) / 2, (tower, step)
        heads = after.keys() - own["image"] - own["text"]
        assert any(not torch.equal(after[name], before[name]) for name in heads)
        towers = [norms[f"grad_norm_{part}"] for part in ("image", "text", "logit")]
        assert norms["grad_norm"] == pytest.approx(math.hypot(*towers))


def test_the_first_step_behind_a_stage_is_that_of_a_fresh_optimiser(tmp_path):
    """Adam's first step is the rate times the sign of the gradient, regardless of steps with a frozen backbone."""
    optim = {"lr": 1e-3, "wd": 0.0, "eps": 1e-30, "image_freeze_epochs": 1.0, "image_lr_mult": 0.5}
    run = make(tmp_path, optim=optim | {"lr_scheduler": "const"}, max_steps=8)
    batch = next(batches(run))
    for step in range(3):
        one_step(run, batch, step)
    before = parameters(run)["model.visual.conv1.weight"]
    one_step(run, batch, 3)
    moved = (parameters(run)["model.visual.conv1.weight"] - before).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 5e-4), rtol=1e-3, atol=1e-7)


def test_learning_rates_follow_stages_multipliers_and_milestones(whole):
    """The last checkpoint, in the third part of the run, has a tenth of --lr, times multiplier and depth."""
    groups = checkpoint(whole, 15)["optimizer"]["param_groups"]
    rates = {name: group["lr"] for group in groups for name in group["names"]}
    assert rates["model.visual.proj"] == pytest.approx(1e-3 * 0.1)
    assert rates["model.visual.conv1.weight"] == pytest.approx(1e-3 * 0.1 * 0.7**3)
    assert rates["model.text.ln_final.weight"] == pytest.approx(1e-3 * 0.5)
    assert rates["model.visual.uncertainty_proj.weight"] == rates["model.logit_scale"] == pytest.approx(1e-3)
    assert [row["lr"] for row in metrics(whole)] == pytest.approx([1e-2] * 9 + [1e-3] * 6)
    early = [checkpoint(whole, step)["objective"] for step in (3, 6, 9)]
    for tower, names in backbones().items():
        equal = [all(torch.equal(a[name], b[name]) for name in names) for a, b in zip(early, early[1:])]
        assert equal == [tower == "image", False], tower


def test_the_averaged_weights_are_the_mean_of_the_last_epochs_checkpoints(whole):
    assert_is_mean(whole, [9, 12, 15])
    states = {step: checkpoint(whole, step) for step in (3, 6, 9, 12, 15)}
    held = {step: (state["swa"] is not None, state["swa_steps"]) for step, state in states.items()}
    assert held == {3: (False, []), 6: (False, []), 9: (True, [9]), 12: (True, [9, 12]), 15: (True, [9, 12, 15])}


def assert_is_mean(folder: Path, steps: list[int]) -> None:
    states = [checkpoint(folder, step) for step in steps]
    got = load_file(folder / "model_swa" / "model.safetensors")
    for name, value in states[-1]["swa"].items():
        wanted = torch.stack([state["objective"][f"model.{name}"].double() for state in states]).mean(0)
        torch.testing.assert_close(value.double(), wanted, rtol=1e-6, atol=1e-7, msg=name)
        assert torch.equal(got[name], value)
    last = states[-1]["objective"]
    assert any(not torch.equal(value, last[f"model.{name}"]) for name, value in got.items())


@pytest.mark.parametrize("steps", [7, *(pytest.param(step, marks=pytest.mark.slow) for step in (2, 6, 10, 13))])
def test_a_run_goes_on_bit_for_bit_in_every_stage(whole, tmp_path, steps):
    again = words(tmp_path, "parts", *RECIPE, "--swa-epochs", 3, "--save-frequency", 1)
    assert stop_after(steps, again) == EXIT_STOPPED
    assert main([*again, "--resume", "latest"]) == 0
    assert_same_state(newest(whole), newest(tmp_path / "parts"))
    assert (tmp_path / "parts/model_swa/model.safetensors").read_bytes() == (
        whole / "model_swa/model.safetensors"
    ).read_bytes()


def test_an_average_of_other_epochs_is_no_average_to_go_on_with(tmp_path, capsys):
    recipe = words(tmp_path, "run", *RECIPE[:2], "--warmup", 0)
    assert stop_after(10, [*recipe, "--epochs", "5", "--swa-epochs", "3"]) == EXIT_STOPPED
    capsys.readouterr()
    assert main([*recipe, "--epochs", "5", "--swa-epochs", "4", "--resume", "latest"]) == 2
    assert "SWA averages steps 6, 9, but the checkpoint holds 9: give the length and" in capsys.readouterr().err
    # a longer run, before its first averaged epoch, begins again
    assert main([*recipe, "--epochs", "6", "--swa-epochs", "2", "--resume", "latest", "--save-frequency", "1"]) == 0
    assert_is_mean(tmp_path / "run", [15, 18])


# with an epsilon far above the moments AdamW's steps are proportional to them, and sums in another order stay small;
# without masked rows, which are whole ones of each rank
DRAWINGS = [
    *DATA,
    *shlex.split(
        "--model ProLIP-ViT-test --precision fp32 --device cpu --train-num-samples 24 --epochs 4 --warmup 0 --eps 0.1 "
        "--lr 0.02 --wd 1e-3 --image-freeze-epochs 2 --unfreeze-warmup-epochs 1 --image-lr-mult 0.3 --text-lr-mult 0.5 "
        "--swa-epochs 2 --grad-clip-norm 0.5 --save-frequency 1 --keep-checkpoints 0 --log-every-n-steps 1 "
        "--init-logit-bias -3 --alpha2 0 --no-report"
    ),
]
WAYS = {
    "one": (1, ["--batch-size", "12", "--workers", "2"]),
    "two": (2, ["--batch-size", "6", "--workers", "1"]),
    "micro-batches": (2, ["--batch-size", "3", "--workers", "1", "--accum-freq", "2"]),
    "shards": (2, ["--batch-size", "6", "--workers", "1", "--fsdp"]),
}
PAIRS = [("shards", "one"), *(pytest.param(way, "one", marks=pytest.mark.slow) for way in ("two", "micro-batches"))]


@pytest.fixture(scope="module")
def trained(forked, tmp_path_factory):
    """A run by each way, once it is asked for."""
    folder = tmp_path_factory.mktemp("ranks")

    def train(name: str) -> Path:
        ranks, way = WAYS[name]
        if not (folder / name).exists():
            given = [*DRAWINGS, *way, "--output", folder, "--name", name]
            assert forked.run(*given, ranks=ranks) == 0, forked.err[-3000:]
        return folder / name

    return train


@pytest.mark.parametrize("way, one", PAIRS)
def test_ranks_and_shards_freeze_and_average_as_one_process_does(trained, way, one):
    folders = trained(way), trained(one)
    for folder in folders:
        states = [checkpoint(folder, step)["objective"] for step in (2, 4, 6)]
        for name in backbones()["image"]:
            assert torch.equal(states[0][name], states[1][name])
        assert any(not torch.equal(states[1][name], states[2][name]) for name in backbones()["image"])
        assert_is_mean(folder, [6, 8])
    for part in ("model", "model_swa"):
        got, wanted = (load_file(folder / part / "model.safetensors") for folder in folders)
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6, msg=f"{part} {name}")
