"""OpenCLIP's names for what is done differently here: a door where the result is a Gaussian, else what to write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import open_clip
import torch
from torch import nn

from prolip.evaluation.zero_shot import TEMPLATES, class_gaussians
from prolip.gaussian import Gaussian, kind_of


def build_zero_shot_classifier(
    model: nn.Module,
    tokenizer: Callable,
    classnames: Sequence[str],
    templates: Sequence[str | Callable[[str], str]] = TEMPLATES,
    num_classes_per_batch: int | None = 10,
    device: str | torch.device = "cpu",
    use_tqdm: bool = False,
) -> Gaussian:
    """Every class as the mixture of its prompts: Gaussians (C, D) on `device`, where OpenCLIP gives a matrix (D, C).

    Images are classified by `measures.pairwise_csd_similarity(image, classes)`, (B, C). Arguments as OpenCLIP's.
    """
    if isinstance(classnames, str) or not classnames or not all(isinstance(name, str) for name in classnames):
        raise TypeError(
            f"classnames are {kind_of(classnames)}, want a list of names, one per class: synonyms go to"
            " prolip.evaluation.zero_shot.class_gaussians"
        )
    batch = (num_classes_per_batch or len(classnames)) * max(1, len(templates))
    options: dict[str, Any] = {"batch_size": batch, "device": device, "progress": use_tqdm}
    return class_gaussians(model, tokenizer, [[name] for name in classnames], templates, **options).to(device)


def tokenize(*args: Any, **kwargs: Any) -> NoReturn:
    """Not here: OpenCLIP's has one vocabulary, and each model of ours its own."""
    raise NotImplementedError(
        "texts are tokenised by the model's own tokenizer: tokenizer ="
        " prolip.get_tokenizer(<model name>), then tokenizer(texts)"
    )


def list_pretrained(as_str: bool = False) -> list[str] | list[tuple[str, str]]:
    """OpenCLIP's published weights, as its own function: (architecture, tag), or `architecture:tag`.

    Those of a ProLIP are `hf-hub:<org/name>`, such as hf-hub:SanghyukChun/ProLIP-ViT-B-16-DC-1B-12_8B.
    """
    return open_clip.list_pretrained(as_str)
