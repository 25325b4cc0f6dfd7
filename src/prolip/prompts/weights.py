"""Weights of prompts in a file, with their model, classes, prompts and images."""

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
#: Bytes of a file: those of a thousand classes with 80 prompts have two million.
MOST = 2**28
AGAIN = "fit them again: prolip prompts fit"
OTHERS = "which they may not be scored on: evaluate another split, or fit to one (prolip prompts fit --split train)"


class UnfitPrompts(ValueError):
    """Weights are of other classes, prompts or a model, or may not be used on these images."""


@dataclass(frozen=True)
class PromptWeights:
    """The weights of every class's prompts, with all that decides where they may be used."""

    way: ClassVar[str] = "fitted"
    classnames: tuple[str, ...]
    templates: tuple[str, ...]  # with {c} in the name's place
    table: Tensor  # (C, T), rows of sum 1
    model: str
    fingerprint: str  # of the model
    settings: Reweighing
    images: str  # the source that they were fitted to
    data: str  # its fingerprint
    contents: frozenset[str] = frozenset()  # `Sample.content` of its images; empty in old files

    def __str__(self) -> str:
        return f"{self.rule} by {self.images} [{self.digest}]"

    @property
    def rule(self) -> str:
        """How they were fitted, as --prompts calls it."""
        return rule_of(self.settings)

    @cached_property
    def digest(self) -> str:
        """Eight digits that change with everything in the file."""
        return hashlib.blake2b(json.dumps(self.to_dict(), sort_keys=True).encode(), digest_size=4).hexdigest()

    def weights(self, uncertainty: Tensor, first: int = 0) -> Tensor:
        """As `PromptRule.weights`, of consecutive classes from `first` on: (C', T) -> (C', T)."""
        return self.table[first : first + len(uncertainty)]

    def are_of(self, classnames: Sequence[str], templates: Sequence[str]) -> bool:
        """Whether they are of these classes and prompts."""
        return (self.classnames, self.templates) == (tuple(classnames), tuple(map(in_braces, templates)))

    def check(
        self, classnames: Sequence[str], templates: Sequence[str], fingerprint: str, data: str | None = None
    ) -> None:
        """UnfitPrompts unless they are of these classes, prompts and model, and by other images than `data`."""
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
        """UnfitPrompts where the data set has images that they were fitted to, whatever reads them."""
        if self.contents and (shared := dataset.shared_with(self.contents)):
            raise UnfitPrompts(f"{self} were fitted to {shared} of {dataset.source}, {OTHERS}")

    def to_dict(self) -> dict[str, Any]:
        """JSON values, from which `load` makes it."""
        named = {name: getattr(self, name) for name in ("model", "fingerprint", "images", "data")}
        classes = [{"name": name, "weights": row} for name, row in zip(self.classnames, self.table.tolist())]
        lists = {"contents": sorted(self.contents), "templates": list(self.templates), "classes": classes}
        return {"format": FORMAT, **named, "settings": str(self.settings), **lists}

    def save(self, path: str | os.PathLike) -> None:
        """Write the file, whole or not at all."""
        with replacing(Path(path)) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike) -> PromptWeights:
        """Read what `save` wrote. FileNotFoundError, and ValueError for another or a damaged file."""
        try:
            values = loads(read_file(path, MOST))
            if not isinstance(values, dict) or values.get("format") != FORMAT:
                raise ValueError(f"it is no {FORMAT}")
            names, templates = tuple(one["name"] for one in values["classes"]), tuple(values["templates"])
            table = torch.tensor([one["weights"] for one in values["classes"]], dtype=torch.float64)
            texts = {key: values[key] for key in ("model", "fingerprint", "images", "data")}
            contents, settings = frozenset(values.get("contents", ())), Reweighing.parse(values["settings"])
            if not all(isinstance(x, str) for x in (*names, *templates, *texts.values(), *contents)):
                raise ValueError("a name in it is no text")
            if bare := [template for template in templates if "{c}" not in template]:
                raise ValueError(f"its prompt {bare[0]!r} has no {{c}} where the class goes")
            right = bool(names) and table.shape == (len(names), len(templates)) and bool((table >= 0).all())
            if not right or not torch.allclose(table.sum(1), torch.ones(len(names)).double(), atol=1e-6):
                wanted = f"{len(templates)} numbers of 0 or more that sum to one, one for each prompt"
                raise ValueError(f"the weights of a class are not {wanted}")
        except FileNotFoundError:
            raise FileNotFoundError(f"no file {path}: prolip prompts fit writes weights of prompts") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path} holds no weights of prompts: {why}. {AGAIN[0].upper()}{AGAIN[1:]}") from error
        return cls(names, templates, table, **texts, settings=settings, contents=contents)


def in_braces(template: str) -> str:
    """A template with {c} where the class goes."""
    return template.replace("{}", "{c}")
