"""Prompt weights in a file, with their model, classes, prompts and images."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from prolip.prompts.bprw import Reweighing, rule_of
from prolip.utils.documents import loads, read_file
from prolip.utils.outputs import replacing

if TYPE_CHECKING:
    from prolip.evaluation.datasets.base import Dataset

FORMAT = "prolip-prompts-1"
#: Most bytes of a file; a thousand classes with 80 prompts take two million.
MOST = 2**28
AGAIN = "fit them again: prolip prompts fit"
OTHERS = "which must not be scored: evaluate another split, or fit to another (prolip prompts fit --split train)"


class UnfitPrompts(ValueError):
    """Weights of other classes, prompts or another model, or fitted to the images to be scored."""


@dataclass(frozen=True)
class PromptWeights:
    """Prompt weights of every class, with the model, prompts and images that limit their use."""

    way: ClassVar[str] = "fitted"
    classnames: tuple[str, ...]
    templates: tuple[str, ...]  # with {c} for the name
    table: Tensor  # (C, T), rows of sum 1
    model: str
    fingerprint: str  # of the model
    settings: Reweighing
    images: str  # the source of the fit
    data: str  # its fingerprint
    contents: frozenset[str] = frozenset()  # `Sample.content` of the images; empty in old files

    def __str__(self) -> str:
        return f"{self.rule} by {self.images} [{self.digest}]"

    @property
    def rule(self) -> str:
        """The rule of the fit, as --prompts names it."""
        return rule_of(self.settings)

    @cached_property
    def digest(self) -> str:
        """Eight digits that change with any part of the file."""
        return hashlib.blake2b(json.dumps(self.to_dict(), sort_keys=True).encode(), digest_size=4).hexdigest()

    def weights(self, uncertainty: Tensor, first: int = 0) -> Tensor:
        """Return the weights of consecutive classes from `first` on, as `PromptRule.weights`: (C', T) -> (C', T)."""
        return self.table[first : first + len(uncertainty)]

    def are_of(self, classnames: Sequence[str], templates: Sequence[str]) -> bool:
        """Return True if the weights are of these classes and prompts."""
        return (self.classnames, self.templates) == (tuple(classnames), tuple(map(in_braces, templates)))

    def check(
        self, classnames: Sequence[str], templates: Sequence[str], fingerprint: str, data: str | None = None
    ) -> None:
        """Raise UnfitPrompts for other classes, prompts or another model, and weights fitted to the images `data`."""
        if fingerprint != self.fingerprint:
            other = "which has other weights, settings or another tokenizer than this model"
            raise UnfitPrompts(f"{self} are weights for prompts of {self.model}, {other}: {AGAIN} with this one")
        prompts = tuple(map(in_braces, templates))
        parts = ("classes", self.classnames, tuple(classnames)), ("prompts", self.templates, prompts)
        for what, own, given in parts:
            if own != given:
                pairs = enumerate(zip_longest(own, given), 1)
                number, mine, theirs = next((i, a, b) for i, (a, b) in pairs if a != b)
                differ = f"these are {len(given)}, and number {number} is {mine!r} there and {theirs!r} here"
                raise UnfitPrompts(f"{self} are weights of {len(own)} {what}, {differ}: {AGAIN} with these {what}")
        if data is not None and data == self.data:
            raise UnfitPrompts(f"{self} were fitted to these very images, {OTHERS}")

    def check_images(self, dataset: Dataset) -> None:
        """Raise UnfitPrompts if the data set has images of the fit, in any format."""
        if self.contents and (shared := dataset.shared_with(self.contents)):
            raise UnfitPrompts(f"{self} were fitted to {shared} of {dataset.source}, {OTHERS}")

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values for `load`."""
        named = {name: getattr(self, name) for name in ("model", "fingerprint", "images", "data")}
        classes = [{"name": name, "weights": row} for name, row in zip(self.classnames, self.table.tolist())]
        lists = {"contents": sorted(self.contents), "templates": list(self.templates), "classes": classes}
        return {"format": FORMAT, **named, "settings": str(self.settings), **lists}

    def save(self, path: str | os.PathLike) -> None:
        """Write the file atomically."""
        with replacing(Path(path)) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike) -> PromptWeights:
        """Read a file of `save`. FileNotFoundError for a missing file, ValueError for another or a damaged one."""
        try:
            values = loads(read_file(path, MOST))
            if not isinstance(values, dict) or values.get("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            names, templates = tuple(one["name"] for one in values["classes"]), tuple(values["templates"])
            table = torch.tensor([one["weights"] for one in values["classes"]], dtype=torch.float64)
            texts = {key: values[key] for key in ("model", "fingerprint", "images", "data")}
            contents, settings = frozenset(values.get("contents", ())), Reweighing.parse(values["settings"])
            if not all(isinstance(x, str) for x in (*names, *templates, *texts.values(), *contents)):
                raise ValueError("a name in it is not a text")
            if bare := [template for template in templates if "{c}" not in template]:
                raise ValueError(f"its prompt {bare[0]!r} has no {{c}} for the class")
            right = bool(names) and table.shape == (len(names), len(templates)) and bool((table >= 0).all())
            if not right or not torch.allclose(table.sum(1), torch.ones(len(names)).double(), atol=1e-6):
                wanted = f"{len(templates)} numbers of 0 or more that sum to one, one for each prompt"
                raise ValueError(f"the weights of a class are not {wanted}")
        except FileNotFoundError:
            raise FileNotFoundError(f"no file {path}: write one with prolip prompts fit") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path} is not a file of prompt weights: {why}. {AGAIN[0].upper()}{AGAIN[1:]}") from error
        return cls(names, templates, table, **texts, settings=settings, contents=contents)


def in_braces(template: str) -> str:
    """Return a template with {c} for the class."""
    return template.replace("{}", "{c}")
