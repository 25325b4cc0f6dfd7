"""What methods share that put heads of their own on both towers and compare the Gaussians which these give."""
from __future__ import annotations

from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prolip.gaussian import Gaussian
from prolip.methods.base import Batch, Context, KnownMatches, Reps, Terms, clamp_logit_scale, logit_scale_and_bias
from prolip.scores import Side

SIDES = get_args(Side)
#: What stands behind the towers' last tokens; `text_projection` is a layer, or OpenCLIP's matrix.
UNUSED = ("proj", "ln_post", "uncertainty_proj", "text_projection", "ln_final", "text_uncertainty_projection")


class HeadsObjective(KnownMatches):
    """Gaussians of images and texts by a method's own heads; what a head stands in for is not used, nor learns."""

    statistics: tuple[str, ...] = ("scale", "bias", "trace_image", "trace_text")

    def __init__(self, model: Any, config: Any, context: Context | None = None):
        super().__init__(model, config, context)
        for tower in (model.visual, model.text):
            for name, parameter in tower.named_parameters() if tower.head is not None else ():
                if name.partition(".")[0] in UNUSED:
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


def own_words(ids: Tensor, pad_id: int) -> Tensor:
    """Which tokens of texts are no padding at their end, (B, L) bool; the first always counts."""
    place = torch.arange(ids.shape[1], device=ids.device)
    return place <= torch.where(ids != pad_id, place, 0).amax(1, keepdim=True)


def pooled_tokens(tokens: Tensor, ids: Tensor | None, pad_id: int | None) -> tuple[Tensor, Tensor | None]:
    """[CLS] and patches, or words, without [UNC], (B, K, width), and which of them count: (B, K) bool, None for all.

    tokens: a tower's, of images [CLS], [UNC], patches; of texts (with ids) words, [UNC], [CLS].
    """
    if ids is None:
        return torch.cat([tokens[:, :1], tokens[:, 2:]], 1), None
    assert pad_id is not None
    return torch.cat([tokens[:, -1:], tokens[:, :-2]], 1), F.pad(own_words(ids, pad_id), (1, 0), value=True)


def begin_as(norm: nn.LayerNorm, projection: nn.Linear, tower: Any) -> None:
    """Give a head's norm and projection (width -> D) the weights of those that `tower` makes its means with."""
    image = hasattr(tower, "proj")  # OpenCLIP's names
    own_norm, own = (tower.ln_post, tower.proj) if image else (tower.ln_final, tower.text_projection)
    linear = isinstance(own, nn.Linear)
    with torch.no_grad():
        norm.load_state_dict(own_norm.state_dict())
        projection.weight.copy_(own.weight if linear else own.T)
        if linear and own.bias is not None:
            projection.bias.copy_(own.bias)
        else:
            projection.bias.zero_()


def linear_parts(width: int, dim: int, init_log_var: float) -> nn.ModuleDict:
    """A projection to the `mean` and one to the `log_var`, which starts around `init_log_var`."""
    parts = {}
    for part, bias in (("mean", 0.0), ("log_var", init_log_var)):
        layer = nn.Linear(width, dim)
        nn.init.xavier_uniform_(layer.weight)
        nn.init.constant_(layer.bias, bias)
        parts[part] = layer
    return nn.ModuleDict(parts)
