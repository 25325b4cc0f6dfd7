"""Zero-shot classification: a class is the mixture of its prompts' Gaussians, an image goes to the nearest class."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from prolip.data.emoji import TEMPLATES
from prolip.evaluation.model import embed_texts, encoder
from prolip.gaussian import Gaussian, concatenate, mixture


def class_gaussians(
    model: nn.Module,
    tokenizer: Callable,
    classes: Sequence[Sequence[str]],
    templates: Sequence[str | Callable[[str], str]] = TEMPLATES,
    normalise: bool = True,
    device: torch.device | str = "cpu",
    precision: str = "fp32",
    **options: Any,
) -> Gaussian:
    """Every class as N(mean of the means, mean of the variances) over templates x its names: (C, D), ProLIP 4.2.

    classes: the names of each class, one or several (synonyms, members); templates: with {} in the name's place, or
    functions of the name, as OpenCLIP's; normalise: bring the averaged mean back to unit length, as the released
    evaluation does; device, precision: where and how the model computes; options: of `embed_texts`. Raises
    ValueError for a class without names, a template without {}, or no template.
    """
    if isinstance(templates, str) or not templates:
        raise ValueError(f"the templates are {templates!r}: give a list with at least one")
    for template in templates:
        if isinstance(template, str) and "{}" not in template:
            raise ValueError(f"the template {template!r} has no place for the class: write {{}} where its name goes")
    for i, names in enumerate(classes):
        if isinstance(names, str) or not names:
            raise ValueError(f"class {i} is {names!r}: give a list with at least one name")
    prompts = [[fill(template, name) for name in names for template in templates] for names in classes]
    encode = encoder(model, "text", torch.device(device), precision)
    z = embed_texts(encode, tokenizer, [prompt for group in prompts for prompt in group], **options)
    return mix_groups(z, [len(group) for group in prompts], normalise)


def fill(template: str | Callable[[str], str], name: str) -> str:
    """A template with the class's name in its place."""
    return template.replace("{}", name) if isinstance(template, str) else template(name)


def mix_groups(z: Gaussian, counts: Sequence[int], normalise: bool = True) -> Gaussian:
    """Consecutive runs of `counts` Gaussians (N, D), each mixed with equal weights: (C, D)."""
    parts = zip(z.mean.split(list(counts)), z.log_var.split(list(counts)))
    return concatenate(mixture(Gaussian(*(x.unsqueeze(0) for x in part)), normalise=normalise) for part in parts)
