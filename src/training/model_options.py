"""Settings of a run's model, which the command line shows as flags."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from prolip.methods.base import MAX_LOGIT_SCALE
from prolip.utils.fields import AUTO, option
from prolip.utils.flags import FlagError, check_range, flag_of

BASE, SMALL = "ProLIP-ViT-B-16", "ProLIP-ViT-XS-16"  # default models, on a GPU and without one
ResizeMode = Literal["shortest", "longest", "squash"]
KEYS = ("init_logit_bias", "init_unc_bias", "init_unc_gain")  # fields whose names are keys of a model's configuration

#: The paper's augmentation, B.1, in OpenCLIP's names.
AUGMENTATION = {
    "scale": (0.8, 1.0),
    "color_jitter": (0.32, 0.32, 0.32, 0.08),
    "color_jitter_prob": 0.8,
    "gray_scale_prob": 0.2,
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network, from which weights, on which tokens, by which augmentation, and what of it is trained."""

    model: str = option(AUTO, f"name (prolip.list_models()), hf-hub: or local-dir: address; auto: {BASE}, CPU: {SMALL}")
    pretrained: str | None = option(None, "weights to start from: a file, a folder, a hub name or a tag; none: random")
    force_image_size: int | None = option(None, "image size in pixels, instead of the model config's")
    force_context_length: int | None = option(None, "tokens of a text, instead of the model config's")
    image_resize_mode: ResizeMode | None = option(None, "how images become square, not as the weights were trained")
    init_unc_bias: float | None = option(None, "initial log sigma^2 of every dimension; paper: -10")
    init_unc_gain: float | None = option(None, "initial spread of log sigma^2 over inputs, the model config's: 0.1")
    mask_padding: bool = option(False, "hide padding from the text tower's attention; the paper does not")
    init_logit_scale: float | None = option(None, "initial a as it enters the logit a * similarity + b; paper: 10")
    init_logit_bias: float | None = option(
        AUTO,
        "initial b; paper: -10; auto: -log(global batch - 1), and from trained weights where the first batch has "
        "no slope in b (of methods with a sigmoid loss); none: the model's own",
        also=AUTO,
    )
    lock_image: bool = option(False, "freeze the image tower")
    lock_image_unlocked_groups: int = option(0, "leave the last groups of a locked image tower unlocked; 1: the heads")
    lock_text: bool = option(False, "freeze the text tower")
    lock_text_unlocked_layers: int = option(0, "leave the last layers of a locked text tower unlocked; 1: the heads")

    tokenizer: str | None = option(None, "name or local folder of the tokenizer, instead of the model config's")
    grad_checkpointing: bool = option(False, "recompute activations in the backward pass: less memory, a third slower")
    checkpoint_policy: Literal["full", "selective"] = option("full", "selective keeps matrix products and attention")
    torchcompile: bool = option(False, "compile both towers; the first steps take minutes")
    aug_cfg: dict[str, Any] = option(AUGMENTATION, "image augmentation as OpenCLIP's: --aug-cfg scale=(0.9,1.0) ...")
    device_augment: bool = option(False, "augment whole batches on the device by the `augment` flags, not by --aug-cfg")
    openclip_transform: bool = option(False, "augment by OpenCLIP's transform in the workers: a third of the speed")
    dct_scaled_decoding: bool = option(False, "decode large JPEGs at 1/2, 1/4 or 1/8: a quarter faster, lower quality")

    def __post_init__(self) -> None:
        bound = ", the bound on a; the paper starts at 10; it is a factor, not its logarithm"
        check_range(self, "init_logit_scale", most=MAX_LOGIT_SCALE, above=True, remedy=bound)
        check_range(self, *KEYS, least=-math.inf)
        check_range(self, "force_image_size", "force_context_length", least=1)
        check_range(self, "lock_image_unlocked_groups", "lock_text_unlocked_layers")
        for tower, unlocked in (("image", "lock_image_unlocked_groups"), ("text", "lock_text_unlocked_layers")):
            if getattr(self, unlocked) and not getattr(self, f"lock_{tower}"):
                raise FlagError(f"{flag_of(unlocked)} without --lock-{tower}: add it, nothing is locked")
        fast = not (self.device_augment or self.openclip_transform or self.aug_cfg.get("use_timm"))
        if self.dct_scaled_decoding and not fast:
            remedy = "leave it out, or leave out --device-augment, --openclip-transform and use_timm"
            raise FlagError(f"--dct-scaled-decoding is for --aug-cfg shared between workers and device: {remedy}")


def create_model(wanted: ModelConfig, device: Any, load_weights: bool, method: dict[str, Any] | None) -> Any:
    """As `create_model_and_transforms`, with locked towers. method: of the model's configuration, or None."""
    from prolip.factory import create_model_and_transforms  # late: flags need no OpenCLIP

    augmentation = {k: tuple(v) if isinstance(v, list) else v for k, v in wanted.aug_cfg.items()}  # JSON has no tuples
    scale = None if wanted.init_logit_scale is None else math.log(wanted.init_logit_scale)
    names = (*KEYS, "pretrained", "force_image_size", "force_context_length", "image_resize_mode")
    given = {name: getattr(wanted, name) for name in names} | {"init_logit_scale": scale, "method_cfg": method}
    given["mask_padding"] = wanted.mask_padding or None
    changes = {name: value for name, value in given.items() if value not in (None, AUTO)}
    model, transform, preprocess = create_model_and_transforms(
        wanted.model, device=device, load_weights=load_weights, aug_cfg=augmentation, **changes
    )
    for name in changes.keys() & {"init_logit_scale", "init_logit_bias"}:  # whatever the weights have
        getattr(model, name.removeprefix("init_")).data.fill_(changes[name])
    if wanted.lock_image:
        model.lock_image_tower(unlocked_groups=wanted.lock_image_unlocked_groups)
    if wanted.lock_text:
        model.lock_text_tower(unlocked_layers=wanted.lock_text_unlocked_layers)
    return model, transform, preprocess
