"""PCME (Chun et al. 2021, arXiv 2101.05068): match probability of samples, heads with local attention, uniformity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prolip.gaussian import Gaussian, upcast, without_autocast
from prolip.losses import log_match_odds, tiled_loss_over_ranks, uniformity_over_ranks, vib
from prolip.methods.base import Batch, Method, Reps, Terms
from prolip.methods.gaussians import HeadsConfig, HeadsObjective, begin_as, linear_parts
from prolip.models.heads import Tokens, layer_norm, project
from prolip.random import Stream
from prolip.scores import MatchProbabilityScore
from prolip.utils.fields import option
from prolip.utils.flags import check_range

UNIFORM_POINTS = 128  # samples for uniformity, half of them images


@dataclass(kw_only=True)
class PCMEConfig(HeadsConfig):
    """Samples, weights and constants of the PCME loss; symbols as in the paper."""

    match_samples: int = option(8, "J, points drawn from each Gaussian")
    match_start: float = option(15.0, "initial a and b of the probability; the paper uses 15 for COCO, 5 for CUB")
    kl_weight: float = option(
        1e-4,
        "weight of the divergence from N(0, I) (mean over D) next to the match loss per image"
        "; the paper's 1e-5 and 1e-3 for sums are 2.56e-3 and 0.256 here at D = 512",
    )
    uniformity_weight: float = option(
        0.0, "weight of the uniformity loss; the paper's 10 for CUB is 0.039 here at batch 128, and 0 for COCO"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "kl_weight", "uniformity_weight")
        check_range(self, "match_samples", least=1)
        check_range(self, "match_start", most=100, above=True)


class LocalAttention(nn.Module):
    """W sum_k a_k x_k, a = softmax over tokens of u . tanh(V x_k): PVSE's pooling (Song & Soleymani 2019), one head."""

    def __init__(self, width: int, dim: int):
        super().__init__()
        self.hidden = nn.Linear(width, dim // 2, bias=False)
        self.score = nn.Linear(dim // 2, 1, bias=False)
        self.out = nn.Linear(width, dim)
        for layer in (self.hidden, self.score, self.out):
            nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Pool tokens (B, K, width), those with True in `valid` or all -> (B, D), float32."""
        x = upcast(x)
        with without_autocast(x.device):
            score = project(torch.tanh(project(x, self.hidden)), self.score).squeeze(2)
            weight = (score if valid is None else score.masked_fill(~valid, -torch.inf)).softmax(1)
            return project((weight.unsqueeze(1) @ x).squeeze(1), self.out)


class PCMEHead(nn.Module):
    """mean: L2norm(LN(W g + sigmoid(attention))), log variance: W' g + attention', section 3.2.1 and figure 3."""

    def __init__(self, tower: Any, dim: int, init_log_var: float):
        super().__init__()
        width = tower.width
        parts = ("mean", "log_var")
        self.globals = linear_parts(tower.output_dim if tower.has_reader else width, dim, init_log_var)
        self.locals = nn.ModuleDict({part: LocalAttention(width, dim) for part in parts})
        self.norms = nn.ModuleDict({part: nn.LayerNorm(width) for part in parts})
        self.norm = nn.LayerNorm(dim)

    def inherit(self, tower: Any) -> None:
        """Start the means' W g with the tower's own norm and projection, or the identity for an embedding."""
        if tower.has_reader:
            nn.init.eye_(self.globals["mean"].weight)  # type: ignore[arg-type]
        begin_as(self.norms["mean"], self.globals["mean"], tower)  # type: ignore[arg-type]

    def forward(self, tokens: Tokens, z: Gaussian, ids: Tensor | None = None) -> Gaussian:
        whole, each = self.parts(tokens, z, "mean")
        mean = layer_norm(self.norm, whole + each.sigmoid())
        whole, each = self.parts(tokens, z, "log_var")
        return Gaussian(F.normalize(mean, dim=-1), whole + each)

    def parts(self, tokens: Tokens, z: Gaussian, part: str) -> tuple[Tensor, Tensor]:
        """Return W g and the attention of one part, (B, D) each."""
        norm: Any = self.norms[part]
        layer: Any = self.globals[part]
        # scales an embedding to the length of a normalised vector
        whole = z.mean * z.mean.shape[1] ** 0.5 if tokens.pooled is None else layer_norm(norm, tokens.pooled)
        return project(whole, layer), self.locals[part](layer_norm(norm, tokens.last), tokens.valid)


class PCMEScore(MatchProbabilityScore):
    """PCME's match probability; its uncertainty is the geometric mean of sigma, exp(mean of log_var / 2), 3.2.1."""

    name = "pcme"

    def uncertainty(self, z: Gaussian) -> Tensor:
        return (z.log_var.mean(-1) / 2).exp()


def extend(model: Any, config: PCMEConfig) -> tuple[str, ...]:
    """Add both heads, if any, to a fresh model, and set the initial a and b; return their names."""
    log_var = model.config["prolip_cfg"]["init_unc_bias"]
    model.widen(config.head_dim if config.pooled_heads else None)
    for tower in (model.visual, model.text) if config.pooled_heads else ():
        tower.head = PCMEHead(tower, model.embed_dim, log_var)
    with torch.no_grad():
        model.logit_scale.fill_(math.log(config.match_start))
        model.logit_bias.fill_(config.match_start)
    return "logit_scale", "logit_bias"


class PCMEObjective(HeadsObjective):
    """Soft contrastive loss over all pairs of the global batch, (1) to (3), with KL and uniformity.

    L = sum_ij -log p(label of ij) / B + kl_weight [VIB(image) + VIB(text)] + uniformity_weight L_unif, p by J x J
    samples. `notes` converts weights for the released code, whose loss is 2 B L.
    """

    config: PCMEConfig

    def notes(self, batch: int) -> tuple[str, ...]:
        """Return weights and start in the units of the released code, after the notes on the means."""
        own, dim = self.config, self.model.embed_dim
        kl, start, unif = own.kl_weight, own.match_start, own.uniformity_weight
        found = [
            f"--kl-weight {kl:.4g}: vib_beta {2 * kl / dim:.3g} of PCME's released code (sums; D = {dim}),"
            f" {2 * batch * kl:.3g} of PCME++'s rerun (mean KL, summed matches; B = {batch})",
            f"--match-start {start:g}: {start / 2:g} of PCME's released code, where the probability is sigmoid(2x)",
        ]
        if unif:
            theirs = f"uniform_lambda {2 * batch * unif:.3g} of PCME's released code (B = {batch})"
            found.append(f"--uniformity-weight {unif:.4g}: {theirs}")
        return (*super().notes(batch), *found)

    def prepare(self, batch: Batch, step: int) -> Batch:
        """Add the noise of the samples, (B, J, D) for images and texts."""
        batch = super().prepare(batch, step)
        image, draws = batch["image"], self.context.draws
        samples, dim, rows = self.config.match_samples, self.model.embed_dim, draws.rows(len(image), image.device)
        streams = {"noise_image": Stream.IMAGE_SAMPLE, "noise_text": Stream.TEXT_SAMPLE}
        noise = {name: draws.normal(stream, step, rows, samples * dim) for name, stream in streams.items()}
        return batch | {name: x.view(-1, samples, dim) for name, x in noise.items()}

    def terms(self, reps: Reps, batch: Batch) -> Terms:
        config, scale, bias = self.config, reps["scale"], reps["bias"]
        image, text, traces = self.gaussians(reps)
        noises = batch["noise_image"], batch["noise_text"]
        points = [  # (B, J, D) by reparameterisation
            z.mean.unsqueeze(1) + (z.log_var / 2).exp().unsqueeze(1) * noise.to(z.mean.dtype)
            for z, noise in zip((image, text), noises)
        ]

        def odds(images: Sequence[Tensor], texts: Sequence[Tensor]) -> Tensor:
            return log_match_odds(images[0], texts[0], scale, bias)

        def pairs(log_odds: Tensor, positive: Tensor) -> Tensor:
            label = positive.to(log_odds.dtype)
            return F.binary_cross_entropy_with_logits(log_odds, label, reduction="sum") / len(log_odds)

        known = self.matches(batch)
        terms = {
            "match": tiled_loss_over_ranks(odds, points[:1], points[1:], pairs, (scale, bias), known),
            "kl_image": vib(image),
            "kl_text": vib(text),
        }
        loss = terms["match"] + config.kl_weight * (terms["kl_image"] + terms["kl_text"])
        if config.uniformity_weight:
            rows = max(1, UNIFORM_POINTS // (2 * self.context.world_size))
            terms["uniformity"] = uniformity_over_ranks(torch.cat([x[:rows, 0] for x in points]))
            loss = loss + config.uniformity_weight * terms["uniformity"]
        return {"loss": loss} | terms | traces


METHODS = {"pcme": Method(PCMEConfig, PCMEObjective, PCMEScore, extend=extend)}
