"""Triplet losses on the means, for comparison: VSE++ and VSE-infinity's hardest negatives, and the sum over all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prolip.gaussian import upcast, without_autocast
from prolip.losses import dot_products, tiled_loss_over_ranks, transpose_over_ranks, triplet_loss
from prolip.losses.functional import Negatives
from prolip.methods.base import Batch, Context, KnownMatches, MeansObjective, Reps, Terms
from prolip.scores import MeanScore
from prolip.utils.fields import option
from prolip.utils.flags import check_range


@dataclass(kw_only=True)
class TripletConfig:
    """The hinge of the sum over all negatives."""

    margin: float = option(0.2, "by how much a match is to be nearer than what is none")
    known_matches: bool = option(True, "take no true caption of an image in the batch for a negative")

    def __post_init__(self) -> None:
        check_range(self, "margin", most=2, remedy=" (cosines differ by no more)")


@dataclass(kw_only=True)
class VSEConfig(TripletConfig):
    """The hinge of the hardest negative."""

    sum_steps: int = option(0, "first steps with all negatives, as VSE-infinity's first epoch; the hardest follow")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "sum_steps")


class TripletObjective(MeansObjective, KnownMatches):
    """Both ways of `losses.triplet_loss` over the cosines of the global batch; scale and bias are not trained."""

    statistics = ()
    config: TripletConfig

    def __init__(self, model: Any, config: TripletConfig, context: Context | None = None):
        super().__init__(model, config, context)
        for parameter in (model.logit_scale, model.logit_bias):
            parameter.requires_grad_(False)

    def negatives(self, batch: Batch) -> Negatives:
        """Which of them count."""
        return "all"

    def terms(self, reps: Reps, batch: Batch) -> Terms:
        """loss."""
        image, text = upcast(reps["image_mean"]), upcast(reps["text_mean"])
        start, kind = self.context.rank * len(image), self.negatives(batch)

        def loss(similarity: Tensor, positive: Tensor) -> Tensor:
            own = similarity.diagonal(start)
            columns = transpose_over_ranks(similarity), transpose_over_ranks(positive.to(similarity.dtype)) > 0
            ways = (similarity, positive), columns
            return torch.stack([triplet_loss(x, y, own, self.config.margin, kind) for x, y in ways]).sum()

        with without_autocast(image.device):
            return {"loss": tiled_loss_over_ranks(dot_products, (image,), (text,), loss, labels=self.matches(batch))}


class VSEObjective(TripletObjective):
    """The hardest negatives alone, VSE++ (Faghri et al. 2018)."""

    config: VSEConfig

    def prepare(self, batch: Batch, step: int) -> Batch:
        """Add whether the hardest negatives count yet."""
        return super().prepare(batch, step) | {"hardest": step >= self.config.sum_steps}

    def negatives(self, batch: Batch) -> Negatives:
        return "hardest" if batch["hardest"] else "all"


class CosineScore(MeanScore):
    """Cosine of the means of a model without a trained scale and bias: it ranks, and gives no probability."""

    name = "cosine"

    @classmethod
    def of(cls, model: Any) -> CosineScore:
        return cls()
