"""Settings that a run derives from its data, weights and device, and saves."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import prolip
from prolip.data.config import fitting_batch
from prolip.models.checkpoint import save_pretrained
from training.config import build_config
from training.defaults import settle, settle_model
from training.main import main
from training.parallel import World


def config(**sections):
    return build_config("prolip", {"model": {"model": "ProLIP-ViT-test"}} | sections)


@pytest.mark.parametrize(
    ("samples", "ranks", "workers", "size"),
    [(46, 1, 4, 16), (24, 1, 0, 8), (128, 1, 4, 32), (10**6, 8, 4, 64), (100, 1, 3, 30), (20, 1, 12, 12), (5, 1, 0, 8)],
)
def test_the_batch_is_the_largest_that_gives_an_epoch_three_batches_and_workers_share(samples, ranks, workers, size):
    assert fitting_batch(samples, ranks, workers) == size


def test_from_scratch_the_optimiser_is_the_papers():
    made = settle(config(), steps_per_epoch=10, rows=64, ranks=2)
    assert (made.optim.lr, made.optim.beta2, made.optim.grad_clip_norm) == (5e-4, 0.95, None)
    assert (made.run.epochs, made.optim.warmup, made.data.batch_size) == (32, 16, 64)


def test_trained_weights_get_the_settings_of_fine_tuning_and_what_is_given_stays(tmp_path):
    save_pretrained(prolip.create_model("ProLIP-ViT-XS-16"), tmp_path)
    for model in ({"model": f"local-dir:{tmp_path}"}, {"model": "ProLIP-ViT-XS-16", "pretrained": str(tmp_path)}):
        made = settle(config(model=model, optim={"grad_clip_norm": None}), 10, 64, 1).optim
        assert (made.lr, made.beta2, made.grad_clip_norm) == (1.5e-4, 0.98, None)
        made = settle(config(model=model, optim={"lr": 1e-3, "beta2": 0.9}), 10, 64, 1).optim
        assert (made.lr, made.beta2, made.grad_clip_norm) == (1e-3, 0.9, 1.0)


@pytest.mark.parametrize(
    ("name", "rate"), [("ProLIP-ViT-XS-16", 1.5e-4), ("ProLIP-ViT-B-16", 3.7e-5), ("ProLIP-ViT-test", 5e-4)]
)
def test_a_wider_model_is_fine_tuned_at_a_lower_rate(name, rate, monkeypatch):
    monkeypatch.setattr("training.defaults.find_weights", lambda *names: "weights.pt")
    assert settle(config(model={"model": name}), 10, 64, 1).optim.lr == rate


@pytest.mark.parametrize(("steps_per_epoch", "epochs"), [(3, 100), (9, 34), (10, 32), (1000, 32)])
def test_a_run_without_a_length_takes_300_steps_or_32_epochs(steps_per_epoch, epochs):
    assert settle(config(), steps_per_epoch, 8, 1).run.epochs == epochs
    assert settle(config(run={"max_steps": 7}), steps_per_epoch, 8, 1).run.epochs is None


@pytest.mark.parametrize(("warmup", "steps"), [("5%", 10), ("2.5%", 5), ("0%", 0), (30, 30)])
def test_a_warm_up_is_a_share_of_the_run_or_steps(warmup, steps):
    assert settle(config(run={"max_steps": 200}, optim={"warmup": warmup}), 10, 8, 1).optim.warmup == steps


def test_without_a_gpu_the_model_is_the_small_one_and_one_line_says_so(capsys):
    made = settle_model(build_config("prolip", {}), World())
    assert made.model.model == "ProLIP-ViT-XS-16"
    assert capsys.readouterr().out == "--model auto: ProLIP-ViT-XS-16, as there is no GPU\n"
    on_gpu = SimpleNamespace(device=torch.device("cuda"), is_first=False)
    assert settle_model(build_config("prolip", {}), on_gpu).model.model == "ProLIP-ViT-B-16"
    assert settle_model(config(), World()).model.model == "ProLIP-ViT-test"
    assert capsys.readouterr().out == ""


def test_what_was_settled_is_printed_and_saved(tmp_path, capsys):
    more = "--dataset-type synthetic --train-num-samples 20 --model ProLIP-ViT-test --workers 0 --precision fp32"
    more += f" --device cpu --save-frequency 0 --max-steps 20 --name one --output {tmp_path}"
    assert main(more.split()) == 0
    text = capsys.readouterr().out
    for fact in ("batch      8 = 1 ranks", "lr 0.0005", "1 steps of warm-up", "beta2 0.95, no clipping", "bias -1.946"):
        assert fact in text, fact
    saved = json.loads((tmp_path / "one" / "config.json").read_text())
    assert saved["data"]["batch_size"] == 8 and saved["model"]["init_logit_bias"] == pytest.approx(-1.9459)
    assert [saved["optim"][name] for name in ("lr", "warmup", "beta2", "grad_clip_norm")] == [5e-4, 1, 0.95, None]
