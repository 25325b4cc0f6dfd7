"""One step of every method as a GPU would run it: no mixed devices, and nothing that the host waits for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from no_gpu import CUDA, DeviceFault, KernelStandIn, Watch, watched, without_gpu
from training_runs import pool

import prolip
from prolip.embedder import encode
from prolip.methods import METHODS, source_free
from prolip.methods.base import Batch, Terms
from prolip.scores import CSDScore
from training.config import build_config
from training.health.errors import LossMeter
from training.loop import on_device, training_step
from training.model import build_augment, build_token_augment
from training.parallel import World
from training.run import build_trained
from training.state import DataState, TrainState

ROWS = 8
#: Terms that are off by default.
SETTINGS: dict[str, dict] = {"pcme": {"uniformity_weight": 1.0}, "pcmepp": {"clip_weight": 1.0}}
HOLES = {"cutout": 0.4, "cutout_prob": 0.5, "erase_prob": 0.3}
TOKENS = {"text_mask": 0.1, "text_random": 0.1, "text_delete": 0.1}
#: What the device does to images: all of it, or the colours alone, as the host draws them.
CHANGES = {"rotate": 9.0, "zoom": (0.9, 1.1), "brightness": 0.2, "contrast": 0.2, "saturation": 0.2, "hue": 0.1}
ALL = {"model": {"device_augment": True}, "augment": HOLES | CHANGES | {"greyscale_prob": 0.2}}
JITTER = {"color_jitter": (0.4, 0.4, 0.4, 0.1), "color_jitter_prob": 0.8, "gray_scale_prob": 0.2}
COLOURS = {"model": {"aug_cfg": JITTER}, "augment": HOLES}


def build(method: str, augment: dict[str, dict], opt: str = "adamw", **settings: Any) -> tuple[TrainState, DataState]:
    """Build the parts of a run on a GPU as the program does, within `without_gpu`."""
    torch.manual_seed(0)
    kind = METHODS[method]
    optim = {"opt": opt, "lr": 1e-3, "beta2": 0.95, "wd": 0.1, "warmup": 1, "grad_clip_norm": 1.0}
    sections = {
        "model": {"model": "ProLIP-ViT-test"} | augment["model"],
        "augment": augment["augment"] | ({} if kind.adapts else TOKENS),
        "data": {"train_data": "a.tar", "train_num_samples": ROWS, "batch_size": ROWS},
        "optim": optim | {"ema_decay": 0.99, "swa_epochs": 1},
        "run": {"max_steps": 4, "device": "cuda", "precision": "fp32"} | settings,
        "objective": SETTINGS.get(method, {}),
    }
    config = build_config(method, sections)
    model = prolip.create_model("ProLIP-ViT-test", method_cfg=None if kind.adapts else {"name": method})
    trained = build_trained(config, World(device=CUDA), model, (4, 4), None)
    objective = trained.objective.train()
    draws = objective.context.draws
    if kind.objective.needs(objective.config).pool is not None:
        objective.pool_state = objective.before_training(CSDScore(), pool(32))
    fed = DataState(
        loader=None,
        augment=build_augment(config, model, CUDA, draws),
        global_batch=ROWS,  # type: ignore[arg-type]
        token_augment=build_token_augment(config, model, None, CUDA, draws),
    )
    assert fed.augment is not None and (fed.token_augment is None) == kind.adapts
    return trained, fed


def host_batch(watch: Watch, method: str) -> Batch:
    """A batch as the loader gives it on CUDA: tensors in pinned memory, keys in a list."""
    place = torch.arange(ROWS)
    batch: Batch = {"image": torch.randint(0, 256, (ROWS, 3, 32, 32), dtype=torch.uint8)}
    batch |= {"text": torch.ones(ROWS, 6, dtype=torch.int64), "caption_id": place, "caption_ids": place[:, None]}
    if METHODS[method].adapts:  # which finds texts itself
        batch = {"image": batch["image"]}
    return {name: watch.pin(x.clone()) for name, x in batch.items()} | {"key": [f"k{n}" for n in range(ROWS)]}


def steps(watch: Watch, method: str, trained: TrainState, fed: DataState) -> tuple[Terms, LossMeter]:
    """A step, which looks at its inputs and makes constants, and a second one, watched; as in `loop.train`."""
    meter, given = LossMeter(), [host_batch(watch, method) for _ in range(2)]

    def step(number: int) -> Terms:
        batch = on_device(fed, given[number], number, CUDA)
        terms = training_step(trained, batch, number)
        meter.add(terms, number + 1, batch["key"])
        return terms

    step(0)
    with watched(watch):
        return step(1), meter


@pytest.fixture
def kernel() -> KernelStandIn:
    return KernelStandIn()


@pytest.fixture
def gpu(kernel) -> Iterator[Watch]:
    with without_gpu(kernel) as watch:
        yield watch


TWO, ONE, HALF = (COLOURS, {"accum_freq": 2}), (ALL, {"accum_freq": 1}), (COLOURS, {"precision": "amp_fp16"})
CASES = {f"{method}, two": (method, *TWO) for method in METHODS}
CASES |= {f"{method}, one": (method, *ONE) for method in ("prolip", "siglip", "pcme", "source-free")}
CASES["infonce, fp16"] = ("infonce", *HALF)


@pytest.mark.parametrize("method,augment,settings", CASES.values(), ids=CASES)
def test_a_step_mixes_no_devices_and_waits_for_none(gpu, kernel, method, augment, settings):
    """Steps have one or two micro-batches. GradScaler scales; autocast is replaced where meta tensors lack casts."""
    trained, fed = build(method, augment, **settings)
    assert trained.scaler.is_enabled() == ("precision" in settings)
    terms, _ = steps(gpu, method, trained, fed)
    assert gpu.seen > 1000
    assert all(x.device == CUDA for x in terms.values())
    assert all(x.device == CUDA for x in trained.averages["ema"].module.parameters())
    assert {p.grad for p in trained.objective.parameters()} == {None}
    moments = [x for state in trained.optimizer.state.values() for x in state.values()]
    assert moments and all(x.device == CUDA for x in moments)
    assert (kernel.starts > 0) == (method in ("prolip", "likelihood"))


@pytest.mark.parametrize("method", METHODS)
def test_evaluation_waits_for_what_it_looks_at_and_for_its_results_alone(gpu, method):
    trained, _ = build(method, ALL)
    inputs = {"image": torch.randn(ROWS, 3, 32, 32), "text": torch.ones(ROWS, 6, dtype=torch.int64)}
    for side, batch in inputs.items():
        with watched(gpu, "to_cpu", "check_pixels", "check_indices"):
            z = encode(trained.objective.model, side, CUDA, "fp32", gpu.pin(batch))
        assert z.mean.device.type == "cpu" and z.mean.shape == (ROWS, trained.objective.model.embed_dim)
        assert sorted(gpu.waits) == sorted(["to_cpu", "to_cpu", "check_pixels" if side == "image" else "check_indices"])


def test_lines_of_the_log_wait_where_they_read_the_terms(gpu):
    _, meter = steps(gpu, "siglip", *build("siglip", COLOURS))
    for read in (meter.check, meter.read):
        with watched(gpu), pytest.raises(DeviceFault, match="looks at values|copied to the host"):
            read(World())


def test_an_optimiser_that_is_not_fused_waits_where_the_step_says_so(gpu):
    with pytest.raises(DeviceFault, match=r"_local_scalar_dense.*training/loop.py"):
        steps(gpu, "siglip", *build("siglip", COLOURS, opt="adamp"))


def test_pairs_of_no_pinned_memory_are_found(gpu, monkeypatch):
    """Source-free adaptation once sent such pairs."""
    monkeypatch.setattr(source_free, "to_device", lambda device, *x: [one.to(device, non_blocking=True) for one in x])
    with pytest.raises(DeviceFault, match="not pinned.*source_free.py"):
        steps(gpu, "source-free", *build("source-free", COLOURS))
