"""What a tower knows before its last projection, which keeps only what compares images with texts.

Noise and blank pictures have ordinary means, and tokens like no others: the projection has forgotten what is foreign.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from open_clip.transformer import Transformer, text_global_pool
from torch import Tensor, nn

from prolip.gaussian import Gaussian, kind_of, upcast
from prolip.models.heads import layer_norm
from prolip.models.towers import ProbabilisticTextTransformer

SIDES = ("image", "text")


class Hidden(NamedTuple):
    """A batch at three depths, float32 and without a graph.

    mean: (B, D), unit means; pooled: (B, W), what the last projection takes; first: (B, 2 W), mean and standard
    deviation over the tokens that the first block takes. Of a tower that is not a transformer of OpenCLIP the means
    stand for both.
    """

    mean: Tensor
    pooled: Tensor
    first: Tensor


def encode_hidden(model: nn.Module, side: str, batch: Tensor) -> Hidden:
    """One batch of pixels or token ids through `encode_image` or `encode_text` of our models or OpenCLIP's.

    Raises ValueError for another side, and TypeError for a model that encodes to neither a Gaussian nor a tensor.
    """
    if side not in SIDES:
        raise ValueError(f"side is {side!r}: choose one of {', '.join(SIDES)}")
    encode: Callable[[Tensor], Any] = getattr(model, f"encode_{side}")
    tower = _tower(model, side)
    with torch.no_grad():
        if tower is None:
            mean = _unit_mean(encode(batch))
            return Hidden(mean, mean, mean)
        with _ends_of(tower.transformer) as ends:
            mean = _unit_mean(encode(batch))
        pooled = _pool_image(tower, ends["last"]) if side == "image" else _pool_text(tower, ends["last"], batch)
    return Hidden(mean, upcast(pooled), _spread(ends["first"]))


def _tower(model: nn.Module, side: str) -> Any:
    """The part of a model that owns the transformer of a side; None where it is built otherwise."""
    if side == "image":
        tower, pool = getattr(model, "visual", None), "_pool"
    else:  # OpenCLIP's CLIP has the parts of its text tower itself
        tower, pool = getattr(model, "text", model), "ln_final"
    return tower if isinstance(getattr(tower, "transformer", None), Transformer) and hasattr(tower, pool) else None


@contextlib.contextmanager
def _ends_of(transformer: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Tokens that go into and come out of a transformer while this is open, (B, L, W) each, as `first` and `last`."""
    kept: dict[str, Tensor] = {}

    def before(module: nn.Module, args: tuple) -> None:
        kept["first"] = args[0]

    def after(module: nn.Module, args: tuple, output: Tensor) -> None:
        kept["last"] = output

    hooks = [transformer.register_forward_pre_hook(before), transformer.register_forward_hook(after)]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


def _pool_image(tower: Any, tokens: Tensor) -> Tensor:
    """The last tokens (B, L, W) as a vision transformer pools and normalises them, (B, W)."""
    return tower._pool(tokens)[0]


def _pool_text(tower: Any, tokens: Tensor, ids: Tensor) -> Tensor:
    """The last tokens (B, L, W) of texts (B, L), normalised and pooled as their tower does, (B, W)."""
    if isinstance(tower, ProbabilisticTextTransformer) or getattr(tower, "cls_emb", None) is not None:
        return layer_norm(tower.ln_final, tokens[:, -1])
    kind = getattr(tower, "pool_type", None) or tower.text_pool_type  # of a tower, of a CLIP with its parts
    eos = getattr(tower, "eos_id", getattr(tower, "text_eos_id", None))
    return text_global_pool(layer_norm(tower.ln_final, tokens), ids, kind, eos_token_id=eos)


def _spread(tokens: Tensor) -> Tensor:
    """Mean and standard deviation over tokens, (B, L, W) -> (B, 2 W)."""
    x = upcast(tokens)
    return torch.cat([x.mean(1), x.std(1, correction=0)], 1)


def _unit_mean(encoded: Any) -> Tensor:
    """Unit means of what a model encodes to."""
    mean = encoded.mean if isinstance(encoded, Gaussian) else encoded
    if not isinstance(mean, Tensor):
        raise TypeError(f"the model encodes to {kind_of(encoded)}, want a Gaussian or a tensor (B, D)")
    return nn.functional.normalize(upcast(mean), dim=-1)
