"""Means by the sigmoid loss, variances by the likelihood of matched pairs: what a trace should mean.

The pair loss is SigLIP's (Zhai et al. 2023), so means and time are SigLIP's. When the means have settled, the variances
are fitted to the code lengths of matched pairs (`prolip.uncertainty.fit`): the trace of a text is (2/a) times the nats
that it leaves open about its image, that of an image likewise against the texts. docs/uncertainty_study.md has the
theory, and the alternatives that were tried. The same pass says what an image is new to (`prolip.uncertainty.novelty`).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prolip.gaussian import Gaussian, upcast
from prolip.losses import mean_factors, sigmoid_loss_over_ranks
from prolip.methods.base import Batch, MeansObjective, Needs, Reps, Terms, logit_scale_and_bias
from prolip.scores import TrueMatchScore
from prolip.uncertainty.fit import Fitted, fit_variances
from prolip.uncertainty.heads import Parts, VarianceHead
from prolip.uncertainty.novelty import Novelty, Widths
from prolip.uncertainty.pairs import Pairs
from prolip.utils.fields import option


@dataclass(kw_only=True)
class LikelihoodConfig:
    """What the variances are fitted with, when the means have settled."""

    fit_samples: int = option(100_000, "samples that are read once more at the end, to fit the variances; 0: no fit")
    bank: int = option(2048, "texts that an image is compared with for its variance; 4 bytes per dimension of each")
    centres: int = option(2048, "texts whose variances are kept one by one; of others their tokens speak")
    novelty_centres: int = option(512, "classes of training images that a new one may be far from; 0: no novelty")

    def __post_init__(self) -> None:
        for name, least in (("fit_samples", 0), ("bank", 32), ("centres", 0), ("novelty_centres", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: give {least} or more")


class LikelihoodHead(VarianceHead):
    """`VarianceHead`, which has nothing to say while the means are trained."""

    def forward(self, tokens: Tensor, z: Gaussian, ids: Tensor | None = None) -> Gaussian:
        return z if self.training else super().forward(tokens, z, ids)


class MatchWeights(nn.Module):
    """What `TrueMatchScore` has of a model: scale (0: not fitted), weight of the trace, bias; rows of either side."""

    values: Tensor
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("values", torch.zeros(3))
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))


class LikelihoodScore(TrueMatchScore):
    """`TrueMatchScore` of a model of this method; before its variances are fitted the cosine, with scale and bias."""

    @classmethod
    def of(cls, model: Any) -> TrueMatchScore:
        scale, weight, bias = model.match.values.tolist()
        if not scale:
            trained = logit_scale_and_bias(model)
            return TrueMatchScore(0.0, 0.0, 0, 0, trained["scale"].item(), trained["bias"].item())
        images, texts = model.match.counts.tolist()
        return TrueMatchScore(weight, model.text.head.log_unit.exp().item(), images, texts, scale, bias)


def extend(model: Any, config: LikelihoodConfig) -> None:
    """Add both heads, what the score needs, and novelty to a fresh model."""
    model.visual.head = LikelihoodHead(Parts(dim=model.embed_dim, bank=config.bank))
    model.text.head = LikelihoodHead(
        Parts(dim=model.embed_dim, vocabulary=model.vocab_size, centres=config.centres)
    )
    model.match = MatchWeights()
    if config.novelty_centres:
        first = 2 * model.visual.class_embedding.numel()
        model.novelty = Novelty(Widths(mean=model.embed_dim, first=first, centres=config.novelty_centres))


def points(mean: Tensor) -> Gaussian:
    """Means (B, D) for what looks at means alone."""
    return Gaussian(mean, torch.zeros_like(mean))


def adopt(model: Any, fitted: Fitted) -> None:
    """Give a model of this method what was fitted to its means: variances, the score, novelty."""
    score = fitted.score
    model.visual.head.load_state_dict(fitted.image.state_dict())
    model.text.head.load_state_dict(fitted.text.state_dict())
    model.match.values.copy_(torch.tensor([score.scale, score.trace_weight, score.bias]))
    model.match.counts.copy_(torch.tensor([score.images, score.texts]))
    if fitted.novelty is not None:
        model.novelty.load_state_dict(fitted.novelty.state_dict())


class LikelihoodObjective(MeansObjective):
    """Sigmoid loss of the cosines of all pairs of the global batch; the variances follow when training ends."""

    config: LikelihoodConfig

    @classmethod
    def needs(cls, config: LikelihoodConfig) -> Needs:
        return Needs(closing_samples=config.fit_samples)

    def terms(self, reps: Reps, batch: Batch) -> Terms:
        """loss, with scale and bias for the log."""
        image, text = (points(upcast(reps[f"{side}_mean"])) for side in ("image", "text"))
        loss = sigmoid_loss_over_ranks(mean_factors(image), mean_factors(text), reps["scale"], reps["bias"])
        return {"loss": loss} | {name: reps[name].detach() for name in ("scale", "bias")}

    def close(self, model: Any, pairs: Pairs) -> None:
        """Fit the variances and the novelty of a trained model to pairs of its own means."""
        config, seed = self.config, self.context.seed
        adopt(model, fit_variances(pairs, config.bank, config.centres, model.vocab_size, config.novelty_centres, seed))
