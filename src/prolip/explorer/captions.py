"""Texts that a gallery's pictures are compared with: its captions, or its items where they are texts; traversals."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from prolip.evaluation.model import Embedder
from prolip.explorer.gallery import Gallery, Once, cut, number
from prolip.gaussian import Gaussian, concatenate
from prolip.hierarchy.choices import ROOTS
from prolip.hierarchy.traversal import Pairwise, traverse
from prolip.measures import pairwise_log_inclusion
from prolip.scores import largest
from prolip.search.store import Item

#: Items that are looked through for captions, and pictures beside each of a path.
LOOKED, BESIDE = 20_000, 4


class Texts(NamedTuple):
    """T texts and their Gaussians (T, D)."""

    texts: list[str]
    z: Gaussian


class Captions:
    """At most `most` distinct texts of a gallery, and `further` ones beside; found: embeds them, once."""

    def __init__(self, gallery: Gallery, embedder: Embedder | None, most: int, further: Sequence[str]):
        self.gallery, self.embedder, self.most, self.further = gallery, embedder, most, list(further)
        self.found = Once(self._find)

    def _find(self) -> Texts:
        """Texts in a gallery of texts have their Gaussians already."""
        index, texts, parts = self.gallery.index, list[str](), list[Gaussian]()
        if index.side == "text":
            rows = self.gallery.sample(self.most).tolist()
            texts, parts = [item["key"] for item in index.items(rows)], [index.gaussians(rows)]
        if self.embedder is not None:
            known, own = set(texts), [] if parts else self._captions()
            rest = [text for text in dict.fromkeys([*own, *self.further]) if text not in known]
            texts, parts = texts + rest, parts + ([self.embedder.embed_texts(rest)] if rest else [])
        return Texts(texts, concatenate(parts) if parts else Gaussian(torch.zeros(0, 1), torch.zeros(0, 1)))

    def _captions(self) -> list[str]:
        """Captions of the gallery's items."""
        rows, texts = self.gallery.sample(LOOKED), dict[str, None]()
        for part in np.array_split(np.random.default_rng(0).permutation(rows), max(1, len(rows) // 500)):
            items = self.gallery.index.items(part.tolist())
            texts |= dict.fromkeys(text for item in items for text in captions_of(item))
            if len(texts) >= self.most:
                break
        return list(texts)[: self.most]

    def rank(self, trace: float) -> float:
        """The share of the texts that are less uncertain."""
        return float((self.gallery.own.uncertainty(self.found().z) < trace).double().mean())

    def nearest(self, image: Gaussian, count: int) -> list[dict[str, Any]]:
        """The best texts of a picture (1, D) by the model's own score."""
        own, (texts, z) = self.gallery.own, self.found()
        scores = own.pairwise(image, z)[0]
        probability = own.match_probability(scores)
        best = largest(scores.unsqueeze(0), count)[0]
        return [text | {"score": number(float(scores[i])),
                        "probability": None if probability is None else number(float(probability[i]))}
                for text, i in zip(self.describe(texts, z, best.tolist()), best)]  # fmt: skip

    def describe(self, texts: Sequence[str], z: Gaussian, some: list[int]) -> list[dict[str, Any]]:
        """Some texts with what they say."""
        traces = self.gallery.own.uncertainty(z.select(torch.tensor(some))).tolist()
        return [{"text": cut(texts[i]), **self.gallery.meaning_of(trace, "text")} for i, trace in zip(some, traces)]

    def walk(self, asked: Gaussian, label: str, side: str, root: str) -> dict[str, Any]:
        """The captions from a question (1, D) to its root, ProLIP 4.4, each with the gallery's pictures nearest to it.

        A text begins at itself. ValueError for an unknown root, and where nothing can be met.
        """
        if root not in ROOTS:
            raise ValueError(f"root {root!r} is unknown: use one of {', '.join(ROOTS)}")
        if self.embedder is None:
            raise ValueError("captions are embedded by a model, and there is none: start with --model")
        texts, z = self.found()
        if not texts:
            raise ValueError("a path is one of captions, and there are none here: give --texts FILE, a text per line")
        among, root = len(texts), root if self.gallery.probabilistic else "empty"
        if side == "text":
            others = [i for i, text in enumerate(texts) if text != label]
            texts, z = [label, *(texts[i] for i in others)], concatenate([asked, z.select(torch.tensor(others))])
        found = traverse(asked, z, self.embedder.embed_texts([""]), root, inclusion=others_include(side))
        path = found.path(0)
        steps = self.describe(texts, z, path)
        if self.gallery.index.side == "image":
            near = self.gallery.index.search(z.select(torch.tensor(path)), BESIDE)
            for step, rows in zip(steps, near.rows.tolist()):
                step["pictures"] = self.gallery.describe([row for row in rows if row >= 0])
        chosen = int(found.root_caption[0])  # -1: the root is the empty text alone
        return {"steps": steps, "root": root, "root_text": None if chosen < 0 else cut(texts[chosen]),
                "among": among}  # fmt: skip


def others_include(side: str) -> str | Pairwise:
    """`log_inclusion`; where the question is the first of the texts, of the others alone: each includes itself most."""
    if side == "image":
        return "log_inclusion"
    return lambda inner, outer: pairwise_log_inclusion(inner, outer).index_fill(1, torch.tensor([0]), -torch.inf)


def captions_of(item: Item) -> list[str]:
    """An item's captions."""
    return [text for text in item.get("captions", []) if text.strip()]
