"""The bias that a run starts with."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from distributed_helpers import run_ranks
from scipy.optimize import minimize_scalar
from training_runs import newest, words

import prolip
from prolip.methods import find_method
from prolip.methods.base import Context
from prolip.models.checkpoint import save_pretrained
from prolip.utils.flags import FlagError
from training.checkpoint.files import load_checkpoint
from training.hooks import balanced_bias
from training.main import main
from training.parallel import World

ROWS = 12
SETTINGS = {"prolip": {}, "prolip known": {"known_matches": True}, "siglip": {}, "likelihood": {}}


def make_batch() -> dict:
    generator = torch.Generator().manual_seed(3)
    captions = torch.arange(ROWS) // 2  # two images have one caption
    return {
        "image": torch.randn(ROWS, 3, 32, 32, generator=generator),
        "text": torch.randint(1000, 2000, (ROWS, 12), generator=generator),
        "caption_id": captions,
        "caption_ids": captions.unsqueeze(1),
    }


def make_run(case: str, rank: int = 0, ranks: int = 1, parts: int = 1) -> SimpleNamespace:
    """Return the inputs of `balanced_bias` from a run with trained weights, whose logits differ from random ones."""
    name = case.split()[0]
    method = find_method(name)
    torch.manual_seed(0)
    model = prolip.create_model("ProLIP-ViT-test", method_cfg={"name": name})
    with torch.no_grad():
        model.logit_scale.fill_(3.5)
    objective = method.objective(model, method.config(**SETTINGS[case]), Context(rank=rank, world_size=ranks))
    trained = SimpleNamespace(objective=objective, accum_freq=parts, autocast=nullcontext)
    return SimpleNamespace(trained=trained, world=World(rank=rank, world_size=ranks))


def best_bias(case: str) -> float:
    """The minimiser of the sigmoid loss of all pairs, in float64, by brute force."""
    batch, model = make_batch(), make_run(case).trained.objective.model
    with torch.no_grad():
        image, text = model.encode_image(batch["image"]), model.encode_text(batch["text"])
        similarity = image.mean.double() @ text.mean.double().T
        if case.startswith("prolip"):
            similarity -= (image.log_var.double().exp().sum(1)[:, None] + text.log_var.double().exp().sum(1)) / 2
        match = torch.eye(ROWS, dtype=torch.bool)
        if "known" in case:
            match = batch["caption_id"][:, None] == batch["caption_id"]
        y, logit = torch.where(match, 1.0, -1.0), math.exp(3.5) * similarity

        def loss(bias: float) -> float:
            return -F.logsigmoid(y * (logit + bias)).sum().item() / ROWS

        return minimize_scalar(loss, bounds=(-200, 200), method="bounded", options={"xatol": 1e-7}).x


def share_of_ranks(rank: int, ranks: int, case: str, parts: int) -> float:
    batch = {name: value[rank::ranks] for name, value in make_batch().items()}
    return balanced_bias(make_run(case, rank, ranks, parts), batch)


def every_case(rank: int, ranks: int) -> dict[str, float]:
    return {case: share_of_ranks(rank, ranks, case, 1) for case in SETTINGS}


def test_a_loss_that_no_bias_balances_is_refused():
    run = make_run("siglip")
    honest = run.trained.objective.terms
    run.trained.objective.terms = lambda reps, batch: {"loss": honest(reps, batch)["loss"] + 9 * reps["bias"].sum()}
    with pytest.raises(FlagError, match="no bias balances .*; give a number"):
        balanced_bias(run, make_batch())


@pytest.mark.parametrize("case", SETTINGS)
def test_the_bias_minimises_the_loss_of_the_first_batch(case):
    expected = best_bias(case)
    assert expected < -5  # not where random towers would have it
    for parts in (1, 3):
        assert share_of_ranks(0, 1, case, parts) == pytest.approx(expected, abs=1e-3)


def test_ranks_find_the_bias_of_one_process(ranks=2):
    found = run_ranks(ranks, every_case, ranks)
    assert all(each == found[0] for each in found)
    assert found[0] == pytest.approx({case: best_bias(case) for case in SETTINGS}, abs=1e-3)


def saved(folder, name="run") -> float | None:
    return json.loads((folder / name / "config.json").read_text())["model"]["init_logit_bias"]


@pytest.mark.parametrize(
    ("method", "batch", "expected"),
    [("prolip", 8, -math.log(7)), ("siglip", 16, -math.log(15)), ("likelihood", 2, 0.0), ("clip", 8, None)],
)
def test_from_scratch_the_bias_is_that_of_the_batch_or_the_methods_own(tmp_path, capsys, method, batch, expected):
    more = ["--max-steps", 2, "--batch-size", batch, "--method", method, "--lr", 1e-9, "--warmup", 0]
    assert main(words(tmp_path, "run", *more, "--ema-decay", 0.5)) == 0
    assert saved(tmp_path) == (None if expected is None else pytest.approx(expected, abs=1e-4))
    state = load_checkpoint(newest(tmp_path / "run"))
    start = -10.0 if expected is None else expected
    for part, name in (("objective", "model.logit_bias"), ("ema", "logit_bias")):
        assert state[part][name].item() == pytest.approx(start, abs=1e-3)
    assert f"scale 10, bias {start:.4g}\n" in capsys.readouterr().out


def test_a_batch_of_one_pair_is_refused_with_what_to_give(tmp_path, capsys):
    assert main(words(tmp_path, "run", "--max-steps", 2, "--batch-size", 1)) == 2
    assert "needs pairs that do not match, but the batch is 1: give --batch-size 2" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_from_weights_balances_the_bias_says_and_saves_it_and_a_resumed_one_keeps_what_it_learnt(
    tmp_path, capsys
):
    save_pretrained(prolip.create_model("ProLIP-ViT-test", init_logit_bias=-40.0), tmp_path / "weights")
    weights = ["--model", f"local-dir:{tmp_path / 'weights'}", "--lr", 0.01, "--lr-scheduler", "const"]
    assert main(words(tmp_path, "run", *weights, "--max-steps", 3)) == 0
    text, start = capsys.readouterr().out, saved(tmp_path)
    assert "bias from the first batch" in text
    assert f"bias {start:.4g} balances the loss of the first batch; it was -40 before\n" in text
    assert -20 < start < 0
    learnt = load_checkpoint(newest(tmp_path / "run"))
    assert learnt["config"]["model"]["init_logit_bias"] == start
    assert 1e-3 < abs(learnt["objective"]["model.logit_bias"].item() - start) < 1
    assert main(words(tmp_path, "run", *weights, "--max-steps", 4, "--resume", "latest")) == 0
    text = capsys.readouterr().out
    assert "balances the loss" not in text and "init_logit_bias" not in text and saved(tmp_path) == start
    went_on = load_checkpoint(newest(tmp_path / "run"))["objective"]["model.logit_bias"].item()
    assert 0 < abs(went_on - learnt["objective"]["model.logit_bias"].item()) < 0.1
