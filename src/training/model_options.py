"""Settings of a run's model, shown as flags on the command line."""

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
    """Network, initial weights, tokenizer, augmentation, and trained parts."""

    model: str = option(AUTO, f"prolip.list_models() name, hf-hub: or local-dir: address; auto: {BASE}, CPU: {SMALL}")
    pretrained: str | None = option(None, "initial weights: a file, a folder, a hub name or a tag; none: random")
    force_image_size: int | None = option(None, "image size in pixels, instead of the model config's")
    force_context_length: int | None = option(None, "tokens per text, instead of the model config's")
    image_resize_mode: ResizeMode | None = option(None, "resizing to a square, instead of the weights' own")
    init_unc_bias: float | None = option(None, "initial log sigma^2 of every dimension; paper: -10")
    init_unc_gain: float | None = option(None, "initial spread of log sigma^2 over inputs; model configs: 0.1")
    mask_padding: bool = option(False, "mask padding in the text tower's attention; the paper does not")
    init_logit_scale: float | None = option(None, "initial a of the logit a * similarity + b (not log a); paper: 10")
    init_logit_bias: float | None = option(
        AUTO,
        "initial b; paper: -10; auto (sigmoid losses): -log(global batch - 1), from trained weights the b that "
        "balances the first batch; none: the model's own",
        also=AUTO,
    )
    lock_image: bool = option(False, "freeze the image tower")
    lock_image_unlocked_groups: int = option(0, "train the last N groups of a locked image tower; 1: the heads")
    lock_text: bool = option(False, "freeze the text tower")
    lock_text_unlocked_layers: int = option(0, "train the last N layers of a locked text tower; 1: the heads")

    tokenizer: str | None = option(None, "name or local folder of the tokenizer, instead of the model config's")
    grad_checkpointing: bool = option(False, "recompute activations in the backward pass: saves memory, a third slower")
    checkpoint_policy: Literal["full", "selective"] = option("full", "selective keeps matrix products and attention")
    torchcompile: bool = option(False, "compile both towers; the first steps take minutes")
    aug_cfg: dict[str, Any] = option(AUGMENTATION, "OpenCLIP's image augmentation: --aug-cfg scale=(0.9,1.0) ...")
    device_augment: bool = option(False, "augment on the device with the `augment` flags, not with --aug-cfg")
    openclip_transform: bool = option(False, "augment with OpenCLIP's transform in the workers: a third of the speed")
    dct_scaled_decoding: bool = option(False, "decode large JPEGs at 1/2, 1/4 or 1/8: a quarter faster, lower quality")

    def __post_init__(self) -> None:
        bound = ", the bound on a; give a factor, not its logarithm (paper: 10)"
        check_range(self, "init_logit_scale", most=MAX_LOGIT_SCALE, above=True, remedy=bound)
        check_range(self, *KEYS, least=-math.inf)
        check_range(self, "force_image_size", "force_context_length", least=1)
        check_range(self, "lock_image_unlocked_groups", "lock_text_unlocked_layers")
        for tower, unlocked in (("image", "lock_image_unlocked_groups"), ("text", "lock_text_unlocked_layers")):
            if getattr(self, unlocked) and not getattr(self, f"lock_{tower}"):
                raise FlagError(f"{flag_of(unlocked)} needs a locked tower: add --lock-{tower}")
        fast = not (self.device_augment or self.openclip_transform or self.aug_cfg.get("use_timm"))
        if self.dct_scaled_decoding and not fast:
            remedy = "remove it, or remove --device-augment, --openclip-transform and use_timm"
            raise FlagError(f"--dct-scaled-decoding needs --aug-cfg split between workers and device: {remedy}")


def create_model(own: ModelConfig, device: Any, load_weights: bool, method: dict[str, Any] | None) -> Any:
    """Call `create_model_and_transforms`, then lock towers. method: for the model's configuration, or None."""
    from prolip.factory import create_model_and_transforms  # slow, and flags do not need OpenCLIP

    augmentation = {k: tuple(v) if isinstance(v, list) else v for k, v in own.aug_cfg.items()}  # JSON has no tuples
    scale = None if own.init_logit_scale is None else math.log(own.init_logit_scale)
    names = (*KEYS, "pretrained", "force_image_size", "force_context_length", "image_resize_mode")
    given = {name: getattr(own, name) for name in names} | {"init_logit_scale": scale, "method_cfg": method}
    given["mask_padding"] = own.mask_padding or None
    changes = {name: value for name, value in given.items() if value not in (None, AUTO)}
    model, transform, preprocess = create_model_and_transforms(
        own.model, device=device, load_weights=load_weights, aug_cfg=augmentation, **changes
    )
    for name in changes.keys() & {"init_logit_scale", "init_logit_bias"}:  # also over the weights' values
        getattr(model, name.removeprefix("init_")).data.fill_(changes[name])
    if own.lock_image:
        model.lock_image_tower(unlocked_groups=own.lock_image_unlocked_groups)
    if own.lock_text:
        model.lock_text_tower(unlocked_layers=own.lock_text_unlocked_layers)
    return model, transform, preprocess
