"""Construction of a run's model, tokenizer and transforms from its config."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from open_clip.transform import AugmentationCfg
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torchvision.transforms import Compose, Normalize, PILToTensor, ToTensor

from prolip.data.augment.affine import DeviceAugment, DeviceTransform
from prolip.data.augment.colour import ColourConfig, ColourJitter, split_augmentation
from prolip.data.augment.crops import RandomCrop
from prolip.data.augment.tokens import TokenAugment
from prolip.data.loader import Transform
from prolip.methods import find_method
from prolip.methods.base import Objective
from prolip.models.checkpoint import save_pretrained
from prolip.models.readers import kinds_of
from prolip.models.registry import find_weights, get_model_config
from prolip.models.tokenizer import get_tokenizer
from prolip.random import Draws
from prolip.utils.flags import FlagError
from training.checkpoint.files import check_checkpoint, load_checkpoint
from training.config import Config, RunConfig, build_config
from training.model_options import create_model
from training.parallel import World

Autocast = Callable[[], AbstractContextManager]
aten = torch.ops.aten
ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
KEPT = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default]
KEPT += [getattr(aten, f"_scaled_dot_product_{kind}").default for kind in ATTENTION]
DTYPES = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}


def build_tokenizer(config: Config) -> Any:
    """Return the model's tokenizer, or --tokenizer; None if the run reads no text."""
    if config.data.synthetic and not config.evaluates:
        return None
    own = config.model
    return get_tokenizer(own.model, tokenizer=own.tokenizer, context_length=own.force_context_length)


def build_model(config: Config, device: torch.device, load_weights: bool = True) -> tuple[Any, Transform, Compose]:
    """Return (model in training precision, transform for training, transform for evaluation)."""
    own = config.model
    check_augmentation(own.aug_cfg)
    warnings.filterwarnings("ignore", "Unused augmentation cfg items")  # OpenCLIP's warning lists used items
    method: dict[str, Any] | None = None
    chosen = find_method(config.method)
    if not chosen.adapts:  # saved with the model; with settings if the method extends it
        method = {"name": config.method} | ({"config": dataclasses.asdict(config.objective)} if chosen.extend else {})
    elif not own.pretrained and ":" not in own.model:
        what = f"--method {config.method} needs a trained model, but --model {own.model} has random weights"
        raise FlagError(f"{what}: give --model local-dir:RUN/model, or --pretrained")
    architecture, _ = get_model_config(own.model, tag=own.pretrained)
    if own.force_image_size is not None:
        architecture["vision_cfg"]["image_size"] = own.force_image_size
    if reason := chosen.objective.unserved(config.objective, architecture):
        towers = "; ".join(kinds_of(architecture))
        raise FlagError(f"--method {config.method} does not support --model {own.model} ({towers}): {reason}")
    model, transform, preprocess = create_model(own, device, load_weights, method)
    if own.grad_checkpointing and own.checkpoint_policy == "selective":
        checkpoint_selectively(model)
    elif own.grad_checkpointing:
        model.set_grad_checkpointing(True)
    if own.device_augment:  # the device augments and normalises the pixels, uint8 (3, H, W)
        pillow = [step for step in preprocess.transforms if not isinstance(step, (ToTensor, Normalize))]
        return model, Compose([*pillow, PILToTensor()]), preprocess
    halves = split_transform(config, model)
    return model, halves[0] if halves else transform, preprocess


def settle_statistics(config: Config, world: World, model: Any) -> str | None:
    """Configure BatchNorm: running statistics of trained weights, otherwise statistics of each batch. FlagError if a
    batch is not one pass of one process. Returns a note for the log, or None without BatchNorm.
    """
    if not any(isinstance(part, BatchNorm) and part.training for part in model.modules()):
        return None
    if find_weights(config.model.model, config.model.pretrained) is not None:
        for tower in model.towers().values():
            tower.keep_statistics()
        return "BatchNorm keeps the running statistics of the initial weights; its parameters are trained"
    accum = config.run.accum_freq
    cuts = {f"{world.world_size} ranks": world.world_size > 1, f"--accum-freq {accum}": accum > 1}
    cuts["--grad-checkpointing"] = config.model.grad_checkpointing
    if cut := next((cut for cut, there in cuts.items() if there), None):
        raise FlagError(
            f"{cut}, but {config.model.model} has BatchNorm with random weights, which needs a whole batch in one "
            "pass: train without it, or start from trained weights (--pretrained)"
        )
    return "BatchNorm uses the statistics of each batch, because the run starts from random weights"


def export_checkpoint(address: str, folder: Path, average: str | None = None) -> Path:
    """Write the model of a checkpoint, .../step_N.pt, or its `average` (ema, swa), for prolip.create_model."""
    check_checkpoint(address, flag="CHECKPOINT")
    state = load_checkpoint(address)
    if average and state.get(average) is None:
        raise FlagError(f"--{average}: the checkpoint holds no averaged weights; remove --{average}")
    values = dict(state["config"])
    config = build_config(values.pop("method"), values)
    # the run's initial weights may no longer exist
    model, _, _ = build_model(config, torch.device("cpu"), load_weights=False)
    inside, prefix = state["objective"], "model."
    own = {name.removeprefix(prefix): value for name, value in inside.items() if name.startswith(prefix)}
    model.load_state_dict(state[average] if average else own)
    return save_pretrained(model, folder, tokenizer=build_tokenizer(config))


def check_augmentation(aug_cfg: Mapping[str, Any]) -> None:
    """Raise FlagError for a setting that OpenCLIP's augmentation lacks, or a value out of range."""
    known = [field.name for field in dataclasses.fields(AugmentationCfg)]
    shares = ("color_jitter_prob", "gray_scale_prob", "re_prob")
    for name, value in aug_cfg.items():
        if name not in known:
            raise FlagError(f"--aug-cfg {name}={value}: unknown setting; use {', '.join(known)}")
        if name in shares and value is not None and not (isinstance(value, (int, float)) and 0 <= value <= 1):
            raise FlagError(f"--aug-cfg {name}={value} is not a probability: give a number from 0 to 1")
        numbers = value if name == "scale" else (1, 1)
        real = isinstance(numbers, (list, tuple)) and all(isinstance(number, (int, float)) for number in numbers)
        if not (real and len(numbers) == 2 and 0 < numbers[0] <= numbers[1] <= 1):
            remedy = "give two shares of the image, the smaller first, such as (0.8,1.0)"
            raise FlagError(f"--aug-cfg scale={value}: {remedy}")


def split_transform(config: Config, model: Any) -> tuple[RandomCrop, ColourConfig] | None:
    """Return the parts of --aug-cfg for workers and device; None if OpenCLIP's transform does all of it."""
    own = config.model
    if own.openclip_transform or config.data.synthetic:
        return None
    return split_augmentation(own.aug_cfg, model.image_size, own.dct_scaled_decoding)


def build_augment(config: Config, model: Any, device: torch.device, draws: Draws) -> DeviceTransform | None:
    """Build augmentation and normalisation on the device, with the model's statistics; None for normalised images."""
    mean, std = (getattr(model, name).flatten().tolist() for name in ("pixel_mean", "pixel_std"))
    augment: DeviceTransform
    if config.model.device_augment:
        augment = DeviceAugment(config.augment, mean, std, draws=draws)
    elif halves := split_transform(config, model):
        augment = ColourJitter(halves[1], mean, std, draws=draws)
    else:
        return None
    augment.cutout = config.augment
    return augment.to(device)


def build_token_augment(config: Config, model: Any, tokenizer: Any, device: Any, draws: Draws) -> TokenAugment | None:
    """Build the augmentation of token ids on the device; None if it is off. FlagError without a [MASK] token."""
    if not any(config.augment.token_shares):
        return None
    try:
        return TokenAugment.for_model(model, tokenizer, config.augment.token_shares, draws).to(device)
    except ValueError as error:
        raise FlagError(f"--text-mask: {error}") from None


def checkpoint_selectively(model: Any) -> None:
    """Recompute norms, activations and residuals in the backward pass; keep matrix products and attention."""
    contexts = partial(create_selective_checkpoint_contexts, KEPT)
    for tower in model.towers().values():
        for block in tower.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def distribute(objective: Objective, world: World, settings: RunConfig) -> nn.Module:
    """Wrap the objective in DDP if there are several ranks and it is not sharded. A static graph allows recomputed
    blocks.
    """
    if world.world_size == 1 or settings.fsdp:
        return objective
    wrap = nn.parallel.DistributedDataParallel
    # the buffers are constants; torch 2.15 renamed the setting
    known = inspect.signature(wrap).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    network = wrap(
        objective,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=settings.accum_freq == 1,
        **{buffers: False},  # type: ignore[arg-type]
    )
    # zero gradients fix the order of DDP's buckets now, not after the first step of a run: otherwise a resumed run
    # would add numbers in another order and differ by rounding
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    nothing: Any = lambda: torch.stack([(parameter * 0).sum() for parameter in trained]).sum()  # noqa: E731
    objective.forward = nothing  # type: ignore[method-assign]
    for _ in range(2):  # DDP needs two steps to record a static graph
        network().backward()
    del objective.forward
    for parameter in trained:
        parameter.grad = None
    return network


def check_precision(flag: str, precision: str, device: torch.device) -> None:
    """Raise FlagError for a precision that the device does not support."""
    if precision == "amp_fp16" and device.type == "cpu":
        raise FlagError(f"{flag} amp_fp16 needs CUDA, but the device is cpu: use amp_bf16 or fp32")
    if precision == "amp_bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        name = torch.cuda.get_device_name(device)
        raise FlagError(f"{flag} amp_bf16 is not supported by {name}: use amp_fp16 or fp32")


def autocast_for(precision: str, device: torch.device) -> Autocast:
    """Return a factory of contexts for forward passes in this precision."""
    if precision not in DTYPES:
        return contextlib.nullcontext
    return partial(torch.autocast, device.type, dtype=DTYPES[precision])


def attention_for(precision: str, device: torch.device) -> AbstractContextManager:
    """Return a context with plain attention for bf16 on the CPU: the fused kernel's backward pass takes 4x the time at
    20 to 70 tokens, 1.4x at 200 (torch 2.15). Enter it for the whole run, because blocks may be recomputed.
    """
    plain = precision == "amp_bf16" and device.type == "cpu"
    return sdpa_kernel(SDPBackend.MATH) if plain else contextlib.nullcontext()
