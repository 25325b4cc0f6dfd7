"""SigLIP and CLIP on the same towers, for comparison: OpenCLIP's losses on the means alone."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from open_clip.loss import ClipLoss, SigLipLoss
from torch import nn

from prolip.gaussian import upcast, without_autocast
from prolip.methods.base import Batch, Context, MeansObjective, Reps, Terms


@dataclass(kw_only=True)
class SigLIPConfig:
    """SigLIP has no constants besides scale and bias, which are the model's."""


@dataclass(kw_only=True)
class CLIPConfig:
    """CLIP has no constants besides the scale, which is the model's."""


class _DeterministicObjective(MeansObjective):
    """A contrastive loss of OpenCLIP's on the means."""

    contrastive: nn.Module
    #: What of the logit the loss takes.
    takes: tuple[str, ...]

    def terms(self, reps: Reps, batch: Batch) -> Terms:
        """loss, and what it takes of the detached scale and bias for the log."""
        image, text = upcast(reps["image_mean"]), upcast(reps["text_mean"])
        with without_autocast(image.device):
            loss = self.contrastive(image, text, *(reps[name] for name in self.takes))
        return {"loss": loss} | {name: reps[name].detach() for name in self.takes}


class SigLIPObjective(_DeterministicObjective):
    """Sigmoid loss over all pairs of the global batch / B (Zhai et al. 2023), in OpenCLIP's implementation.

    Its exchange sends texts both ways round the ring with gradients; the mean over ranks of these losses is the loss of
    one process, for any world size.
    """

    takes = ("scale", "bias")

    def __init__(self, model: Any, config: SigLIPConfig, context: Context | None = None):
        super().__init__(model, config, context)
        self.contrastive = SigLipLoss(rank=self.context.rank, world_size=self.context.world_size, dist_impl="bidir")


class CLIPObjective(_DeterministicObjective):
    """Symmetric cross-entropy over the global batch (Radford et al. 2021), in OpenCLIP's implementation.

    Local rows against gathered columns, gathered with gradients. Without these gradients OpenCLIP's loss gives the
    towers 1/W of theirs under DDP's mean (global rows), or leaves out what other ranks owe (local rows); global rows
    with gradients are exact too, but every rank scores all pairs. A bias cancels in the softmax, so it is frozen.
    """

    takes = ("scale",)

    def __init__(self, model: Any, config: CLIPConfig, context: Context | None = None):
        super().__init__(model, config, context)
        self.contrastive = ClipLoss(
            local_loss=True, gather_with_grad=True, rank=self.context.rank, world_size=self.context.world_size
        )
        model.logit_bias.requires_grad_(False)
