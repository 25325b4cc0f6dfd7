"""SigLIP, CLIP and InfoNCE with known matches on the same towers, for comparison: losses on the means alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prolip.gaussian import upcast, without_autocast
from prolip.losses import dot_products, softmax_loss, tiled_loss_over_ranks, transpose_over_ranks
from prolip.methods.base import Batch, Context, KnownMatches, MeansObjective, Reps, Terms, clip_loss
from prolip.utils.fields import option


@dataclass(kw_only=True)
class SigLIPConfig:
    """SigLIP has no constants besides scale and bias, which are the model's."""


@dataclass(kw_only=True)
class CLIPConfig:
    """CLIP has no constants besides the scale, which is the model's."""


@dataclass(kw_only=True)
class InfoNCEConfig:
    """What CLIP's loss does not know: that a caption may be true of several images of a batch, an image of several."""

    known_matches: bool = option(True, "count every true caption of an image in the batch as a match")


class _DeterministicObjective(MeansObjective):
    """A contrastive loss of OpenCLIP's on the means."""

    contrastive: nn.Module

    def terms(self, reps: Reps, batch: Batch) -> Terms:
        """loss."""
        image, text = upcast(reps["image_mean"]), upcast(reps["text_mean"])
        with without_autocast(image.device):
            return {"loss": self.contrastive(image, text, *(reps[name] for name in self.statistics))}


class SigLIPObjective(_DeterministicObjective):
    """Sigmoid loss over all pairs of the global batch / B (Zhai et al. 2023), in OpenCLIP's implementation.

    Its exchange sends texts both ways round the ring with gradients; the mean over ranks of these losses is the loss of
    one process, for any world size.
    """

    @classmethod
    def balances(cls, config: SigLIPConfig) -> bool:
        return True

    def __init__(self, model: Any, config: SigLIPConfig, context: Context | None = None):
        super().__init__(model, config, context)
        from open_clip.loss import SigLipLoss  # late: it takes seconds

        self.contrastive = SigLipLoss(rank=self.context.rank, world_size=self.context.world_size, dist_impl="bidir")


class CLIPObjective(_DeterministicObjective):
    """Symmetric cross-entropy over the global batch (Radford et al. 2021), in OpenCLIP's implementation.

    Local rows against gathered columns, gathered with gradients. Without these gradients OpenCLIP's loss gives the
    towers 1/W of theirs under DDP's mean (global rows), or leaves out what other ranks owe (local rows); global rows
    with gradients are exact too, but every rank scores all pairs. A bias cancels in the softmax, so it is frozen.
    """

    statistics = ("scale",)  # of the logit, what the loss takes

    def __init__(self, model: Any, config: CLIPConfig, context: Context | None = None):
        super().__init__(model, config, context)
        self.contrastive = clip_loss(self.context)
        model.logit_bias.requires_grad_(False)


class InfoNCEObjective(MeansObjective, KnownMatches):
    """Mean of `losses.softmax_loss` of the rows and of the columns of a cos over the global batch, a = 1/tau learned.

    Targets are all known matches of an image, and of a caption, in equal parts; CLIP's loss where each has one. A bias
    cancels in the softmax, so it is frozen.
    """

    statistics = ("scale",)
    config: InfoNCEConfig

    def __init__(self, model: Any, config: InfoNCEConfig, context: Context | None = None):
        super().__init__(model, config, context)
        model.logit_bias.requires_grad_(False)

    def terms(self, reps: Reps, batch: Batch) -> Terms:
        """loss."""
        image, text, scale = (upcast(reps[name]) for name in ("image_mean", "text_mean", "scale"))

        def both_ways(cosine: Tensor, positive: Tensor) -> Tensor:
            columns = transpose_over_ranks(cosine), transpose_over_ranks(positive.to(cosine.dtype)) > 0
            return torch.stack([softmax_loss(scale * x, y) for x, y in ((cosine, positive), columns)]).mean()

        loss = tiled_loss_over_ranks(dot_products, (image,), (text,), both_ways, (scale,), self.matches(batch))
        return {"loss": loss}
