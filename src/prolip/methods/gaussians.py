"""Shared parts of the methods that compare Gaussians of their own heads on both towers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from prolip.flops import image_sides
from prolip.gaussian import Gaussian
from prolip.methods.base import Batch, Context, Objective, Reps, Terms, flat, gaussian_of, logit_scale_and_bias
from prolip.utils.fields import option
from prolip.utils.flags import check_range


@dataclass(kw_only=True)
class HeadsConfig:
    """Settings of a method's own heads."""

    pooled_heads: bool = option(True, "use the method's own heads over all tokens, not the model's means")
    head_dim: int | None = option(None, "D, output width of these heads; none: the model's embedding width")
    known_matches: bool = option(True, "count every true caption of an image in the batch as a match")

    def __post_init__(self) -> None:
        check_range(self, "head_dim", least=2, remedy=", such as 1024")


class HeadsObjective(Objective):
    """Gaussians of images and texts by a method's own heads; replaced parts of the towers are frozen."""

    statistics: tuple[str, ...] = ("scale", "bias", "trace_image", "trace_text")
    reads: tuple[str, ...] = Gaussian._fields  # parts of the Gaussians that the loss reads

    def __init__(self, model: Any, config: Any, context: Context | None = None):
        super().__init__(model, config, context)
        freeze_unread(model, [*model.visual.parameters(), *model.text.parameters()], self.reads)

    def notes(self, batch: int) -> tuple[str, ...]:
        """Return a note if the method's own heads replace means of the loaded weights that could be kept."""
        if not any(tower.has_reader and tower.head is not None for tower in (self.model.visual, self.model.text)):
            return ()
        return ("the method's own heads make new means; --no-pooled-heads keeps OpenCLIP's embedding",)

    def embed(self, batch: Batch) -> Reps:
        image, text = (flat(side, self.encode(side, batch[side])) for side in ("image", "text"))
        return image | text | logit_scale_and_bias(self.model)

    def gaussians(self, reps: Reps) -> tuple[Gaussian, Gaussian, Terms]:
        """Return images and texts, in float32, and their mean traces for the log."""
        image, text = gaussian_of(reps, "image"), gaussian_of(reps, "text")
        return image, text, {"trace_image": image.trace.detach().mean(), "trace_text": text.trace.detach().mean()}


def freeze_unread(model: Any, parameters: Iterable[nn.Parameter], parts: Iterable[str] = Gaussian._fields) -> None:
    """Freeze those of `parameters` that do not affect these parts of the model's Gaussians; DDP would wait for them.

    One pass of zeros finds them, in evaluation mode: running statistics stay, and PyTorch's GRUs, not cuDNN's, have a
    backward pass.
    """
    wanted, training = [parameter for parameter in parameters if parameter.requires_grad], model.training
    device, dtype = model.logit_scale.device, model.logit_scale.dtype
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        model.eval()
        image = model.encode_image(torch.zeros(1, 3, *image_sides(model), device=device, dtype=dtype))
        text = model.encode_text(torch.zeros(1, model.context_length, dtype=torch.int64, device=device))
        model.train(training)
        outputs = torch.stack([getattr(z, part).sum() for z in (image, text) for part in parts])
        found = torch.autograd.grad(outputs.sum(), wanted, allow_unused=True)
    for parameter, gradient in zip(wanted, found):
        parameter.requires_grad_(gradient is not None)


def begin_as(norm: nn.LayerNorm, projection: nn.Linear, tower: Any) -> None:
    """Copy the norm and projection of `tower`'s means to a head's (width -> D).

    A head on OpenCLIP's towers, which have many kinds of these, or of another width keeps its own initial weights.
    """
    if tower.has_reader or projection.out_features != tower.output_dim:
        return
    image = hasattr(tower, "proj")  # OpenCLIP's names
    own_norm, own = (tower.ln_post, tower.proj) if image else (tower.ln_final, tower.text_projection)
    linear = isinstance(own, nn.Linear)
    with torch.no_grad():
        norm.load_state_dict(own_norm.state_dict())
        projection.weight.copy_(own.weight if linear else own.T)
        if linear and own.bias is not None:
            projection.bias.copy_(own.bias)
        else:
            projection.bias.zero_()


def linear_parts(width: int, dim: int, init_log_var: float, chosen: Sequence[str] = Gaussian._fields) -> nn.ModuleDict:
    """Return a projection to the `mean` and one to the `log_var`, which starts around `init_log_var`."""
    parts = {}
    for part in chosen:
        layer = nn.Linear(width, dim)
        nn.init.xavier_uniform_(layer.weight)
        nn.init.constant_(layer.bias, init_log_var if part == "log_var" else 0.0)
        parts[part] = layer
    return nn.ModuleDict(parts)
