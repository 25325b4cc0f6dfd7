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

from prolip.evaluation.embed import embed_texts
from prolip.evaluation.zero_shot import mix_groups
from prolip.gaussian import Gaussian, concatenate

CLASSES_AT_ONCE = 64


class Scored(Tensor):
    """Vectors whose dot products are similarities already: `F.normalize` returns them unchanged, as a plain tensor."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """PyTorch's hook for functions of tensors: all but `F.normalize` do what they do."""
        if func is F.normalize:
            return (args[0] if args else kwargs["input"]).as_subclass(Tensor)
        return super().__torch_function__(func, types, args, kwargs or {})


def image_vectors(z: Gaussian) -> Tensor:
    """[mean, -trace/2, 1] in float64: (N, D) -> (N, D + 2)."""
    mean, half = _double(z)
    return torch.cat([mean, -half, torch.ones_like(half)], dim=1)


def text_vectors(z: Gaussian) -> Tensor:
    """[mean, 1, -trace/2] in float64, so that image_vectors(p) @ text_vectors(q).T is csd_similarity: (N, D + 2)."""
    mean, half = _double(z)
    return torch.cat([mean, torch.ones_like(half), -half], dim=1)


def _double(z: Gaussian) -> tuple[Tensor, Tensor]:
    """Means (N, D) and half traces (N, 1) in float64."""
    z = z.to(torch.float64)
    return z.mean, z.trace.unsqueeze(1) / 2


class GaussianEncoder(nn.Module):
    """A probabilistic model with OpenCLIP's two methods.

    similarity: "csd", vectors as above; "mean", the unit means, with which clip_benchmark runs as it is.
    """

    def __init__(self, model: nn.Module, similarity: str):
        super().__init__()
        self.model, self.similarity = model, similarity

    def encode_image(self, image: Tensor, normalize: bool = True) -> Tensor:
        """Images (B, 3, H, W) -> (B, D + 2), or (B, D) for the means."""
        z = self.model.encode_image(image, normalize=normalize)  # type: ignore[operator]
        return image_vectors(z).as_subclass(Scored) if self.similarity == "csd" else z.mean

    def encode_text(self, text: Tensor, normalize: bool = True) -> Tensor:
        """Token ids (B, L) -> (B, D + 2), or (B, D) for the means."""
        z = self.model.encode_text(text, normalize=normalize)  # type: ignore[operator]
        return text_vectors(z).as_subclass(Scored) if self.similarity == "csd" else z.mean


def class_vectors(
    model: GaussianEncoder,
    tokenizer: Callable,
    classnames: Sequence[str],
    templates: Sequence[str] | Mapping[str, Sequence[str]],
    device: str,
    amp: bool,
) -> Tensor:
    """Every class as the mixture of its prompts, N(mean of the means, mean of the variances): (D + 2, C), float64.

    The columns of clip_benchmark's classifier, with the traces of texts and images in the scores (a trace of an image
    changes nothing between classes, but much between images, which multi-label precision ranks). templates: {c} where
    the class goes, or the prompts of each class by its name.
    """
    precision = amp_precision(device) if amp else "fp32"
    parts = []
    for start in range(0, len(classnames), CLASSES_AT_ONCE):
        groups = [prompts(name, templates) for name in classnames[start : start + CLASSES_AT_ONCE]]
        texts = [text for group in groups for text in group]
        z = embed_texts(model.model, tokenizer, texts, device=device, precision=precision)
        parts.append(mix_groups(z, [len(group) for group in groups]))
    return text_vectors(concatenate(parts)).mT.contiguous().to(device)


def prompts(classname: str, templates: Sequence[str] | Mapping[str, Sequence[str]]) -> list[str]:
    """The prompts of one class."""
    if isinstance(templates, Mapping):
        return list(templates[classname])
    return [template.format(c=classname) for template in templates]


def amp_precision(device: str) -> str:
    """The name in `embed.PRECISIONS` of what `torch.autocast(device)` computes in: bf16 on CPU, fp16 on CUDA."""
    half = torch.get_autocast_dtype(torch.device(device).type) == torch.float16
    return "amp_fp16" if half else "amp_bf16"
