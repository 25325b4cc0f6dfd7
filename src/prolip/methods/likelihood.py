"""Means by SigLIP's or CLIP's loss; after training `prolip.uncertainty.fit` fits variances and novelty.

The trace of a text is (2/a) times its nats of ambiguity about the image, see docs/studies/uncertainty.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from prolip.embeddings import Pairs
from prolip.flops import EncoderPass
from prolip.gaussian import Gaussian, upcast, without_autocast
from prolip.losses import mean_factors, sigmoid_loss_over_ranks
from prolip.methods.base import (
    FITTED,
    Batch,
    Context,
    MeansObjective,
    Method,
    Needs,
    Reps,
    Terms,
    clip_loss,
    logit_scale_and_bias,
)
from prolip.scores import TrueMatchScore
from prolip.uncertainty.fit import Fitted, fit_variances
from prolip.uncertainty.heads import Parts, VarianceHead
from prolip.uncertainty.novelty import Novelty, Widths
from prolip.uncertainty.options import FitOptions
from prolip.uncertainty.readings import Readings
from prolip.utils.fields import option
from prolip.utils.flags import check_choices, check_range

PairLoss = Literal["sigmoid", "softmax"]


@dataclass(kw_only=True)
class LikelihoodConfig(FitOptions):
    """Settings of the training of the means and of the fit of the variances afterwards."""

    pair_loss: PairLoss = option("sigmoid", "loss of the means: sigmoid (SigLIP) or softmax (CLIP)")
    captions_per_image: int = option(1, "texts drawn for each image of a batch; the loss is their mean")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self)
        check_range(self, "captions_per_image", least=1)


class MatchWeights(nn.Module):
    """Buffers for `TrueMatchScore`: scale (0: not fitted), weight of the trace, bias; rows of both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("values", torch.zeros(3))
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))


class LikelihoodHead(VarianceHead):
    """`VarianceHead` that is inactive while the means are trained. side: the entry of `match.counts` for its bound."""

    def __init__(self, parts: Parts, match: Any, side: int):
        super().__init__(parts)
        self.match, self.side = (match,), side  # in a tuple, as it is a part of the model, not of the head

    def total(self) -> Tensor:
        return self.match[0].counts[self.side]

    def forward(self, tokens: Tensor, z: Gaussian, ids: Tensor | None = None) -> Gaussian:
        return z if self.training else super().forward(tokens, z, ids)


class LikelihoodScore(TrueMatchScore):
    """`TrueMatchScore` of this method; the cosine with scale and bias before the variances are fitted."""

    @classmethod
    def of(cls, model: Any) -> TrueMatchScore:
        scale, weight, bias = model.match.values.tolist()
        if not scale:
            trained = logit_scale_and_bias(model)
            return TrueMatchScore(0.0, 0.0, 0, 0, trained["scale"].item(), trained["bias"].item())
        images, texts = model.match.counts.tolist()
        readings = getattr(model, "readings", None)
        unit, doubt = model.text.head.log_unit.exp().item(), None if readings is None else readings.doubt
        return TrueMatchScore(weight, unit, images, texts, scale, bias, doubt)


def extend(model: Any, config: LikelihoodConfig) -> None:
    """Add both heads, the score's buffers, and novelty to a fresh model."""
    model.match, dim = MatchWeights(), model.embed_dim
    model.visual.head = LikelihoodHead(Parts(dim=dim, bank=config.bank), model.match, 1)
    text = Parts(dim=dim, vocabulary=model.vocab_size, centres=config.centres)
    model.text.head = LikelihoodHead(text, model.match, 0)
    if config.readings:
        model.readings = Readings(dim, config.readings)
    if config.novelty_centres:
        for name, tower in (("novelty", model.visual), ("text_novelty", model.text)):
            sizes = Widths(mean=model.embed_dim, first=2 * tower.first_width, centres=config.novelty_centres)
            setattr(model, name, Novelty(sizes))


def adopt(model: Any, fitted: Fitted) -> None:
    """Copy fitted variances, score and novelty into a model."""
    score = fitted.score
    model.visual.head.load_state_dict(fitted.image.state_dict())
    model.text.head.load_state_dict(fitted.text.state_dict())
    model.match.values.copy_(torch.tensor([score.scale, score.trace_weight, score.bias]))
    model.match.counts.copy_(torch.tensor([score.images, score.texts]))
    for name in ("novelty", "text_novelty", "readings"):
        part = getattr(fitted, name)
        if part is not None and hasattr(model, name):
            getattr(model, name).load_state_dict(part.state_dict())


class LikelihoodObjective(MeansObjective):
    """Sigmoid or softmax loss of the cosines of the global batch; the variances are fitted after training."""

    config: LikelihoodConfig

    def __init__(self, model: Any, config: LikelihoodConfig, context: Context | None = None):
        self.frozen = ("logit_bias",) if config.pair_loss == "softmax" else ()  # cancels in the softmax
        super().__init__(model, config, context)
        self.softmax = clip_loss(self.context)

    @classmethod
    def needs(cls, config: LikelihoodConfig) -> Needs:
        changes = config.changed_images if config.readings and config.novelty_centres else 0
        data = {"captions": config.captions_per_image}
        return Needs(data=data, closing_samples=config.fit_samples, closing_changes=changes)

    @classmethod
    def balances(cls, config: LikelihoodConfig) -> bool:
        return config.pair_loss == "sigmoid"

    @classmethod
    def encoder_passes(cls, config: LikelihoodConfig, rows: int, model: Any) -> list[EncoderPass]:
        return [EncoderPass("image", rows), EncoderPass("text", rows * config.captions_per_image)]

    def embed(self, batch: Batch) -> Reps:
        """Return means of images (B, D) and of their captions (B, C, D), with scale and bias."""
        text = batch["text"]
        mean = self.encode("text", text.flatten(0, -2)).mean
        image = self.encode("image", batch["image"]).mean
        rows = {"image_mean": image, "text_mean": mean.unflatten(0, (len(text), -1))}
        return rows | logit_scale_and_bias(self.model)

    def terms(self, reps: Reps, batch: Batch) -> Terms:
        image, texts = upcast(reps["image_mean"]), upcast(reps["text_mean"]).unbind(1)
        loss = torch.stack([self.pair_loss(image, text, reps["scale"], reps["bias"]) for text in texts]).mean()
        return {"loss": loss}

    def pair_loss(self, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        if self.config.pair_loss == "softmax":
            with without_autocast(image.device):
                return self.softmax(image, text, scale)
        images, texts = (mean_factors(Gaussian(mean, torch.zeros_like(mean))) for mean in (image, text))
        return sigmoid_loss_over_ranks(images, texts, scale, bias)

    def after_training(self, model: Any, pairs: Pairs) -> None:
        adopt(model, fit_variances(pairs, vocabulary=model.vocab_size, seed=self.context.seed, **self.config.sizes))


METHODS = {
    "likelihood": Method(LikelihoodConfig, LikelihoodObjective, LikelihoodScore, extend=extend, variances=FITTED)
}
