"""What methods share that put heads of their own on both towers and compare the Gaussians which these give."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prolip.gaussian import Gaussian
from prolip.methods.base import Batch, Context, KnownMatches, Reps, Terms, clamp_logit_scale, logit_scale_and_bias
from prolip.models.readers import ReaderTower, Tokens, own_words
from prolip.scores import Side
from prolip.utils.fields import option

SIDES = get_args(Side)
#: What stands behind the towers' last tokens; `text_projection` is a layer, or OpenCLIP's matrix.
UNUSED = ("proj", "ln_post", "uncertainty_proj", "text_projection", "ln_final", "text_uncertainty_projection")


@dataclass(kw_only=True)
class HeadsConfig:
    """Whether the means are those of the model that training starts from, or of heads of the method's own."""

    pooled_heads: bool = option(True, "heads of its own over all tokens; without: the means of the starting model")
    head_dim: int | None = option(None, "D, the width of what these heads give; none: that of the model's embedding")

    def __post_init__(self) -> None:
        if self.head_dim is not None and self.head_dim < 2:
            raise ValueError(f"head_dim={self.head_dim}: give a width of 2 or more, such as 1024")


class HeadsObjective(KnownMatches):
    """Gaussians of images and texts by a method's own heads; what a head stands in for is not used, nor learns."""

    statistics: tuple[str, ...] = ("scale", "bias", "trace_image", "trace_text")

    def __init__(self, model: Any, config: Any, context: Context | None = None):
        super().__init__(model, config, context)
        for tower in (model.visual, model.text):
            for parameter in idle(tower) if tower.head is not None else ():
                parameter.requires_grad_(False)

    def embed(self, batch: Batch) -> Reps:
        """Gaussians of images and texts (B, D) as flat entries, with scale and bias."""
        z = {side: self.encode(side, batch[side]) for side in SIDES}
        rows = {f"{side}_{part}": value for side in SIDES for part, value in z[side]._asdict().items()}
        return rows | logit_scale_and_bias(self.model)

    def gaussians(self, reps: Reps) -> tuple[Gaussian, Gaussian]:
        """Images and texts, in float32."""
        image, text = (Gaussian(reps[f"{side}_mean"], reps[f"{side}_log_var"]).float() for side in SIDES)
        return image, text

    def for_the_log(self, image: Gaussian, text: Gaussian) -> Terms:
        """Detached mean traces."""
        return {f"trace_{side}": z.trace.detach().mean() for side, z in zip(SIDES, (image, text))}

    def after_step(self) -> None:
        clamp_logit_scale(self.model)


def idle(tower: Any) -> list[nn.Parameter]:
    """What the tower's own head stands in for. Beside a reader it is what the head's `reads` does not name."""
    if not isinstance(tower, ReaderTower):
        return [p for name, p in tower.named_parameters() if name.partition(".")[0] in UNUSED]
    depths, reads = tower.depths(), getattr(tower.head, "reads", ())
    names = {"reader"} if "log_var" not in reads else set()
    if not reads:
        names.add("tower")
    return [p for name, p in tower.named_parameters() if name.partition(".")[0] in names and depths[name] == 0]


def pooled_tokens(tokens: Tensor | Tokens, ids: Tensor | None, pad_id: int | None) -> tuple[Tensor, Tensor | None]:
    """[CLS] and patches, or words, without [UNC], (B, K, width), and which of them count: (B, K) bool, None for all.

    tokens: a tower's, of images [CLS], [UNC], patches; of texts (with ids) words, [UNC], [CLS]; of OpenCLIP's tower
    with a reader, its `Tokens`.
    """
    if isinstance(tokens, Tokens):
        return tokens.last, tokens.valid
    if ids is None:
        return torch.cat([tokens[:, :1], tokens[:, 2:]], 1), None
    assert pad_id is not None
    return torch.cat([tokens[:, -1:], tokens[:, :-2]], 1), F.pad(own_words(ids, pad_id), (1, 0), value=True)


def begin_as(norm: nn.LayerNorm, projection: nn.Linear, tower: Any) -> None:
    """Give a head's norm and projection (width -> D) the weights of those that `tower` makes its means with.

    Those of OpenCLIP's towers are of many kinds: there the head begins with its own. So it does at another width.
    """
    if isinstance(tower, ReaderTower):
        return
    image = hasattr(tower, "proj")  # OpenCLIP's names
    own_norm, own = (tower.ln_post, tower.proj) if image else (tower.ln_final, tower.text_projection)
    if projection.out_features != tower.output_dim:
        return
    linear = isinstance(own, nn.Linear)
    with torch.no_grad():
        norm.load_state_dict(own_norm.state_dict())
        projection.weight.copy_(own.weight if linear else own.T)
        if linear and own.bias is not None:
            projection.bias.copy_(own.bias)
        else:
            projection.bias.zero_()


def linear_parts(
    width: int, dim: int, init_log_var: float, chosen: Sequence[str] = ("mean", "log_var")
) -> nn.ModuleDict:
    """A projection to the `mean` and one to the `log_var`, which starts around `init_log_var`."""
    parts = {}
    for part in chosen:
        layer = nn.Linear(width, dim)
        nn.init.xavier_uniform_(layer.weight)
        nn.init.constant_(layer.bias, init_log_var if part == "log_var" else 0.0)
        parts[part] = layer
    return nn.ModuleDict(parts)
