"""PCME++ (Chun 2024, arXiv 2305.18171): cross-entropy on the closed-form distance, pseudo-positives, mixed images."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prolip.gaussian import Gaussian, without_autocast
from prolip.losses import matching_loss, pseudo_labels, tiled_loss_over_ranks, transpose_over_ranks, vib
from prolip.losses.functional import PseudoPositives
from prolip.measures import get_measure
from prolip.methods.base import Batch, Context, Method, Reps, Terms, clip_loss
from prolip.methods.gaussians import HeadsConfig, HeadsObjective, begin_as, linear_parts
from prolip.models.heads import GeneralisedPooling, Tokens, layer_norm, project
from prolip.random import Stream
from prolip.scores import CSDScore
from prolip.utils.fields import option
from prolip.utils.flags import check_choices, check_range
from prolip.views import NOISE, Mix, mix_images

CSD = get_measure("csd_similarity")


@dataclass(kw_only=True)
class PCMEppConfig(HeadsConfig):
    """Weights and constants of the PCME++ loss; symbols as in the paper."""

    pseudo_weight: float = option(0.1, "alpha, weight of pseudo-positives; the paper has 0.01 for 20% noise, 0 for 50%")
    pseudo_positives: PseudoPositives = option(
        "all",
        "pairs count as positive if as near as any match of a row (all), or as the first"
        " of its largest labels (first, the paper's A.4)",
    )
    vib_weight: float = option(1e-4, "beta, weight of the information bottleneck")
    mix_fraction: float = option(0.25, "share of the images that Mixup or CutMix mixes with another; 0: none")
    size_augment: float = option(0.2, "SizeAugment: largest share of an input's tokens that pooling drops; 0: none")
    clip_weight: float = option(0.0, "weight of an additional CLIP loss on the means, as in the paper's pre-training")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "pseudo_weight", "vib_weight", "clip_weight")
        check_range(self, "mix_fraction", "size_augment", most=1, below=True)
        check_choices(self)


class PCMEppHead(nn.Module):
    """N(L2norm(GPO(W LN(x))), GPO(W' LN'(block(x')))), section 2.5: x the last tokens, x' those before the last block.

    The block of the log variance and both projections start with random weights. Neither reads [UNC]. A tower with a
    reader has such a block already: there the log variance is the reader's.
    """

    needs_penultimate_tokens = True

    def __init__(self, tower: Any, dim: int, config: PCMEppConfig, init_log_var: float):
        super().__init__()
        self.size_augment = config.size_augment
        self.noise: Tensor | None = None  # (B, 1 + K) uniform, of the next batch
        width = tower.width
        self.block = None if tower.has_reader else copy.deepcopy(tower.blocks[-1])
        for module in () if self.block is None else self.block.modules():  # with random weights
            if reset := getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None)):
                reset()
        parts = ("mean",) if tower.has_reader else ("mean", "log_var")
        self.norms = nn.ModuleDict({part: nn.LayerNorm(width) for part in parts})
        self.projections = linear_parts(width, dim, init_log_var, parts)
        self.pools = nn.ModuleDict({part: GeneralisedPooling() for part in parts})

    def inherit(self, tower: Any) -> None:
        begin_as(self.norms["mean"], self.projections["mean"], tower)  # type: ignore[arg-type]

    def forward(
        self, tokens: Tokens, z: Gaussian, ids: Tensor | None = None, *, again: Callable[[Any], Tokens] | None = None
    ) -> Gaussian:
        features, valid = tokens.features()
        if self.noise is not None:
            # SizeAugment (Chen et al. 2021): with probability 1 - s a row loses each token with probability s u, u
            # uniform in (s, 1); s is `size_augment`. The first token stays.
            draw = self.noise[:, :1]
            lost = (self.noise[:, 1 : 1 + features.shape[1]] < self.size_augment * draw) & (draw > self.size_augment)
            lost[:, 0] = False
            valid = ~lost if valid is None else valid & ~lost
        if self.block is None:
            return Gaussian(F.normalize(self.pooled("mean", features, valid), dim=-1), z.log_var)
        assert again is not None  # our own towers give it
        each = {"mean": features, "log_var": again(self.block).features()[0]}
        mean, log_var = (self.pooled(part, x, valid) for part, x in each.items())
        return Gaussian(F.normalize(mean, dim=-1), log_var)

    def pooled(self, part: str, x: Tensor, valid: Tensor | None) -> Tensor:
        """Return GPO(W LN(x)) of tokens (B, K, width) -> (B, D)."""
        layer: Any = self.projections[part]
        return self.pools[part](project(layer_norm(self.norms[part], x), layer), valid)


def extend(model: Any, config: PCMEppConfig) -> tuple[str, ...]:
    """Add both heads to a fresh model; a and b of the paper start at 5. Without heads the model does not change."""
    if not config.pooled_heads:
        return ()
    model.widen(config.head_dim)
    log_var = model.config["prolip_cfg"]["init_unc_bias"]
    for tower in (model.visual, model.text):
        tower.head = PCMEppHead(tower, model.embed_dim, config, log_var)
    with torch.no_grad():  # -5 csd + 5 = 10 similarity - 5
        model.logit_scale.fill_(torch.tensor(10.0).log())
        model.logit_bias.fill_(-5.0)
    return "logit_scale", "logit_bias"


class PCMEppObjective(HeadsObjective):
    """2 L_match + alpha (L_pseudo of rows + of columns) + beta VIB, equation 3, each match term a mean over all pairs.

    logit = -a csd + b = 2 a similarity + b - 2 a, with 2 a = exp(logit_scale); mixed images have labels of `views.Mix`.
    """

    config: PCMEppConfig

    def __init__(self, model: Any, config: PCMEppConfig, context: Context | None = None):
        super().__init__(model, config, context)
        self.clip = clip_loss(self.context)

    @classmethod
    def balances(cls, config: PCMEppConfig) -> bool:
        return not config.pooled_heads

    def prepare(self, batch: Batch, step: int) -> Batch:
        """Mix some images; add `share` and `partner` of `views.Mix`, and `row` and `step` for SizeAugment's numbers."""
        batch = super().prepare(batch, step)
        image, draws = batch["image"], self.context.draws
        rows = draws.rows(len(image), image.device)
        if self.config.size_augment and self.config.pooled_heads:
            batch = batch | {"row": rows, "step": step}
        if not self.config.mix_fraction:
            return batch
        noise = draws.uniform(Stream.MIX, step, rows, NOISE)
        cut = torch.full((), draws.key(Stream.CUT, step) % 2 == 1, device=image.device)
        image, mix = mix_images(image, noise, self.config.mix_fraction, cut)
        return batch | {"image": image} | mix._asdict()

    def embed(self, batch: Batch) -> Reps:
        """Return Gaussians (B, D); in training, pooling drops some tokens. ValueError without `prepare`."""
        if not self.config.pooled_heads:
            return super().embed(batch)
        visual, text = self.model.visual, self.model.text
        image_columns, text_columns = 2 + visual.num_tokens, 2 + batch["text"].shape[1]
        numbers = ((visual.head, Stream.IMAGE_SIZE, image_columns), (text.head, Stream.TEXT_SIZE, text_columns))
        try:
            for head, stream, columns in numbers:
                if head.training and self.config.size_augment:
                    if "row" not in batch:
                        raise ValueError("size_augment needs rows in the batch: call objective.prepare(batch, step)")
                    head.noise = self.context.draws.uniform(stream, batch["step"], batch["row"], columns)
            return super().embed(batch)
        finally:
            visual.head.noise = text.head.noise = None

    def terms(self, reps: Reps, batch: Batch) -> Terms:
        config, scale, bias = self.config, reps["scale"], reps["bias"]
        image, text, traces = self.gaussians(reps)
        mix = Mix(batch["share"], batch["partner"]) if "share" in batch else None

        def pairs(similarity: Tensor, positive: Tensor) -> Tensor:
            logit = scale * similarity + bias
            label = (positive if mix is None else mix.labels(positive)).to(logit.dtype)
            loss = 2 * matching_loss(logit, label)
            if not config.pseudo_weight:
                return loss
            ways = (logit, label), (transpose_over_ranks(logit), transpose_over_ranks(label))
            pseudo = torch.stack([matching_loss(x, pseudo_labels(x, y, config.pseudo_positives)) for x, y in ways])
            return loss + config.pseudo_weight * pseudo.sum()

        match = tiled_loss_over_ranks(CSD.pairwise_scores, image, text, pairs, (scale, bias), self.matches(batch))
        terms = {"match": match, "vib_image": vib(image), "vib_text": vib(text)}
        loss = terms["match"] + config.vib_weight * (terms["vib_image"] + terms["vib_text"])
        if config.clip_weight:
            with without_autocast(image.mean.device):
                terms["clip"] = self.clip(image.mean, text.mean, scale)
            loss = loss + config.clip_weight * terms["clip"]
        return {"loss": loss} | terms | traces


METHODS = {"pcmepp": Method(PCMEppConfig, PCMEppObjective, CSDScore, extend=extend)}
