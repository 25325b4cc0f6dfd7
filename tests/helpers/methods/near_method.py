"""A method that no file of src knows; docs/developing/add_a_method.md explains every part of it.

Its head shifts the log variances, its score is a distance with trained weights (no dot product, so no shortcut serves
it), its uncertainty the largest variance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from prolip.gaussian import Gaussian, upcast
from prolip.losses import tiled_loss_over_ranks
from prolip.methods.base import Batch, Method, Objective, Reps, Terms, logit_scale_and_bias
from prolip.models.heads import Tokens
from prolip.scores import Score
from prolip.utils.fields import option


@dataclass(kw_only=True)
class NearConfig:
    """The flags of the method."""

    near_weight: float = option(1.0, "initial weight of every dimension in the distance")


class Head(nn.Module):
    """log_var + w . (mean of the last tokens) + b, the same for all dimensions."""

    def __init__(self, width: int):
        super().__init__()
        self.shift = nn.Linear(width, 1)

    def forward(self, tokens: Tokens, z: Gaussian, ids: Tensor | None = None) -> Gaussian:
        return Gaussian(z.mean, z.log_var + F.linear(upcast(tokens.last).mean(1), self.shift.weight, self.shift.bias))


class NearScore(Score):
    """-sum_d w_d |m_d - m'_d| with trained w > 0."""

    name = "near"

    def __init__(self, dim: int, weight: float = 1.0, scale: float | None = None, bias: float | None = None):
        super().__init__(scale, bias)
        self.weight = nn.Parameter(torch.full((dim,), weight).expm1().log())

    @classmethod
    def of(cls, model: Any) -> NearScore:
        scale, bias = logit_scale_and_bias(model).values()
        score = cls(model.embed_dim, 1.0, scale.item(), bias.item())
        score.load_state_dict(model.near.state_dict())
        return score.requires_grad_(False)

    def pairwise(self, queries: Gaussian, gallery: Gaussian) -> Tensor:
        return -((queries.mean.unsqueeze(1) - gallery.mean).abs() @ F.softplus(self.weight))

    def uncertainty(self, z: Gaussian) -> Tensor:
        return z.log_var.exp().amax(1)

    def settings(self) -> dict[str, Any]:
        return {"dim": len(self.weight)} | super().settings()


def extend(model: Any, config: NearConfig) -> None:
    """Add the score and both heads to a fresh model."""
    model.near = NearScore(model.embed_dim, config.near_weight)
    model.visual.head, model.text.head = Head(model.visual.width), Head(model.text.width)


class NearObjective(Objective):
    """Sigmoid loss over all pairs of all ranks, by the score; the log variances are drawn to 0, so that heads learn."""

    shared = ("weight",)

    def embed(self, batch: Batch) -> Reps:
        z = {side: self.encode(side, batch[side]) for side in ("image", "text")}
        rows = {f"{side}_{part}": value for side in z for part, value in z[side]._asdict().items()}
        return rows | logit_scale_and_bias(self.model) | {"weight": self.model.near.weight * 1.0}

    def terms(self, reps: Reps, batch: Batch) -> Terms:
        image, text = (Gaussian(reps[f"{side}_mean"], reps[f"{side}_log_var"]) for side in ("image", "text"))
        scale, bias, weight = reps["scale"], reps["bias"], reps["weight"]

        def loss(scores: Tensor, matches: Tensor) -> Tensor:
            return -F.logsigmoid((2.0 * matches - 1) * (scale * scores + bias)).sum() / len(scores)

        def score(images: Gaussian, texts: Gaussian) -> Tensor:
            return functional_call(self.model.near, {"weight": weight}, (images, texts))

        pairs = tiled_loss_over_ranks(score, image, text, loss, (scale, bias, weight))
        return {"loss": pairs + 1e-3 * (image.log_var + text.log_var).square().mean(), "pairs": pairs.detach()}


METHODS = {"near": Method(NearConfig, NearObjective, NearScore, extend=extend)}
