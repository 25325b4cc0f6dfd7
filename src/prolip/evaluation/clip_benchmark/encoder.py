"""Our models for clip_benchmark: every input is one row, and the product of two sides' rows is their scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prolip.embedder import embed_texts, encode
from prolip.gaussian import Gaussian
from prolip.prompts.templates import mix_prompts
from prolip.prompts.weights import PromptWeights, UnfitPrompts
from prolip.scores import MeanScore, Score


class Packed(Tensor):
    """Gaussians as float64 rows [mean, log_var, side], side 1 of images, -1 of texts: products are scores.

    A factor (clip_benchmark's 100) scales whole rows: it is read from `side`.
    """

    score: ClassVar[Score]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Override functions of tensors: products are scores, `F.normalize` does not change rows."""
        if func is F.normalize:
            return args[0] if args else kwargs["input"]
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
            left, right = args
            return cls.products(left.as_subclass(Tensor), right.as_subclass(Tensor).mT)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def products(cls, left: Tensor, right: Tensor) -> Tensor:
        """Return the scores of two sides in either order, images first in the score: (N, P), (M, P) -> (N, M)."""
        if left[0, -1] < 0:
            return cls.products(right, left).mT
        dtype = next((x.dtype for x in cls.score.parameters()), left.dtype)  # a learned score has its own
        images, texts = (Gaussian(*(x[:, :-1] / x[:, -1:].abs()).to(dtype).chunk(2, dim=1)) for x in (left, right))
        return cls.score.pairwise(images, texts) * left[:, -1:] * right[:, -1].abs()


class GaussianEncoder(nn.Module):
    """A probabilistic model with OpenCLIP's two methods, which return unit means for `MeanScore`; prompts: weights."""

    def __init__(self, model: nn.Module, score: Score, prompts: PromptWeights | None = None):
        super().__init__()
        self.model, self.score, self.prompts = model, score, prompts
        self.of_means = type(score) is MeanScore
        self.packed: type[Packed] = type("Packed", (Packed,), {"score": score})

    def encode_image(self, image: Tensor, normalize: bool = True) -> Tensor:
        """Encode images (B, 3, H, W) -> (B, P)."""
        z = self.model.encode_image(image, normalize=normalize)  # type: ignore[operator]
        return self.rows(z, 1.0)

    def encode_text(self, text: Tensor, normalize: bool = True) -> Tensor:
        """Encode token ids (B, L) -> (B, P)."""
        z = self.model.encode_text(text, normalize=normalize)  # type: ignore[operator]
        return self.rows(z, -1.0)

    def rows(self, z: Gaussian, side: float) -> Tensor:
        """Return the rows that clip_benchmark multiplies, (N, D) -> (N, P): the means, or rows of `Packed`."""
        if self.of_means:
            return z.mean
        ends = torch.full_like(z.mean[:, :1], side)
        return torch.cat([z.mean, z.log_var, ends], dim=1).double().as_subclass(self.packed)


def class_vectors(
    model: GaussianEncoder,
    tokenizer: Callable,
    classnames: Sequence[str],
    templates: Sequence[str] | Mapping[str, Sequence[str]],
    device: str,
    amp: bool,
) -> Tensor:
    """Embed every class as the mixture of its prompts, (P, C); templates: with {c} for the class, or by class."""
    weights = model.prompts
    if weights is not None:
        if isinstance(templates, Mapping):
            raise UnfitPrompts(f"{weights} are of templates, but here each class has its own prompts: remove them")
        weights.check(classnames, templates, weights.fingerprint)
    precision = "fp32"
    if amp:  # the precision of torch.autocast(device): bf16 on CPU, fp16 on CUDA
        half = torch.get_autocast_dtype(torch.device(device).type) == torch.float16
        precision = "amp_fp16" if half else "amp_bf16"
    groups = [
        templates[name] if isinstance(templates, Mapping) else [text.format(c=name) for text in templates]
        for name in classnames
    ]
    mixed = mix_prompts(
        (text for group in groups for text in group),
        [len(group) for group in groups],
        partial(embed_texts, partial(encode, model.model, "text", device, precision), tokenizer),
        None if weights is None else lambda z, first: weights.weights(z.trace, first),
    )
    # A plain tensor, which --save_clf can store; the rows of images implement its product.
    return model.rows(mixed, -1.0).as_subclass(Tensor).to(device).mT.contiguous()
