"""Zero-shot classification: a class is the mixture of its prompts' Gaussians, an image goes to the nearest class."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn
from tqdm import tqdm

from prolip.embedder import embed_texts, encode
from prolip.gaussian import Gaussian, concatenate, mixture
from prolip.prompts.bprw import Reweighing, rule_of
from prolip.prompts.weights import PromptWeights

#: Gaussians of prompts (C, T, D) and the number of their first class -> the weight of each prompt in its class (C, T),
#: of sum one.
Weigh = Callable[[Gaussian, int], Tensor]
Template = str | Callable[[str], str]
ALL, CERTAIN, BELOW, BEST, BPRW = "all", "certain", "below", "best", "bprw"
#: Prompts whose Gaussians are in memory at once while classes are mixed.
PROMPTS = 4096
#: Rules that choose by images.
BY_IMAGES = (BEST, BPRW)


@dataclass(frozen=True)
class PromptRule:
    """A rule that chooses prompts of a class by uncertainty and mixes the chosen ones evenly.

    way: `all`; `certain`: the `number` most certain of each class (PCME++ C.6); `below`: those with an uncertainty up
    to the class's mean + `number` standard deviations (ProLIP Table 3); `best` and `bprw` (with the settings `fit`):
    images choose, see `evaluation.prompts`, and the `weights` here are even.
    """

    way: str = ALL
    number: float = 0
    fit: Reweighing | None = None

    @classmethod
    def parse(cls, word: str) -> PromptRule:
        """Parse `all`, `certain:K`, `below:k`, `best`, `bprw` or `bprw:K`. ValueError for other words."""
        way, colon, text = word.partition(":")
        if way == BPRW and bool(colon) == bool(text):
            return cls(way, fit=Reweighing.parse(text))
        try:
            if way in (ALL, BEST) and not colon:
                return cls(way)
            if way == CERTAIN and int(text) > 0:
                return cls(way, int(text))
            if way == BELOW and math.isfinite(float(text)):
                return cls(way, float(text))
        except ValueError:
            pass
        wanted = "all, certain:K (1 or more), below:k (a number), best, bprw, bprw:K (labelled images of each class)"
        raise ValueError(f"{word!r} is not a rule for prompts: use {wanted}, or a file of prolip prompts fit")

    def __str__(self) -> str:
        if self.fit is not None:
            return rule_of(self.fit)
        return f"{self.way}:{self.number:g}" if self.way in (CERTAIN, BELOW) else self.way

    def check(self, prompts: int) -> None:
        """Raise ValueError if the rule takes more prompts than a class has."""
        if self.way == CERTAIN and self.number > prompts:
            raise ValueError(f"{self} exceeds the {prompts} prompts of a class: give {prompts} or less")

    def weights(self, uncertainty: Tensor, first: int = 0) -> Tensor:
        """Return weights (C, T) for uncertainties (C, T), rows of sum one; equal prompts rank in their order."""
        self.check(uncertainty.shape[1])
        kept = torch.ones_like(uncertainty, dtype=torch.bool)
        if self.way == CERTAIN:
            kept = certainty_ranks(uncertainty) < self.number
        elif self.way == BELOW:
            exact = uncertainty.double()  # so that the mean of equal numbers is not below them
            bound = exact.mean(1, keepdim=True) + self.number * exact.std(1, correction=0, keepdim=True)
            kept = (exact <= bound) | (certainty_ranks(uncertainty) == 0)  # at least the most certain one
        return kept / kept.sum(1, keepdim=True)


#: Which prompts of a class are mixed, and how much each counts.
Prompts = PromptRule | PromptWeights


def read_prompts(word: str) -> Prompts:
    """Read a rule by its word, or weights from a file. ValueError for neither, FileNotFoundError for a missing file."""
    named = word.endswith(".json") or os.path.isfile(word)
    return PromptWeights.load(word) if named else PromptRule.parse(word)


def certainty_ranks(uncertainty: Tensor) -> Tensor:
    """Rank uncertainties, (C, T) -> (C, T): 0 for the least uncertain prompt of a class; equal ones in their order."""
    return uncertainty.argsort(dim=1, stable=True).argsort(dim=1)


def class_prompts(classes: Sequence[str | Sequence[str]], templates: Sequence[Template]) -> tuple[list[str], list[int]]:
    """Return the prompts of all classes, one after the other, and their number per class.

    classes: a name or several (synonyms, members) of each; templates: with {} or {c} for the name, or functions
    of the name, as OpenCLIP's. ValueError without classes, names, templates or a place for the name.
    """
    names = [[given] if isinstance(given, str) else given for given in classes]
    if not names or not all(names) or not templates or str in (type(classes), type(templates)):
        what = f"{len(names)} classes and the prompts {templates!r}"
        raise ValueError(f"{what}: give at least one class, one name each, and a list of at least one prompt")
    for way in templates:
        if isinstance(way, str) and "{}" not in way and "{c}" not in way:
            raise ValueError(f"the prompt {way!r} has no {{c}} or {{}} for the class: add one")
    filled = [
        [way.replace("{c}", name).replace("{}", name) if isinstance(way, str) else way(name) for way in templates]
        for own in names
        for name in own
    ]
    return [text for texts in filled for text in texts], [len(own) * len(templates) for own in names]


def mix_groups(z: Gaussian, counts: Sequence[int], weigh: Weigh | None = None, first: int = 0) -> Gaussian:
    """Mix consecutive runs of `counts` Gaussians (N, D): (C, D). first: the number of the first run for `weigh`."""
    parts = []
    for number, run in enumerate(zip(*(x.split(list(counts)) for x in z)), first):
        part = Gaussian(*(x.unsqueeze(0) for x in run))
        parts.append(mixture(part, weigh(part, number) if weigh else None))
    return concatenate(parts)


def mix_prompts(
    prompts: Iterable[str],
    counts: Sequence[int],
    embed: Callable[[Iterable[str]], Gaussian],
    weigh: Weigh | None = None,
) -> Gaussian:
    """Mix consecutive runs of prompts, (C, D), some classes at a time; embed: texts -> (N, D)."""
    iterator, parts, group = iter(prompts), [], []
    for row, count in enumerate(counts, start=1):
        group.append(count)
        if sum(group) >= PROMPTS or row == len(counts):
            z = embed(islice(iterator, sum(group)))
            parts.append(mix_groups(z, group, weigh=weigh, first=row - len(group)))
            group = []
    return concatenate(parts)


def build_zero_shot_classifier(
    model: nn.Module,
    tokenizer: Callable,
    classnames: Sequence[str | Sequence[str]],
    templates: Sequence[Template],
    num_classes_per_batch: int | None = 10,
    device: str | torch.device = "cpu",
    use_tqdm: bool = False,
) -> Gaussian:
    """Embed every class as the mixture of its prompts: Gaussians (C, D) on `device`; OpenCLIP returns a matrix (D, C).

    Classify images by `measures.pairwise_csd_similarity(image, classes)`, (B, C). Arguments as in OpenCLIP; a class may
    have several names.
    """
    prompts, counts = class_prompts(classnames, templates)
    batch = (num_classes_per_batch or len(classnames)) * len(templates)
    texts = tqdm(prompts, desc="texts", unit="", disable=not use_tqdm)
    z = embed_texts(partial(encode, model, "text", device, "fp32"), tokenizer, texts, batch)
    return mix_groups(z, counts).to(device)
