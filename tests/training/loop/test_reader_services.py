"""Training features for every kind of OpenCLIP's towers: exact micro-batches and ranks, frozen layers, recomputed
activations, shards, compiled towers, other sizes, and runs that stop and resume.
"""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from distributed_helpers import run_ranks
from safetensors.torch import load_file
from small_towers import NAMES, OLD_TIMM, inputs, small_folder, small_towers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from training_runs import assert_same_state, newest, stop_after, words

import prolip
from prolip.methods import find_method
from prolip.methods.accumulate import accumulate_backward, join_reps, split_batch
from prolip.methods.base import Context, Objective
from prolip.utils.flags import FlagError
from training.checkpoint.files import load_checkpoint
from training.config import OptimConfig, RunConfig, build_config
from training.health.signals import EXIT_STOPPED
from training.main import main
from training.model import checkpoint_selectively, distribute, settle_statistics
from training.optim import parameter_groups
from training.parallel import World, seed_step, shard_model, whole_model

#: What the issue names for shards and compiled towers.
LARGE = ("ViT-B-16", "ViT-B-16-SigLIP", "convnext_base", "xlm-roberta-base-ViT-B-32", "coca_ViT-B-32")


def default(*names: str) -> list[Any]:
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return the folder of small models; timm's and transformers' towers are small at the same time."""
    place = tmp_path_factory.mktemp("small")
    with small_towers(place / "transformers"):
        yield place


def folder(root: Path, name: str) -> Path:
    place = root / name
    return place if place.exists() else small_folder(name, place)


def model_of(root: Path, name: str, **options: Any) -> Any:
    """The small model, for images of 64 pixels where it has no windows; readers are the same in every call, and as wide
    as their differences do not drown in rounding.
    """
    place = folder(root, name)
    torch.manual_seed(1)
    size = {"init_unc_bias": -3.0} | ({} if name.startswith("swin") else {"force_image_size": 64})
    return prolip.create_model(f"local-dir:{place}", **(size | options))


def objective_of(model: Any, context: Context | None = None) -> Objective:
    chosen = find_method("prolip")
    return chosen.objective(model, chosen.config(alpha1=0.1, alpha2=0.5, beta=0.01, mask_fraction=0.5), context)


def batch_of(model: Any, rows: int) -> dict[str, Tensor]:
    return dict(zip(("image", "text"), inputs(model, rows, seed=2)))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


def assert_alike(got: dict[str, Tensor], want: dict[str, Tensor], part: float = 1e-4) -> None:
    assert got.keys() == want.keys()
    least = 1e-3 * max(value.norm() for value in want.values())
    for name, value in want.items():
        assert (got[name] - value).norm() <= part * max(value.norm(), least), name


def without_drops(module: nn.Module) -> None:
    for part in module.modules():
        for own in ("drop_prob", "dropout", "activation_dropout", *(["p"] if isinstance(part, nn.Dropout) else [])):
            if isinstance(getattr(part, own, None), float):
                setattr(part, own, 0.0)


RELPOS = pytest.param(
    "vit_relpos_medium_patch16_cls_224",
    marks=pytest.mark.skipif(OLD_TIMM, reason="timm 1.0.21 has no other image sizes there"),
)
DROPS = ("convnext_base", "xlm-roberta-base-ViT-B-32")
SLOW_DROPS = ("nllb-clip-base", "ViTamin-B", "swin_base_patch4_window7_224", "mt5-base-ViT-B-32", "MobileCLIP2-L-14")


@pytest.mark.parametrize("name", [*DROPS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_DROPS)])
def test_micro_batches_backpropagate_through_what_the_first_pass_drew(root, name):
    """The gradient of the loss of these very draws: embed each micro-batch with a graph, in the same order."""
    objective = objective_of(model_of(root, name)).train()
    batch = objective.prepare(batch_of(objective.model, 6), 0)
    losses = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        reps = [objective.embed(piece) for piece in split_batch(batch, 3)]
        losses.append(objective.logged(join_reps(reps), batch)["loss"])
    assert losses[0] != losses[1]  # or nothing was drawn
    losses[0].backward()
    want = gradients(objective)
    torch.manual_seed(3)
    terms = accumulate_backward(objective, batch, 3)
    assert terms["loss"] == pytest.approx(losses[0].item(), rel=1e-6)
    assert_alike(gradients(objective), want)


def test_ranks_draw_other_numbers_than_each_other():
    drawn = []
    for rank in (0, 1, 2):
        for step in (0, 1):
            seed_step(7, step, World(rank=rank, world_size=3))
            drawn.append(torch.rand(4))
    assert len({tuple(one.tolist()) for one in drawn}) == 6
    seed_step(7, 1, World())
    assert torch.equal(torch.rand(4), drawn[1])  # the first rank draws what one process draws


@pytest.mark.parametrize("name", ["RN50", pytest.param("MobileCLIP-S1", marks=pytest.mark.slow)])
def test_trained_statistics_stay_and_micro_batches_are_exact_with_them(root, name):
    config = run_config(f"local-dir:{folder(root, name)}", accum_freq=3, grad_checkpointing=True)
    model = model_of(root, name)
    for part in model.modules():
        if isinstance(part, BatchNorm):
            part.momentum = 1.0
    model.encode_image(batch_of(model, 8)["image"])  # as after training: activations are of size 1
    assert "keeps the running statistics" in settle_statistics(config, World(world_size=2), model)
    objective = objective_of(model).eval().train()
    before = statistics(model)
    batch = objective.prepare(batch_of(model, 6), 0)
    objective(batch)["loss"].backward()
    want = gradients(objective)
    norms = {f"model.visual.{n}.weight" for n, part in model.visual.named_modules() if isinstance(part, BatchNorm)}
    assert norms and norms <= want.keys()  # its parameters learn
    accumulate_backward(objective, batch, 3)
    assert_alike(gradients(objective), want)
    assert all(torch.equal(value, before[name]) for name, value in statistics(model).items())


def statistics(model: Any) -> dict[str, Tensor]:
    return {
        f"{name}.{own}": value.clone()
        for name, part in model.named_modules()
        if isinstance(part, BatchNorm)
        for own, value in part.named_buffers()
    }


def run_config(name: str, **options: Any) -> Any:
    model = {"model": name, "grad_checkpointing": options.pop("grad_checkpointing", False)}
    return build_config("prolip", {"model": model, "run": options})


CUTS = {"--accum-freq 2": {"accum_freq": 2}, "--grad-checkpointing": {"grad_checkpointing": True}, "2 ranks": {}}


@pytest.mark.parametrize("cut", CUTS)
def test_batch_statistics_of_random_weights_are_refused_where_a_batch_is_not_one_pass(root, cut):
    model = model_of(root, "RN50", load_weights=False)
    ranks = World(world_size=2 if cut == "2 ranks" else 1)
    with pytest.raises(FlagError, match=f"{cut}, but RN50 has BatchNorm.*start from trained weights"):
        settle_statistics(run_config("RN50", **CUTS[cut]), ranks, model)
    assert "uses the statistics of each batch" in settle_statistics(run_config("RN50"), World(), model)
    before = statistics(model)
    objective = objective_of(model)
    objective(objective.prepare(batch_of(model, 4), 0))
    assert not any(torch.equal(value, before[name]) for name, value in statistics(model).items())
    model.lock_image_tower()
    assert settle_statistics(run_config("RN50", **CUTS[cut]), ranks, model) is None


def rank_gradients(rank: int, ranks: int, root: Path, name: str, way: str) -> dict[str, Tensor]:
    """Gradients of this rank's rows of a batch of 4: alone, or by two micro-batches in DDP or in shards."""
    world = World(rank=rank, world_size=ranks)
    with small_towers(root / f"transformers{rank}") if ranks > 1 else nullcontext():
        objective = objective_of(model_of(root, name), Context(rank=rank, world_size=ranks))
        without_drops(objective)
        objective.model.visual.keep_statistics()
        batch = {key: value[rank::ranks] for key, value in batch_of(objective.model, 4).items()}
        batch = objective.prepare(batch, 0)
        parts = 1 if way == "alone" else 2
        if way == "shards":
            before = {name: value.clone() for name, value in objective.model.state_dict().items()}
            shard_model(objective.model, world, torch.bfloat16)  # which stay float32 on the CPU
            copy = whole_model(objective.model, world, everywhere=True).state_dict()
            assert all(torch.equal(copy[name], value) for name, value in before.items())  # as checkpoints have it
        network = distribute(objective, world, RunConfig(fsdp=way == "shards", accum_freq=parts)).train()
        accumulate_backward(network, batch, parts)
        found = gradients(objective).items()
        return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found}


DEFAULT = [("shards", "ViT-B-16-SigLIP"), ("ddp", "RN50")]
OTHERS = {*(("shards", name) for name in LARGE), *(("ddp", name) for name in NAMES)} - set(DEFAULT)


@pytest.mark.parametrize("way, name", [*DEFAULT, *(pytest.param(*x, marks=pytest.mark.slow) for x in sorted(OTHERS))])
def test_shards_and_ranks_with_micro_batches_give_the_gradients_of_one_process(root, way, name):
    want = rank_gradients(0, 1, root, name, "alone")
    for got in run_ranks(2, rank_gradients, 2, root, name, way):
        assert_alike(got, want)


ENDS = ("ViT-B-16-SigLIP", "RN50", "mt5-base-ViT-B-32")


@pytest.mark.parametrize("name", default(*ENDS))
def test_the_last_layers_learn_and_no_others(root, name):
    """lock(n + 1) leaves those that get a gradient where the input of the n-th block from the end is a constant."""
    model = model_of(root, name).train()
    batch = batch_of(model, 2)
    for tower, rows in ((model.visual, batch["image"]), (model.text, batch["text"])):
        for blocks in (1, 2):
            tower.requires_grad_(True)
            hook = tower.blocks[-blocks].register_forward_pre_hook(as_constants, with_kwargs=True)
            tower.zero_grad(set_to_none=True)
            tower(rows).mean.pow(3).sum().backward()
            hook.remove()
            want = {name for name, p in tower.tower.named_parameters() if p.grad is not None}
            tower.lock(blocks + 1)
            assert {name for name, p in tower.tower.named_parameters() if p.requires_grad} == want
        tower.lock(0)
        assert not any(p.requires_grad for p in tower.tower.parameters()) and not tower.tower.training
        assert all(p.requires_grad for p in tower.reader.parameters()) and tower.reader.training
        model.train()
        assert not tower.tower.training  # the mean is the same in training as in evaluation


def as_constants(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    cut = [value.detach() if isinstance(value, Tensor) else value for value in args]
    return tuple(cut), {key: value.detach() if isinstance(value, Tensor) else value for key, value in kwargs.items()}


def test_a_frozen_part_runs_as_in_evaluation(root):
    """Dropout and drop path of what learns draw, of what does not they do not."""
    model = model_of(root, "xlm-roberta-base-ViT-B-32").train()
    layers, embeddings = model.text.blocks, model.text.tower.transformer.embeddings
    model.lock_text_tower(unlocked_layers=2)
    assert layers[-1].training and not layers[0].training and not embeddings.dropout.training
    model.train()
    assert layers[-1].training and not layers[0].training and not embeddings.dropout.training


@pytest.mark.parametrize("name", default("ViT-B-16-SigLIP", "RN50"))
def test_layers_decay_and_backbones_learn_at_rates_of_their_own(root, name):
    model = model_of(root, name)
    depths = model.depths()
    config = OptimConfig(layer_decay=0.5, image_lr_mult=0.1, lr=1.0, wd=0.2)
    places = {
        own: (group["lr_scale"], group["weight_decay"], group["backbone"])
        for group in parameter_groups(objective_of(model), config)
        for own in (full.removeprefix("model.") for full in group["names"])
    }
    trained = {own: p for own, p in model.named_parameters() if p.requires_grad}
    assert places.keys() == trained.keys()
    for own, (rate, decay, backbone) in places.items():
        image = own.startswith("visual.tower.")
        assert backbone == ("image" if image else None), own
        assert rate == pytest.approx(0.5 ** depths.get(own, 0) * (0.1 if image else 1.0)), own
        assert depths.get(own, 0) == 0 or ".tower." in own
        assert decay == 0 or trained[own].ndim > 1
    for side in ("visual", "text"):
        deepest = max(depth for own, depth in depths.items() if own.startswith(side))
        assert deepest == len(model.towers()["image" if side == "visual" else "text"].blocks) + 1
    kept = {own for own, (_, decay, _) in places.items() if decay == 0 and trained[own].ndim > 1}
    assert kept == theirs(model) & trained.keys()


def theirs(model: Any) -> set[str]:
    found = set()
    for side, tower in (("visual", model.visual.tower), ("text", model.text.tower)):
        inner, prefix = (tower.trunk, "tower.trunk.") if hasattr(tower, "trunk") else (tower, "tower.")
        names = inner.no_weight_decay() if hasattr(inner, "no_weight_decay") else ()
        found |= {f"{side}.{prefix}{own}" for own in names if dict(inner.named_parameters()).get(own) is not None}
        learnt = [own for own, p in inner.named_parameters() if own in ("pos_embed", "positional_embedding")]
        assert all(f"{side}.{prefix}{own}" in found for own in learnt)
    return {own for own in found if dict(model.named_parameters())[own].ndim > 1}


@pytest.mark.parametrize("name", default("ViT-B-16-SigLIP", "convnext_base"))
def test_recomputing_gives_the_same_gradients_and_can_be_switched_off(root, name):
    """The second pass uses the random numbers of the first."""
    found = {}
    for policy in ("none", "full", "selective", "off"):
        objective = objective_of(model_of(root, name)).train()
        objective.model.visual.keep_statistics()
        if policy in ("full", "off"):
            objective.model.set_grad_checkpointing(True)
        if policy == "off":
            objective.model.set_grad_checkpointing(False)
        if policy == "selective":
            checkpoint_selectively(objective.model)
        torch.manual_seed(5)
        objective(objective.prepare(batch_of(objective.model, 3), 0))["loss"].backward()
        found[policy] = gradients(objective)
    for policy in ("full", "selective", "off"):
        assert_alike(found[policy], found["none"], part=1e-5)


SIZED = ("ViT-B-16", "ViT-B-16-SigLIP", "EVA02-B-16", RELPOS, "convnext_base")


@pytest.mark.parametrize("name", SIZED)
def test_another_image_size_gives_what_openclip_gives(root, name):
    theirs = open_clip.create_model(f"local-dir:{folder(root, name)}", force_image_size=256).eval()
    ours = model_of(root, name, force_image_size=256).eval()
    images = torch.randn(2, 3, 256, 256, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert ours.image_size == (256, 256)
        torch.testing.assert_close(ours.encode_image(images).mean, theirs.encode_image(images, normalize=True))


RUNS = ("ViT-B-16-SigLIP2", "convnext_base", "xlm-roberta-base-ViT-B-32", "coca_ViT-B-32")


@pytest.mark.parametrize("name", [RUNS[3], *(pytest.param(name, marks=pytest.mark.slow) for name in RUNS[:3])])
def test_a_stopped_run_goes_on_bit_for_bit(root, tmp_path, name):
    """This includes drop path and dropout. CoCa's decoder, which is not trained, is in the checkpoint and the model."""
    start = folder(root, name)

    def line(run: str, *more: object) -> list[str]:
        return words(
            tmp_path,
            run,
            *shlex.split(
                f"--model local-dir:{start} --max-steps 4 --batch-size 4 --train-num-samples 16 --save-every-steps 2 "
                "--ema-decay 0.9 --init-logit-bias -5 --force-image-size 64"
            ),
            *more,
        )

    assert main(line("whole")) == 0
    assert stop_after(2, line("stopped")) == EXIT_STOPPED
    assert newest(tmp_path / "stopped").endswith("step_2.pt")
    assert main(line("stopped", "--resume", "latest")) == 0
    assert_same_state(Path(newest(tmp_path / "whole")), Path(newest(tmp_path / "stopped")))
    before, after = (load_file(place / "open_clip_model.safetensors") for place in (start, tmp_path / "stopped/model"))
    same = {own: value for own, value in before.items() if value.shape == after[own].shape}  # positions are new ones
    moved = {own for own, value in same.items() if not torch.equal(value, after[own])}
    decoder = {own for own in before if own.startswith("text_decoder.")}
    assert bool(decoder) == name.startswith("coca") and not decoder & moved
    assert any(own.startswith("visual.") for own in moved) and any(own.startswith("text.") for own in moved)
    kept = load_checkpoint(newest(tmp_path / "stopped"))["objective"]
    assert all(torch.equal(kept[f"model.{own}"], before[own]) for own in decoder)
