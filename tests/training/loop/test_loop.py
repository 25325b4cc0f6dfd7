"""The step and the loop around it: nothing waits, nothing non-finite passes, micro-batches change nothing."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from training_runs import batches, make, one_step, parameters

from prolip.data.augment.affine import AugmentConfig, DeviceAugment
from prolip.data.augment.tokens import TokenAugment
from prolip.flops import count_flops
from training.health.errors import LossMeter, NonFiniteError
from training.loop import on_device, train
from training.optim import gradient_norms, parameter_norms, params_by_tower
from training.parallel import World


def test_a_step_moves_every_trainable_parameter(tmp_path):
    run = make(tmp_path)
    before = parameters(run)
    terms = one_step(run, next(batches(run)), 0)
    unmoved = [n for n, p in run.trained.objective.named_parameters() if torch.equal(p, before[n])]
    assert unmoved == []
    assert {"loss", "ppcl", "scale", "bias", "trace_image", "trace_text", "grad_norm"} <= terms.keys()
    assert all(p.grad is None for p in run.trained.objective.parameters())


def test_a_step_waits_for_no_value(tmp_path, monkeypatch):
    """Each of these would stop the host on a device until the device is done."""
    run = make(tmp_path, optim={"grad_clip_norm": 1.0, "ema_decay": 0.9})
    stream = batches(run)
    one_step(run, next(stream), 0)  # what is done once (optimiser state) is done
    batch = next(stream)

    def refuse(self, *args, **kwargs):
        raise AssertionError("the step looked at a value")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    one_step(run, batch, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_on_cuda_a_step_does_not_stop_the_host(tmp_path, precision):
    world = World(device=torch.device("cuda"))
    run = make(tmp_path, optim={"grad_clip_norm": 1.0, "ema_decay": 0.9}, world=world, precision=precision)
    stream = batches(run)
    one_step(run, next(stream), 0)
    batch = next(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        one_step(run, batch, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_micro_batches_equal_the_large_batch(tmp_path):
    """Masked views included: with 8 rows one is masked, so one of the micro-batches has none."""
    weights = {"alpha1": 0.1, "alpha2": 0.5, "beta": 0.01}
    optim = {"opt": "sgd", "lr": 0.1, "wd": 0.0}
    whole = make(tmp_path / "a", weights, optim)
    parts = make(tmp_path / "b", weights, optim, accum_freq=4)
    for batch in batches(whole):
        want, got = one_step(whole, batch, 0), one_step(parts, batch, 0)
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)
    for (name, p), q in zip(whole.trained.objective.named_parameters(), parts.trained.objective.parameters()):
        torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_scaled_loss_gives_the_same_step_and_overflow_skips_it(tmp_path, parts):
    """fp16's machinery, in float32: a loss scale of 2^10 is undone exactly; one of 2^127 overflows every gradient."""
    plain = make(tmp_path / "a", optim={"grad_clip_norm": 1.0})
    scaled = make(tmp_path / "b", optim={"grad_clip_norm": 1.0}, accum_freq=parts)
    scaled.trained.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    stream = batches(plain)
    batch = next(stream)
    want, got = one_step(plain, batch, 0), one_step(scaled, batch, 0)
    torch.testing.assert_close(got["grad_norm"], want["grad_norm"], rtol=1e-4, atol=0)
    proj = scaled.trained.objective.model.visual.proj
    torch.testing.assert_close(proj, plain.trained.objective.model.visual.proj, rtol=0, atol=1e-6)
    before = parameters(scaled)
    scaled.trained.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    terms = one_step(scaled, next(stream), 0)
    assert torch.isfinite(terms["loss"]) and not torch.isfinite(terms["grad_norm"])
    assert all(torch.equal(value, before[name]) for name, value in scaled.trained.objective.named_parameters())
    assert scaled.trained.scaler.get_scale() == 2.0**126


def test_gradients_are_clipped_to_the_bound_and_their_norms_reported():
    model: Any = nn.ModuleDict({"visual": nn.Linear(3, 3), "text": nn.Linear(3, 2), "scale": nn.Linear(1, 1)})
    model.towers = lambda: {"image": model["visual"], "text": model["text"]}
    objective = nn.Module()
    objective.model = model
    model["scale"].bias.requires_grad_(False)
    (model["visual"](torch.ones(2, 3)) @ model["text"].weight.T).square().sum().mul(100).backward()
    model["scale"](torch.ones(1, 1)).sum().backward()
    parts = params_by_tower(objective)
    assert {name: len(parameters) for name, parameters in parts.items()} == {"image": 2, "text": 2, "logit": 1}
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    total = torch.cat([grad.flatten() for grad in grads.values()]).norm()
    for bound in (None, 0.5):
        norms = gradient_norms(parts, bound)
        torch.testing.assert_close(norms["grad_norm"], total)
        torch.testing.assert_close(norms["grad_norm_text"], grads["text.weight"].norm())
        assert norms["grad_norm_logit"] == 1
    for name, grad in grads.items():
        torch.testing.assert_close(model.get_parameter(name).grad, grad * 0.5 / total, rtol=1e-4, atol=1e-8)
    want = torch.cat([p.flatten() for p in model["visual"].parameters()]).norm().item()
    assert parameter_norms(parts)["param_norm_image"] == pytest.approx(want)


def test_averaged_weights_follow_their_formula(tmp_path):
    run = make(tmp_path, optim={"ema_decay": 0.5})
    stream = batches(run)
    start = run.trained.objective.model.visual.proj.detach().clone()
    one_step(run, next(stream), 0)
    first = run.trained.objective.model.visual.proj.detach().clone()
    averaged = run.trained.averages["ema"].module.visual
    torch.testing.assert_close(averaged.proj, first)  # the warm-up of the decay starts at 0
    one_step(run, next(stream), 1)
    decay = min(1 - 2 ** (-2 / 3), 0.5)
    want = decay * first + (1 - decay) * run.trained.objective.model.visual.proj
    torch.testing.assert_close(averaged.proj, want)
    assert not torch.equal(first, start)


def poison(run, step: int, value: float = float("nan")) -> None:
    honest = run.trained.objective.terms

    def poisoned(reps, batch):
        terms = honest(reps, batch)
        bad = torch.tensor(value if run.at.step == step else 1.0)
        return terms | {"loss": terms["loss"] * bad, "vib_text": terms["vib_text"] * bad}

    run.trained.objective.terms = poisoned


def rows_of(run) -> list[dict]:
    run.outputs.log.close()
    return [json.loads(row) for row in (run.outputs.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("every", [1, 100])
def test_a_loss_that_is_not_finite_stops_the_run_before_a_checkpoint(tmp_path, every):
    run = make(tmp_path, log_every_n_steps=every)
    poison(run, 2)
    with pytest.raises(NonFiniteError, match="^step 2: loss, vib_text, .*not finite"):
        train(run)
    run.outputs.log.close()
    assert not (run.outputs.folder / "checkpoints").exists()


@pytest.mark.parametrize("opt, allowed", [("adamw", 0), ("adamw", 1), ("muon", 1)])
def test_a_bad_step_does_not_touch_the_parameters(tmp_path, capsys, opt, allowed):
    """Step 2 is bad. Not allowed: parameters stay those of step 1. Allowed: only that step is skipped."""
    run = make(tmp_path, optim={"opt": opt}, max_steps=4, max_nonfinite=allowed, log_every_n_steps=4)
    poison(run, 2, float("inf"))
    honest, seen = run.trained.objective.terms, []
    run.trained.objective.terms = lambda *more: seen.append(parameters(run)) or honest(*more)
    if allowed:
        train(run)
        assert run.health.meter.bad_steps == rows_of(run)[-1]["nonfinite_steps"] == 1 and rows_of(run)[-1]["loss"] > 0
        assert re.search(r"warning: step 2: loss, .*not finite \(samples synthetic-", capsys.readouterr().out)
    else:
        with pytest.raises(NonFiniteError, match=r"^step 2: loss, .*grad_norm, .*not finite \(samples synthetic-"):
            train(run)
    seen.append(parameters(run))
    moved = [any(not torch.equal(a[name], b[name]) for name in a) for a, b in zip(seen, seen[1:])]
    assert moved == ([True, False, True, True] if allowed else [True, False, False, False])
    assert all(torch.isfinite(value).all() for value in seen[-1].values())


class Late:
    """An agreement of several ranks: the answer is that to the call before."""

    def __init__(self):
        self.asked = [0, 0, 0]

    def exchange(self, *asked):
        before, self.asked = self.asked, list(asked)
        return before


def steps_saved(run, monkeypatch) -> list[int]:
    saved: list[int] = []

    def save(run):
        saved.append(run.at.step)
        run.outputs.saves.restart(run.at.step)

    monkeypatch.setattr("training.loop.save", save)
    train(run)
    run.outputs.log.close()
    return saved


def test_ranks_that_agree_a_step_later_save_once_when_the_minutes_are_over(tmp_path, monkeypatch):
    run = make(tmp_path, max_steps=6, save_frequency=0, save_every_minutes=10.0)
    run.health.consensus, run.outputs.saves.last_time = Late(), run.outputs.saves.last_time - 601
    assert steps_saved(run, monkeypatch) == [2, 6]


def test_a_step_that_ends_an_epoch_is_saved_once(tmp_path, monkeypatch):
    """Epochs of three steps, each saved; every third step is, too."""
    run = make(tmp_path, max_steps=8, save_frequency=1, save_every_steps=3)
    assert steps_saved(run, monkeypatch) == [3, 6, 8]
    run = make(tmp_path / "2", max_steps=7, save_frequency=2, save_every_steps=3)
    assert steps_saved(run, monkeypatch) == [3, 6, 7]


class NoGradient(torch.autograd.Function):
    """A finite value whose gradient is NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


@pytest.mark.parametrize("scaled", [False, True])
def test_a_gradient_that_is_never_finite_stops_the_run(tmp_path, scaled):
    """This includes fp16's GradScaler, which treats every such step as an overflow of its scale and skips it."""
    run = make(tmp_path, max_steps=60, log_every_n_steps=10, save_frequency=0)
    if scaled:
        run.trained.scaler, run.health.meter = torch.amp.GradScaler("cpu"), LossMeter(("grad_norm",))
    honest, before = run.trained.objective.terms, parameters(run)
    run.trained.objective.terms = lambda *more: {"loss": NoGradient.apply(honest(*more)["loss"])}
    message = "step 30: .*amp_fp16 no gradient was finite" if scaled else "step 1: grad_norm"
    with pytest.raises(NonFiniteError, match=message):
        train(run)
    assert all(torch.equal(value, before[name]) for name, value in parameters(run).items())
    assert [row["loss_scale"] for row in rows_of(run)] == ([2.0**6, 2.0**-4] if scaled else [])


def test_the_log_has_one_object_per_interval(tmp_path):
    run = make(tmp_path, max_steps=7, log_every_n_steps=3)
    train(run)
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [3, 6, 7] and [row["samples"] for row in rows] == [24, 48, 56]
    assert [round(row["epoch"], 3) for row in rows] == [1, 2, 2.333]
    names = "loss lr samples_per_second data_wait trace_image seconds memory_gib grad_norm_image param_norm_logit"
    assert all(row.keys() >= {*names.split()} for row in rows)


@pytest.mark.parametrize("steps, places", [(3, [1, 2, 3]), (25, [*range(2, 25, 2), 25])])
def test_a_short_run_logs_ten_times_by_default(tmp_path, steps, places):
    run = make(tmp_path, max_steps=steps, log_every_n_steps=None, save_frequency=0)
    train(run)
    assert [row["step"] for row in rows_of(run)] == places


def test_logged_losses_are_means_over_the_interval_of_steps_or_seconds(tmp_path):
    every, thrice = make(tmp_path / "a", max_steps=3), make(tmp_path / "b", max_steps=3, log_every_n_steps=3)
    timed = make(tmp_path / "c", max_steps=3, log_every_n_steps=100, log_every_seconds=1e-9)
    for run in (every, thrice, timed):
        train(run)
    single = [row["loss"] for row in rows_of(every)]
    assert [row["loss"] for row in rows_of(timed)] == single
    assert [row["loss"] for row in rows_of(thrice)] == [pytest.approx(sum(single) / 3, rel=1e-6)]


def test_images_and_texts_are_augmented_by_the_step():
    cut = DeviceAugment(AugmentConfig(), (0.5,) * 3, (0.3,) * 3)
    cut.cutout = AugmentConfig(cutout=0.5)
    masked = TokenAugment((0.3, 0.0, 0.0), torch.arange(1000) < 999, mask_id=999, pad_id=0)
    fed: Any = SimpleNamespace(augment=cut, token_augment=masked)
    rng = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (8, 3, 32, 32), generator=rng, dtype=torch.uint8)
    batch = {"image": pixels, "text": torch.randint(1, 900, (8, 16), generator=rng), "key": list("abcdefgh")}
    first, again, other = (on_device(fed, batch, step, torch.device("cpu")) for step in (3, 3, 4))
    for name in ("image", "text"):
        assert first[name].equal(again[name]) and not first[name].equal(other[name])
    changed = first["text"] != batch["text"]
    assert changed.any() and first["text"][changed].eq(999).all()
    assert first["image"].eq(0).all(1).any(2).any(1).all() and batch["image"] is pixels


def test_augmentation_and_views_go_by_the_steps_of_the_run_not_of_the_epoch(tmp_path):
    """Seeds by the batch within the epoch would repeat the random numbers of the first epoch in every epoch."""
    run = make(tmp_path, max_steps=6, max_nonfinite=0)
    seen: dict[str, list[int]] = {"image": [], "text": [], "views": []}
    prepare = run.trained.objective.prepare

    def noting(name: str, result):
        def note(x, step):
            seen[name].append(step)
            return result(x, step)

        return note

    run.data.augment, run.data.token_augment = (noting(name, lambda x, _: x) for name in ("image", "text"))
    run.trained.objective.prepare = noting("views", prepare)
    assert run.data.loader.num_batches == 3
    train(run)
    run.outputs.log.close()
    assert run.at.epoch == 2 and seen == dict.fromkeys(seen, [0, 1, 2, 3, 4, 5])


def test_model_flops_utilisation_is_flops_times_rate_over_peak(tmp_path):
    run = make(tmp_path, peak_tflops=2.0)
    train(run)
    row = rows_of(run)[-1]
    with count_flops() as counter:
        one_step(run, next(batches(run)), 0)
    # the counter sees the loss and the heads' backward pass too, which the model's count leaves out or rounds
    assert row["mfu"] == pytest.approx(counter.get_total_flops() / 8 * row["samples_per_second"] / 2e12, rel=0.1)
    assert make(tmp_path / "other").health.utilisation is None
