"""Settings of a run's model: the fields of a dataclass, which the command line shows as flags."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from prolip.methods.base import MAX_LOGIT_SCALE
from prolip.utils.fields import AUTO, option
from prolip.utils.flags import check_range

if TYPE_CHECKING:
    import torch
    from torchvision.transforms import Compose

    from prolip.models.prolip import ProLIP

#: Models that are taken on a GPU, and without one, where none is named.
BASE, SMALL = "ProLIP-ViT-B-16", "ProLIP-ViT-XS-16"
ResizeMode = Literal["shortest", "longest", "squash"]
# Fields whose names are keys of a model's configuration.
KEYS = ("init_logit_bias", "init_unc_bias", "init_unc_gain")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which network, from which weights, with which initial values, and what of it is trained."""

    model: str = option(
        AUTO,
        "model config, by name (prolip.list_models()) or hf-hub:/local-dir: address; auto: "
        f"{BASE} on a GPU, else {SMALL}",
    )
    pretrained: str | None = option(None, "weights to start from: a file, a folder, a hub name or a tag; none: random")
    force_image_size: int | None = option(None, "image size in pixels, instead of the model config's")
    force_context_length: int | None = option(None, "tokens of a text, instead of the model config's")
    image_resize_mode: ResizeMode | None = option(
        None, "how images of another shape become square, instead of as the weights were trained; squash: whole images"
    )
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

    def __post_init__(self) -> None:
        remedy = ", the bound on a; the paper starts at 10; it is a factor, not its logarithm"
        check_range(self, "init_logit_scale", most=MAX_LOGIT_SCALE, above=True, remedy=remedy)
        check_range(self, *KEYS, least=-math.inf)
        check_range(self, "force_image_size", "force_context_length", least=1)
        check_range(self, "lock_image_unlocked_groups", "lock_text_unlocked_layers")
        for tower, unlocked in (("image", "lock_image_unlocked_groups"), ("text", "lock_text_unlocked_layers")):
            if getattr(self, unlocked) and not getattr(self, f"lock_{tower}"):
                raise ValueError(f"--{unlocked.replace('_', '-')} without --lock-{tower}: add it, nothing is locked")

    def create(
        self,
        device: torch.device,
        aug_cfg: dict[str, Any],
        load_weights: bool = True,
        method_cfg: dict[str, Any] | None = None,
    ) -> tuple[ProLIP, Any, Compose]:
        """(model, transform for training, transform for evaluation), as `create_model_and_transforms`; towers locked.

        load_weights: without, parameters are drawn; method_cfg: {"name": ..., "config": {...}}.
        """
        from prolip.factory import create_model_and_transforms  # late: flags need no OpenCLIP

        changes = {name: value for name in KEYS if (value := getattr(self, name)) not in (None, AUTO)}
        if method_cfg is not None:
            changes["method_cfg"] = method_cfg
        if self.mask_padding:
            changes["mask_padding"] = True
        if self.init_logit_scale is not None:
            changes["init_logit_scale"] = math.log(self.init_logit_scale)
        model, transform, preprocess = create_model_and_transforms(
            self.model,
            pretrained=self.pretrained,
            device=device,
            force_image_size=self.force_image_size,
            force_context_length=self.force_context_length,
            load_weights=load_weights,
            image_resize_mode=self.image_resize_mode,
            aug_cfg=aug_cfg,
            **changes,
        )
        for name in ("init_logit_scale", "init_logit_bias"):  # asked for, whatever the weights have
            if name in changes:
                getattr(model, name.removeprefix("init_")).data.fill_(changes[name])
        if self.lock_image:
            model.lock_image_tower(unlocked_groups=self.lock_image_unlocked_groups)
        if self.lock_text:
            model.lock_text_tower(unlocked_layers=self.lock_text_unlocked_layers)
        return model, transform, preprocess
