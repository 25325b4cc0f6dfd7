"""Our models as clip_benchmark wants them: every input one row, and a product of two sides' rows their scores."""

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
    """Gaussians as float64 rows [mean, log_var, side], side 1 of images, -1 of texts: a product is their score.

    A factor (clip_benchmark's 100) scales whole rows: it is read off `side`.
    """

    score: ClassVar[Score]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """PyTorch's hook for functions of tensors: products are scores, `F.normalize` leaves rows as they are."""
        if func is F.normalize:
            return args[0] if args else kwargs["input"]
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
            left, right = args
            return cls.products(left.as_subclass(Tensor), right.as_subclass(Tensor).mT)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def products(cls, left: Tensor, right: Tensor) -> Tensor:
        """The scores of two sides, images first in the score whichever comes first here: (N, P), (M, P) -> (N, M)."""
        if left[0, -1] < 0:
            return cls.products(right, left).mT
        dtype = next((x.dtype for x in cls.score.parameters()), left.dtype)  # of a learned score
        images, texts = (Gaussian(*(x[:, :-1] / x[:, -1:].abs()).to(dtype).chunk(2, dim=1)) for x in (left, right))
        return cls.score.pairwise(images, texts) * left[:, -1:] * right[:, -1].abs()


class GaussianEncoder(nn.Module):
    """A probabilistic model with OpenCLIP's two methods, which give unit means for `MeanScore`; prompts: weights."""

    def __init__(self, model: nn.Module, score: Score, prompts: PromptWeights | None = None):
        super().__init__()
        self.model, self.score, self.prompts = model, score, prompts
        self.of_means = type(score) is MeanScore
        self.packed: type[Packed] = type("Packed", (Packed,), {"score": score})

    def encode_image(self, image: Tensor, normalize: bool = True) -> Tensor:
        """Images (B, 3, H, W) -> (B, P)."""
        z = self.model.encode_image(image, normalize=normalize)  # type: ignore[operator]
        return self.rows(z, 1.0)

    def encode_text(self, text: Tensor, normalize: bool = True) -> Tensor:
        """Token ids (B, L) -> (B, P)."""
        z = self.model.encode_text(text, normalize=normalize)  # type: ignore[operator]
        return self.rows(z, -1.0)

    def rows(self, z: Gaussian, side: float) -> Tensor:
        """What clip_benchmark multiplies, (N, D) -> (N, P): the means, or rows of `Packed`."""
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
    """Every class as the mixture of its prompts, (P, C); templates: {c} where the class goes, or prompts by class."""
    weights = model.prompts
    if weights is not None:
        if isinstance(templates, Mapping):
            raise UnfitPrompts(f"{weights} are of templates, and here each class has prompts of its own: drop them")
        weights.check(classnames, templates, weights.fingerprint)
    precision = "fp32"
    if amp:  # what torch.autocast(device) computes in: bf16 on CPU, fp16 on CUDA
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
    # A plain tensor, which --save_clf can keep; the rows of images know how to multiply it.
    return model.rows(mixed, -1.0).as_subclass(Tensor).to(device).mT.contiguous()
