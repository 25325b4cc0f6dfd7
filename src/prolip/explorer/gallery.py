"""What is shown of a whole gallery: items, their uncertainty, the ends of its order, a sample of it as a map; the texts
that its pictures are compared with: its captions, or its items where they are texts; traversals.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from prolip.embedder import Embedder
from prolip.explorer.pictures import Pictures, has_picture
from prolip.gaussian import Gaussian, concatenate
from prolip.hierarchy import ROOTS
from prolip.hierarchy.traversal import Pairwise, traverse
from prolip.measures import pairwise_log_inclusion
from prolip.measures.plane import Plane, fit_plane, place
from prolip.scores import Side, largest
from prolip.search.answers import meaning
from prolip.search.exact import other_side
from prolip.search.index import SearchIndex
from prolip.search.store import Item
from prolip.uncertainty.units import in_words
from prolip.utils.console import plain

#: Items of a map, captions of an item and characters of a text that are shown.
MAPPED, CAPTIONS, CHARACTERS = 1500, 5, 400
#: Items that are looked through for captions, and pictures beside each of a path.
LOOKED, BESIDE = 20_000, 4
Value = TypeVar("Value")


class Once(Generic[Value]):
    """A value that is computed for whoever asks first, while others wait for it; done: nobody waits any more."""

    def __init__(self, compute: Callable[[], Value]):
        self._compute, self._lock, self.done = cache(compute), threading.Lock(), False

    def __call__(self) -> Value:
        with self._lock:
            found = self._compute()
        self.done = True
        return found


class Map(NamedTuple):
    """rows: of the sample; plane; places: (M, 5) as `place` has them."""

    rows: np.ndarray
    plane: Plane
    places: np.ndarray


class Gallery:
    """An index as the page shows it: never more than a chunk and four bytes an item of it in memory.

    uncertainty: (N,) float32 of all rows, NaN for deleted ones; mapped: a sample in its plane.
    """

    def __init__(self, index: SearchIndex):
        if not len(index):
            raise ValueError(f"{index.store.folder} holds no item: put some in, prolip search add")
        self.index, self.pictures = index, Pictures()
        self.units, self.own = meaning(index)
        self.probabilistic = index.store.gallery.log_var is not None
        self.uncertainty = Once(self._uncertainty)
        self.mapped = Once(self._map)

    def item(self, row: Any) -> Item:
        """What is known of a row. KeyError where it is not there."""
        if not isinstance(row, int) or isinstance(row, bool) or not 0 <= row < len(self.index.store):
            raise KeyError(f"no item {row!r}: there are {len(self.index.store):,}, counted from 0")
        alive = self.index.store.gallery.alive
        if alive is not None and not alive[row]:
            raise KeyError(f"item {row} was deleted")
        return self.index.items([row])[0]

    def describe(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Rows as the page shows them."""
        trace = self.uncertainty()
        return [
            {"row": row, **shown(item), **self.meaning_of(float(trace[row]), self.index.side)}
            for row, item in zip(rows, self.index.items(rows))
        ]

    def meaning_of(self, trace: float, side: Side) -> dict[str, Any]:
        """A trace, what it says in bits of log2 of all that could be meant, and how much it fits."""
        if self.units is None or not math.isfinite(trace):
            return {"uncertainty": number(trace), "bits": None, "fits": None}
        of, x = f"{other_side(side)}s", torch.tensor(trace)
        bits, share = float(self.units.information(x, of, bits=True)), float(self.units.share(x, of))
        return {"uncertainty": number(trace), "bits": number(bits), "fits": in_words(share)}

    def sample(self, count: int) -> np.ndarray:
        """At most so many living rows at random, rising."""
        alive = self.index.store.gallery.alive
        rows: Any = len(self.index) if alive is None else np.flatnonzero(alive)
        return np.sort(np.random.default_rng(0).choice(rows, min(count, len(self.index)), replace=False))

    def extremes(self, count: int) -> tuple[list[int], list[int]]:
        """The rows with the least and the most uncertainty, the ends first."""
        trace = self.uncertainty()
        rows = np.flatnonzero(~np.isnan(trace))
        count = min(count, len(rows))
        ends = []
        for values in (trace[rows], -trace[rows]):
            near = np.argpartition(values, count - 1)[:count]
            ends.append(rows[near[np.argsort(values[near], kind="stable")]].tolist())
        return ends[0], ends[1]

    def rank(self, trace: float) -> float:
        """The share of the items that are less uncertain."""
        values = self.uncertainty()
        return float((values < trace).sum() / (~np.isnan(values)).sum())

    def _uncertainty(self) -> np.ndarray:
        found = np.full(len(self.index.store), np.nan, dtype=np.float32)
        for rows in self.index.store.gallery.blocks():
            found[rows] = self.own.uncertainty(self.index.store.gallery.gaussian(rows)).float().numpy()
        return found

    def _map(self) -> Map:
        rows = self.sample(MAPPED)
        z = self.index.gaussians(rows.tolist())
        plane = fit_plane(z)
        return Map(rows, plane, place(plane, z).numpy())


def shown(item: Item) -> dict[str, Any]:
    """An item without its paths, and with texts of bounded length."""
    captions = [cut(text) for text in item.get("captions", [])[:CAPTIONS]]
    return {"key": cut(item["key"]), "captions": captions, "picture": has_picture(item)}


def cut(text: str) -> str:
    """A text of at most CHARACTERS, in one line."""
    return plain(text if len(text) <= CHARACTERS else f"{text[: CHARACTERS - 1]}…")


def number(value: float | None) -> float | None:
    """A number as JSON has it, to six digits; None for what is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


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

    def nearest(self, image: Gaussian, count: int, doubt: Tensor | None = None) -> list[dict[str, Any]]:
        """The best texts of a picture (1, D) by the model's own score, with its doubt."""
        own, (texts, z) = self.gallery.own, self.found()
        scores = own.pairwise(image, z)[0]
        probability = own.match_probability(scores, doubt, 0.0 if own.units is None else own.units.share(z.trace))
        best = largest(scores.unsqueeze(0), count)[0]
        return [
            text
            | {
                "score": number(float(scores[i])),
                "probability": None if probability is None else number(float(probability[i])),
            }
            for text, i in zip(self.describe(texts, z, best.tolist()), best)
        ]

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
        return {"steps": steps, "root": root, "root_text": None if chosen < 0 else cut(texts[chosen]), "among": among}


def others_include(side: str) -> str | Pairwise:
    """`log_inclusion`; where the question is the first of the texts, of the others alone: each includes itself most."""
    if side == "image":
        return "log_inclusion"
    return lambda inner, outer: pairwise_log_inclusion(inner, outer).index_fill(1, torch.tensor([0]), -torch.inf)


def captions_of(item: Item) -> list[str]:
    """An item's captions."""
    return [text for text in item.get("captions", []) if text.strip()]
