"""Losses on the means alone, on the same towers: SigLIP, CLIP, InfoNCE with known matches, and triplet losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prolip.gaussian import upcast, without_autocast
from prolip.losses import both_ways, dot_products, softmax_loss, tiled_loss_over_ranks, triplet_loss
from prolip.losses.functional import Negatives
from prolip.methods.base import Batch, Context, MeansObjective, Method, Reps, Terms, clip_loss
from prolip.scores import MeanScore
from prolip.utils.fields import option
from prolip.utils.flags import check_range


@dataclass(kw_only=True)
class PointsConfig:
    """No settings: SigLIP and CLIP have only the model's scale and bias."""


@dataclass(kw_only=True)
class InfoNCEConfig:
    """Matches beyond CLIP's: a caption may match several images of a batch, and an image several captions."""

    known_matches: bool = option(True, "count every true caption of an image in the batch as a match")


@dataclass(kw_only=True)
class TripletConfig:
    """Settings of the hinge loss over all negatives."""

    margin: float = option(0.2, "cosine by which a match must be nearer than other pairs")
    known_matches: bool = option(True, "do not count true captions of an image in the batch as negatives")

    def __post_init__(self) -> None:
        check_range(self, "margin", most=2, remedy=" (cosines differ by at most 2)")


@dataclass(kw_only=True)
class VSEConfig(TripletConfig):
    """Settings of the hinge loss over the hardest negative."""

    sum_steps: int = option(0, "first steps that use all negatives (VSE-infinity's first epoch), not the hardest")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "sum_steps")


class CLIPObjective(MeansObjective):
    """Symmetric cross-entropy over the global batch (Radford et al. 2021), in OpenCLIP's implementation."""

    statistics: tuple[str, ...] = ("scale",)  # of the logit: the arguments of the loss
    frozen: tuple[str, ...] = ("logit_bias",)  # cancels in the softmax
    make_loss = staticmethod(clip_loss)

    def __init__(self, model: Any, config: PointsConfig, context: Context | None = None):
        super().__init__(model, config, context)
        self.contrastive = self.make_loss(self.context)

    def terms(self, reps: Reps, batch: Batch) -> Terms:
        image, text = upcast(reps["image_mean"]), upcast(reps["text_mean"])
        with without_autocast(image.device):
            return {"loss": self.contrastive(image, text, *(reps[name] for name in self.statistics))}


class SigLIPObjective(CLIPObjective):
    """Sigmoid loss over all pairs of the global batch / B (Zhai et al. 2023), in OpenCLIP's implementation."""

    statistics, frozen = ("scale", "bias"), ()

    @classmethod
    def balances(cls, config: PointsConfig) -> bool:
        return True

    @staticmethod
    def make_loss(context: Context) -> nn.Module:
        from open_clip.loss import SigLipLoss  # late: it takes seconds

        return SigLipLoss(rank=context.rank, world_size=context.world_size, dist_impl="bidir")


class InfoNCEObjective(MeansObjective):
    """Mean of `losses.softmax_loss` of the rows and of the columns of a cos over the global batch, a = 1/tau learned.

    Targets are all known matches of an image, and of a caption, in equal parts; CLIP's loss where each has one.
    """

    statistics = ("scale",)
    frozen = ("logit_bias",)
    config: InfoNCEConfig

    def terms(self, reps: Reps, batch: Batch) -> Terms:
        image, text, scale = (upcast(reps[name]) for name in ("image_mean", "text_mean", "scale"))

        def loss(cosine: Tensor, positive: Tensor) -> Tensor:
            return torch.stack([softmax_loss(scale * x, y) for x, y in both_ways(cosine, positive)]).mean()

        value = tiled_loss_over_ranks(dot_products, (image,), (text,), loss, (scale,), self.matches(batch))
        return {"loss": value}


class TripletObjective(MeansObjective):
    """Both ways of `losses.triplet_loss` over the cosines of the global batch; scale and bias are not trained."""

    statistics = ()
    frozen = ("logit_scale", "logit_bias")
    config: TripletConfig

    def terms(self, reps: Reps, batch: Batch) -> Terms:
        image, text = upcast(reps["image_mean"]), upcast(reps["text_mean"])
        start, kind = self.context.rank * len(image), batch.get("negatives", "all")

        def loss(similarity: Tensor, positive: Tensor) -> Tensor:
            own, ways = similarity.diagonal(start), both_ways(similarity, positive)
            return torch.stack([triplet_loss(x, y, own, self.config.margin, kind) for x, y in ways]).sum()

        with without_autocast(image.device):
            return {"loss": tiled_loss_over_ranks(dot_products, (image,), (text,), loss, labels=self.matches(batch))}


class VSEObjective(TripletObjective):
    """The hardest negatives alone, VSE++ (Faghri et al. 2018)."""

    config: VSEConfig

    def prepare(self, batch: Batch, step: int) -> Batch:
        negatives: Negatives = "hardest" if step >= self.config.sum_steps else "all"
        return super().prepare(batch, step) | {"negatives": negatives}


class CosineScore(MeanScore):
    """Cosine of the means of a model without a trained scale and bias: it ranks without a probability."""

    name = "cosine"

    @classmethod
    def of(cls, model: Any) -> CosineScore:
        return cls()


METHODS = {
    "siglip": Method(PointsConfig, SigLIPObjective, MeanScore, probabilistic=False),
    "clip": Method(PointsConfig, CLIPObjective, MeanScore, probabilistic=False),
    "infonce": Method(InfoNCEConfig, InfoNCEObjective, MeanScore, probabilistic=False),
    "vse": Method(VSEConfig, VSEObjective, CosineScore, probabilistic=False),
    "triplet-sum": Method(TripletConfig, TripletObjective, CosineScore, probabilistic=False),
}
