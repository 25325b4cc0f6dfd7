"""Texts that a gallery's pictures are compared with: its captions, or its items where they are texts; traversals."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from prolip.evaluation.model import Embedder
from prolip.explorer.gallery import Gallery, Once, cut, number
from prolip.gaussian import Gaussian, concatenate
from prolip.hierarchy.traversal import ROOTS, Pairwise, Traversal, traverse
from prolip.measures import pairwise_log_inclusion
from prolip.scores import largest
from prolip.search.store import Item

#: Captions that are embedded at most, items that are looked through for them, and pictures beside each of a path.
TEXTS, LOOKED, BESIDE = 2000, 20_000, 4


class Captions:
    """At most `most` distinct texts of a gallery, embedded when they are first asked for, and `further` ones beside.

    there: whether there are any; texts: (T) of them, z: (T, D).
    """

    def __init__(
        self, gallery: Gallery, embedder: Embedder | None, most: int = TEXTS, further: Sequence[str] = ()
    ):  # fmt: skip
        self.gallery, self.embedder, self.most, self.further = gallery, embedder, most, list(further)
        self._found = Once(self._find)
        self._empty = Once(lambda: self.model.embed_texts([""]))

    @property
    def model(self) -> Embedder:
        """What embeds texts. ValueError where there is none."""
        if self.embedder is None:
            raise ValueError("captions are embedded by a model, and there is none: start with --model")
        return self.embedder

    @property
    def there(self) -> bool:
        """Whether a picture can be compared with texts."""
        return bool(self._found()[0])

    @property
    def ready(self) -> bool:
        """Whether they are embedded already."""
        return self._found.done

    @property
    def texts(self) -> list[str]:
        return self._found()[0]

    @property
    def z(self) -> Gaussian:
        return self._found()[1]

    def _find(self) -> tuple[list[str], Gaussian]:
        """Texts in a gallery of texts have their Gaussians already."""
        own, known = self._own()
        texts = [*own, *dict.fromkeys(text for text in self.further if text not in set(own))]
        if known is not None and self.embedder is None:
            return own, known
        if self.embedder is None or not texts:
            return [], Gaussian(torch.zeros(0, 1), torch.zeros(0, 1))
        rest = texts if known is None else texts[len(own) :]
        parts = ([] if known is None else [known]) + ([self.embedder.embed_texts(rest)] if rest else [])
        return texts, concatenate(parts)

    def _own(self) -> tuple[list[str], Gaussian | None]:
        """The gallery's own texts, and their Gaussians where they are its items."""
        index = self.gallery.index
        if index.side == "text":
            rows = self.gallery.sample(self.most).tolist()
            return [item["key"] for item in index.items(rows)], index.gaussians(rows)
        if self.embedder is None:
            return [], None
        rows, texts = self.gallery.sample(LOOKED), dict[str, None]()
        for part in np.array_split(np.random.default_rng(0).permutation(rows), max(1, len(rows) // 500)):
            texts |= dict.fromkeys(text for item in index.items(part.tolist()) for text in captions_of(item))
            if len(texts) >= self.most:
                break
        return list(texts)[: self.most], None

    def rank(self, trace: float) -> float:
        """The share of the texts that are less uncertain."""
        return float((self.gallery.own.uncertainty(self.z) < trace).double().mean())

    def nearest(self, image: Gaussian, count: int) -> list[dict[str, Any]]:
        """The best texts of a picture (1, D) by the model's own score."""
        own = self.gallery.own
        scores = own.pairwise(image, self.z)[0]
        probability = own.match_probability(scores)
        best = largest(scores.unsqueeze(0), count)[0].tolist()
        return [self.describe(i) | {"score": number(float(scores[i])),
                                    "probability": None if probability is None else number(float(probability[i]))}
                for i in best]  # fmt: skip

    def describe(self, i: int) -> dict[str, Any]:
        """A text with what it says."""
        trace = float(self.gallery.own.uncertainty(self.z.select(slice(i, i + 1)))[0])
        return {"text": cut(self.texts[i]), **self.gallery.meaning_of(trace, "text")}

    def walk(self, asked: Gaussian, label: str, side: str, root: str) -> dict[str, Any]:
        """The captions from a question (1, D) to its root, ProLIP 4.4, each with the gallery's pictures nearest to it.

        A text begins at itself. ValueError for an unknown root, and where nothing can be met.
        """
        if root not in ROOTS:
            raise ValueError(f"root {root!r} is unknown: use one of {', '.join(ROOTS)}")
        empty = self._empty()
        if not self.there:
            raise ValueError("a path is one of captions, and there are none here: give --texts FILE, a text per line")
        points = not self.gallery.probabilistic
        texts, z = self.texts, self.z
        if side == "text":
            others = [i for i, text in enumerate(texts) if text != label]
            texts, z = [label, *(texts[i] for i in others)], concatenate([asked, z.select(torch.tensor(others))])
        found = traverse(asked, z, empty, "empty" if points else root, inclusion=others_include(side))
        path = found.path(0)
        met = z.select(torch.tensor(path))
        traces = self.gallery.own.uncertainty(met).tolist()
        steps = [{"text": cut(texts[i]), **self.gallery.meaning_of(trace, "text")} for i, trace in zip(path, traces)]
        if self.gallery.index.side == "image":
            near = self.gallery.index.search(met, BESIDE)
            for step, rows in zip(steps, near.rows.tolist()):
                step["pictures"] = self.gallery.describe([row for row in rows if row >= 0])
        return {"steps": steps, "root": "empty" if points else root, "root_text": root_text(found, texts),
                "among": len(self.texts)}  # fmt: skip


def others_include(side: str) -> str | Pairwise:
    """`log_inclusion`; where the question is the first of the texts, of the others alone: each includes itself most."""
    if side == "image":
        return "log_inclusion"
    return lambda inner, outer: pairwise_log_inclusion(inner, outer).index_fill(1, torch.tensor([0]), -torch.inf)


def root_text(found: Traversal, texts: list[str]) -> str | None:
    """The caption that the root is made of, None for "" alone."""
    chosen = int(found.root_caption[0])
    return None if chosen < 0 else cut(texts[chosen])


def captions_of(item: Item) -> list[str]:
    """An item's captions."""
    return [text for text in item.get("captions", []) if text.strip()]
