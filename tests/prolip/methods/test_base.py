"""The Objective contract and exact gradient accumulation, on a small objective of its own."""

from __future__ import annotations

import gc
import math
import weakref
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from method_checks import assert_close, gradients
from torch import nn

from prolip.methods.accumulate import accumulate_backward, split_batch, unwrap
from prolip.methods.base import Objective, logit_scale_and_bias

WIDTH = 6


class Towers(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4))
        self.text = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4))
        self.logit_scale = nn.Parameter(torch.tensor(1.0))
        self.logit_bias = nn.Parameter(torch.tensor(-1.0))


class Contrast(Objective):
    """A loss that ties every row to every other one, with a term on three masked rows; `spare` does not enter it."""

    def __init__(self, model: nn.Module):
        super().__init__(model, config=None)
        self.embedded: list[tuple[bool, dict]] = []

    def prepare(self, batch, step):
        return batch | {"masked": batch["image"][:3]}

    def embed(self, batch):
        reps = {
            "image": F.normalize(self.model.image(batch["image"]), dim=-1),
            "text": F.normalize(self.model.text(batch["text"]), dim=-1),
        }
        masked = self.model.image(0.5 * batch["masked"]) if len(batch["masked"]) else reps["image"][:0]
        reps |= {"masked": masked, "spare": 2 * reps["text"]} | logit_scale_and_bias(self.model)
        self.embedded.append((torch.is_grad_enabled(), {name: rep.detach().clone() for name, rep in reps.items()}))
        return reps

    def terms(self, reps, batch):
        logits = reps["scale"] * reps["image"] @ reps["text"].T + reps["bias"]
        contrast = F.cross_entropy(logits, torch.arange(len(logits))) + F.softplus(logits).mean()
        masked = (reps["masked"] - reps["image"][: len(reps["masked"])]).square().mean()
        return {"loss": contrast + 0.3 * masked, "contrast": contrast, "masked": masked}


class Wrapper(nn.Module):
    """The part of DDP that accumulation uses: `module` and `no_sync`, with a record of synchronised passes."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module, self.synchronised, self.record = module, True, []

    def forward(self, *args, **kwargs):
        self.record.append(self.synchronised)
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self):
        self.synchronised = False
        yield
        self.synchronised = True


def make(dropout: float = 0.0, dtype=torch.float64, rows: int = 8):
    objective = Contrast(Towers(dropout).to(dtype))
    generator = torch.Generator().manual_seed(1)
    image, text = (torch.randn(rows, WIDTH, generator=generator).to(dtype) for _ in range(2))
    return objective, objective.prepare({"image": image, "text": text, "key": [str(i) for i in range(rows)]}, step=0)


def reference(rows: int = 8):
    """The plain loss on the whole batch, without accumulation."""
    objective, batch = make(rows=rows)
    terms = objective(batch)
    terms["loss"].backward()
    return {name: term.detach() for name, term in terms.items()}, gradients(objective)


@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5])
def test_micro_batches_equal_the_large_batch(parts, rows):
    """Five parts hold three masked rows, so two parts hold none."""
    terms, grads = reference(rows)
    objective, batch = make(rows=rows)
    accumulated = accumulate_backward(objective, batch, parts)
    assert_close(accumulated, terms, 1e-12)
    assert_close(gradients(objective), grads, 1e-12)
    assert not any(term.requires_grad for term in accumulated.values())


@pytest.mark.parametrize("parts", [1, 3])
def test_a_scaled_loss_scales_the_gradients_and_not_the_terms(parts):
    terms, grads = reference()
    objective, batch = make()
    scaled = accumulate_backward(objective, batch, parts, scale_loss=lambda loss: 1024 * loss)
    assert_close(scaled, terms, 1e-12)
    assert_close(gradients(objective), {name: 1024 * grad for name, grad in grads.items()}, 1e-12)


@pytest.mark.parametrize("outer", [False, True])
def test_under_autocast_every_weight_gets_its_gradient(outer):
    """Weights cast by the pass without a graph are cached for as long as an outer autocast lasts."""
    bfloat16 = partial(torch.autocast, "cpu", torch.bfloat16)
    plain, batch = make(dtype=torch.float32)
    accumulate_backward(plain, batch, 1, autocast=bfloat16)
    objective, _ = make(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=outer):
        accumulate_backward(objective, batch, 4, autocast=bfloat16)
    assert_close(gradients(objective), gradients(plain), 0.02)
    assert any(grad.abs().max() > 0.1 for grad in gradients(plain).values())


@pytest.mark.parametrize("parts", [2, 4])
def test_the_first_pass_keeps_no_graph_and_the_second_repeats_its_random_numbers(parts):
    objective, batch = make(dropout=0.5)
    accumulate_backward(objective, batch, parts)
    assert [grad for grad, _ in objective.embedded] == [False] * parts + [True] * parts
    for (_, first), (_, second) in zip(objective.embedded[:parts], objective.embedded[parts:]):
        assert_close(second, first, 0.0)
    assert not torch.equal(objective.embedded[0][1]["image"], objective.embedded[1][1]["image"])


def test_random_numbers_after_a_step_are_not_those_of_the_step():
    """Neither those of the model's passes nor those of a loss that samples."""
    objective, batch = make(dropout=0.5)
    drawn, terms = [], objective.terms

    def sampling(reps, batch):
        drawn.append(torch.rand(4))
        return terms(reps, batch)

    objective.terms = sampling
    torch.manual_seed(3)
    accumulate_backward(objective, batch, 2)
    after = torch.rand(4)
    torch.manual_seed(3)
    with torch.no_grad():
        for piece in split_batch(batch, 2):
            objective.embed(piece)
    assert len(drawn) == 1 and torch.equal(drawn[0], torch.rand(4))
    assert torch.equal(after, torch.rand(4))


def peak_saved_bytes(parts: int, rows: int = 96) -> int:
    """Largest number of bytes kept for backward at one time."""
    objective, batch = make(rows=rows)
    live = peak = 0

    class Kept:
        def __init__(self, tensor):
            self.tensor = tensor

    def release(size):
        nonlocal live
        live -= size

    def pack(tensor):
        nonlocal live, peak
        kept, size = Kept(tensor), tensor.numel() * tensor.element_size()
        live += size
        peak = max(peak, live)
        weakref.finalize(kept, release, size)
        return kept

    gc.collect()
    # The loss itself ties all rows, so only the passes of the model are counted.
    embed = objective.embed

    def counted(piece):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            return embed(piece)

    objective.embed = counted
    accumulate_backward(objective, batch, parts)
    objective.embedded.clear()
    gc.collect()
    assert live == 0
    return peak


def test_only_one_micro_batch_is_kept_for_backward_at_a_time():
    whole, quarter = peak_saved_bytes(1), peak_saved_bytes(4)
    assert whole > 100 * 96
    assert quarter < 0.35 * whole


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_wrapper_runs_every_pass_with_a_graph_and_synchronises_the_last(parts):
    _, grads = reference()
    objective, batch = make()
    wrapper = Wrapper(objective)
    accumulate_backward(wrapper, batch, parts)
    assert wrapper.record == [False] * (parts - 1) + [True]
    assert_close(gradients(unwrap(wrapper)), grads, 1e-12)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_a_batch_is_cut_into_views_in_order(parts):
    batch = {
        "image": torch.arange(10.0).reshape(5, 2),
        "masked": torch.arange(3),
        "key": list("abcde"),
        "temperature": torch.tensor(2.0),
        "name": "corpus",
    }
    pieces = split_batch(batch, parts)
    assert len(pieces) == parts
    assert torch.equal(torch.cat([piece["image"] for piece in pieces]), batch["image"])
    assert torch.equal(torch.cat([piece["masked"] for piece in pieces]), batch["masked"])
    assert sum((piece["key"] for piece in pieces), []) == batch["key"]
    for piece in pieces:
        assert len(piece["image"]) == len(piece["key"]) > 0
        assert piece["image"].untyped_storage().data_ptr() == batch["image"].untyped_storage().data_ptr()
        assert piece["temperature"] is batch["temperature"] and piece["name"] == "corpus"
    sizes = [len(piece["masked"]) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("parts", "message"), [(0, "0 micro-batches"), (6, "6 micro-batches of a batch of 5: give")])
def test_more_micro_batches_than_rows_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        split_batch({"image": torch.zeros(5, 2), "masked": torch.zeros(1, 2)}, parts)


def test_the_scale_is_clamped_to_a_hundred_in_place_and_may_come_back():
    towers = Towers()
    parameter = towers.logit_scale
    for value, kept in ((7.0, math.log(100.0)), (0.5, 0.5), (-3.0, -3.0), (7.0, math.log(100.0))):
        torch.nn.init.constant_(parameter, value)
        Contrast(towers).after_step()
        assert parameter is towers.logit_scale and parameter.item() == pytest.approx(kept)
    assert logit_scale_and_bias(towers)["scale"].item() == pytest.approx(100.0)
    logit_scale_and_bias(towers)["scale"].backward()
    assert parameter.grad.item() == pytest.approx(100.0)


def test_the_bias_that_is_logged_is_that_of_the_step_and_not_of_the_next_one():
    towers = Towers()
    reps = logit_scale_and_bias(towers)
    with torch.no_grad():
        towers.logit_scale.add_(1.0)
        towers.logit_bias.add_(1.0)
    assert reps["bias"].item() == -1.0 and reps["scale"].item() == pytest.approx(math.e)
