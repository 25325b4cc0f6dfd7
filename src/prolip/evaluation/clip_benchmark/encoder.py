"""Our models as clip_benchmark wants them: every input one vector, and the dot product of two vectors the similarity.

csd_similarity is mean.mean' - (trace + trace')/2, a dot product once an image becomes [mean, -trace/2, 1] and a text
[mean, 1, -trace/2]. clip_benchmark brings every vector to unit length before it multiplies, which would break this. Its
own code can be kept all the same by padding all vectors to one length sqrt(C), but then the traces must be bounded in
advance, and the division by C costs float32 its last bits. Instead the vectors are in float64, where autocast leaves
them alone as well, and refuse to be normalised; everything after that is clip_benchmark's code.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prolip.evaluation.model import embed_texts, encoder
from prolip.evaluation.zero_shot import mix_groups
from prolip.gaussian import Gaussian, concatenate
from prolip.scores import CSDScore, MeanScore, Score

CLASSES_AT_ONCE = 64


class Scored(Tensor):
    """Vectors whose dot products are similarities already: `F.normalize` returns them unchanged, as a plain tensor."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """PyTorch's hook for functions of tensors: all but `F.normalize` do what they do."""
        if func is F.normalize:
            return (args[0] if args else kwargs["input"]).as_subclass(Tensor)
        return super().__torch_function__(func, types, args, kwargs or {})


def image_vectors(z: Gaussian, score: Score | None = None) -> Tensor:
    """[vector, offset, 1] of a score's factors in float64, of csd's without one: (N, D) -> (N, P + 2)."""
    vector, offset = _factors(z, score)
    return torch.cat([vector, offset, torch.ones_like(offset)], dim=1)


def text_vectors(z: Gaussian, score: Score | None = None) -> Tensor:
    """[vector, 1, offset], so that image_vectors(p) @ text_vectors(q).T is the score: (N, D) -> (N, P + 2)."""
    vector, offset = _factors(z, score)
    return torch.cat([vector, torch.ones_like(offset), offset], dim=1)


def _factors(z: Gaussian, score: Score | None) -> tuple[Tensor, Tensor]:
    """Vectors (N, P) and offsets (N, 1) in float64. ValueError for a score that has none."""
    score = CSDScore() if score is None else score
    factors = score.factors(z.to(torch.float64))
    if factors is None:
        raise ValueError(
            f"the score {score.name!r} is no dot product, and clip_benchmark knows no other: give --similarity csd or "
            "mean, or use python -m prolip.evaluation"
        )
    return factors.vector, factors.offset.unsqueeze(1)


class GaussianEncoder(nn.Module):
    """A probabilistic model with OpenCLIP's two methods.

    score: by its factors, vectors as above; `MeanScore`, the unit means, with which clip_benchmark runs as it is.
    """

    def __init__(self, model: nn.Module, score: Score):
        super().__init__()
        self.model, self.score = model, score

    @property
    def of_means(self) -> bool:
        """Whether variances are left aside."""
        return isinstance(self.score, MeanScore)

    def encode_image(self, image: Tensor, normalize: bool = True) -> Tensor:
        """Images (B, 3, H, W) -> (B, P + 2), or (B, D) for the means."""
        z = self.model.encode_image(image, normalize=normalize)  # type: ignore[operator]
        return z.mean if self.of_means else image_vectors(z, self.score).as_subclass(Scored)

    def encode_text(self, text: Tensor, normalize: bool = True) -> Tensor:
        """Token ids (B, L) -> (B, P + 2), or (B, D) for the means."""
        z = self.model.encode_text(text, normalize=normalize)  # type: ignore[operator]
        return z.mean if self.of_means else text_vectors(z, self.score).as_subclass(Scored)


def class_vectors(
    model: GaussianEncoder,
    tokenizer: Callable,
    classnames: Sequence[str],
    templates: Sequence[str] | Mapping[str, Sequence[str]],
    device: str,
    amp: bool,
) -> Tensor:
    """Every class as the mixture of its prompts, N(mean of the means, mean of the variances): (P + 2, C), float64.

    The columns of clip_benchmark's classifier, with the traces of texts and images in the scores (a trace of an image
    changes nothing between classes, but much between images, which multi-label precision ranks). templates: {c} where
    the class goes, or the prompts of each class by its name.
    """
    precision = amp_precision(device) if amp else "fp32"
    parts = []
    encode = encoder(model.model, "text", torch.device(device), precision)
    for start in range(0, len(classnames), CLASSES_AT_ONCE):
        groups = [prompts(name, templates) for name in classnames[start : start + CLASSES_AT_ONCE]]
        texts = [text for group in groups for text in group]
        z = embed_texts(encode, tokenizer, texts)
        parts.append(mix_groups(z, [len(group) for group in groups]))
    return text_vectors(concatenate(parts), model.score).mT.contiguous().to(device)


def prompts(classname: str, templates: Sequence[str] | Mapping[str, Sequence[str]]) -> list[str]:
    """The prompts of one class."""
    if isinstance(templates, Mapping):
        return list(templates[classname])
    return [template.format(c=classname) for template in templates]


def amp_precision(device: str) -> str:
    """The name in `embed.PRECISIONS` of what `torch.autocast(device)` computes in: bf16 on CPU, fp16 on CUDA."""
    half = torch.get_autocast_dtype(torch.device(device).type) == torch.float16
    return "amp_fp16" if half else "amp_bf16"
