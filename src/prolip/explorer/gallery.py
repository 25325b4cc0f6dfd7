"""A gallery as the page shows it: items, their uncertainty and map; its captions and paths among them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from prolip.embedder import Embedder
from prolip.explorer.thumbnails import Thumbnails, has_picture
from prolip.gaussian import Gaussian, concatenate
from prolip.hierarchy.traversal import Pairwise, traverse
from prolip.measures import pairwise_log_inclusion
from prolip.measures.plane import Plane, fit_plane, place
from prolip.scores import Side, largest
from prolip.search.exact import other_side
from prolip.search.index import SearchIndex
from prolip.search.query import meaning
from prolip.search.store import Item
from prolip.uncertainty.units import in_words
from prolip.utils.console import plain

#: Items of a map, captions of an item, and characters of a text to show.
MAPPED, CAPTIONS, CHARACTERS = 1500, 5, 400
LOOKED, BESIDE = 20_000, 4  # items searched for captions, and images next to each caption of a path
Value = TypeVar("Value")


class Once(Generic[Value]):
    """A value that the first caller computes while others wait; done: it is ready."""

    def __init__(self, compute: Callable[[], Value]):
        self._compute, self._lock, self.done = cache(compute), threading.Lock(), False

    def __call__(self) -> Value:
        with self._lock:
            found = self._compute()
        self.done = True
        return found


class Gallery:
    """An index on the page. uncertainty: (N,) of all rows, NaN for deleted ones; mapped: rows, plane, places (M, 5);
    units: None also if the embedder's variances have no meaning.
    """

    def __init__(self, index: SearchIndex, embedder: Embedder | None = None):
        if not len(index):
            raise ValueError(f"{index.store.folder} has no items. Add some with prolip search add")
        self.index, self.pictures = index, Thumbnails()
        self.units, self.own = meaning(index)
        if embedder is not None and embedder.caution:
            self.units = None
        self.probabilistic = index.store.gallery.log_var is not None
        self.uncertainty, self.mapped = Once(self._uncertainty), Once(self._map)

    def item(self, row: Any) -> Item:
        """Return the item of a row. KeyError if there is none."""
        if not isinstance(row, int) or isinstance(row, bool) or not 0 <= row < len(self.index.store):
            raise KeyError(f"no item {row!r}: expected a number from 0 to below {len(self.index.store):,}")
        alive = self.index.store.gallery.alive
        if alive is not None and not alive[row]:
            raise KeyError(f"item {row} was deleted")
        return self.index.items([row])[0]

    def describe(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        trace, side = self.uncertainty(), self.index.side
        return [
            {"row": row, **shown(item), **self.meaning_of(float(trace[row]), side)}
            for row, item in zip(rows, self.index.items(rows))
        ]

    def meaning_of(self, trace: float, side: Side) -> dict[str, Any]:
        """Return a trace, its information in bits, and the matching share of the other side in words."""
        if self.units is None or not math.isfinite(trace):
            return {"uncertainty": number(trace), "bits": None, "fits": None}
        of, x = f"{other_side(side)}s", torch.tensor(trace)
        bits, share = float(self.units.information(x, of, bits=True)), float(self.units.share(x, of))
        return {"uncertainty": number(trace), "bits": number(bits), "fits": in_words(share)}

    def sample(self, count: int) -> np.ndarray:
        """Return at most `count` random living rows, rising."""
        alive = self.index.store.gallery.alive
        rows: Any = len(self.index) if alive is None else np.flatnonzero(alive)
        return np.sort(np.random.default_rng(0).choice(rows, min(count, len(self.index)), replace=False))

    def extremes(self, count: int) -> tuple[list[int], list[int]]:
        """Return the least and the most uncertain rows, the extreme ones first."""
        trace, ends = self.uncertainty(), []
        rows = np.flatnonzero(~np.isnan(trace))
        for values in (trace[rows], -trace[rows]):
            near = np.argpartition(values, min(count, len(rows)) - 1)[:count]
            ends.append(rows[near[np.argsort(values[near], kind="stable")]].tolist())
        return ends[0], ends[1]

    def _uncertainty(self) -> np.ndarray:
        found = np.full(len(self.index.store), np.nan, dtype=np.float32)
        for rows in self.index.store.gallery.blocks():
            found[rows] = self.own.uncertainty(self.index.store.gallery.gaussian(rows)).float().numpy()
        return found

    def _map(self) -> tuple[np.ndarray, Plane, np.ndarray]:
        rows = self.sample(MAPPED)
        z = self.index.gaussians(rows.tolist())
        plane = fit_plane(z)
        return rows, plane, place(plane, z).numpy()


def shown(item: Item) -> dict[str, Any]:
    """Return an item without its paths, with shortened texts."""
    captions = [cut(text) for text in item.get("captions", [])[:CAPTIONS]]
    return {"key": cut(item["key"]), "captions": captions, "picture": has_picture(item)}


def cut(text: str) -> str:
    """Return at most CHARACTERS of a text, on one line."""
    return plain(text if len(text) <= CHARACTERS else f"{text[: CHARACTERS - 1]}…")


def number(value: float | None) -> float | None:
    """Return a number for JSON, to six digits; None if it is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def captions_of(item: Item) -> list[str]:
    """Return the non-blank captions of an item."""
    return [text for text in item.get("captions", []) if text.strip()]


class Captions:
    """Up to `most` distinct texts of a gallery, and `further` texts; found: texts and Gaussians, computed once."""

    def __init__(self, gallery: Gallery, embedder: Embedder | None, most: int, further: Sequence[str]):
        self.gallery, self.embedder, self.most, self.further = gallery, embedder, most, list(further)
        self.found = Once(self._find)

    def _find(self) -> tuple[list[str], Gaussian]:
        index, texts, parts = self.gallery.index, list[str](), list[Gaussian]()
        if index.side == "text":  # these are already embedded
            rows = self.gallery.sample(self.most).tolist()
            texts, parts = [item["key"] for item in index.items(rows)], [index.gaussians(rows)]
        if self.embedder is not None:
            known, own = set(texts), dict[str, None]()
            sample = np.random.default_rng(0).permutation([] if parts else self.gallery.sample(LOOKED))
            for part in np.array_split(sample, max(1, len(sample) // 500)):
                items = index.items(part.astype(int).tolist())
                own |= dict.fromkeys(text for item in items for text in captions_of(item))
                if len(own) >= self.most:
                    break
            if rest := [text for text in dict.fromkeys([*[*own][: self.most], *self.further]) if text not in known]:
                texts, parts = texts + rest, [*parts, self.embedder.embed_texts(rest)]
        return texts, concatenate(parts) if parts else Gaussian(torch.zeros(0, 1), torch.zeros(0, 1))

    def nearest(self, image: Gaussian, count: int, doubt: Tensor | None = None) -> list[dict[str, Any]]:
        """Return the best texts of an image (1, D) by the model's own score, hedged by the image's uncertainty."""
        own, (texts, z) = self.gallery.own, self.found()
        scores = own.pairwise(image, z)[0]
        probability = own.match_probability(scores, doubt, 0.0 if own.units is None else own.units.share(z.trace))
        best = largest(scores.unsqueeze(0), count)[0].tolist()
        found = self.describe(texts, z, best)
        for text, i in zip(found, best):
            text["score"] = number(float(scores[i]))
            text["probability"] = None if probability is None else number(float(probability[i]))
        return found

    def describe(self, texts: Sequence[str], z: Gaussian, some: list[int]) -> list[dict[str, Any]]:
        traces = self.gallery.own.uncertainty(z.select(torch.tensor(some))).tolist()
        return [{"text": cut(texts[i]), **self.gallery.meaning_of(trace, "text")} for i, trace in zip(some, traces)]

    def walk(self, asked: Gaussian, label: str, side: str, root: str) -> dict[str, Any]:
        """Return the captions from a query (1, D) to its root (ProLIP 4.4), a text first, with the nearest images."""
        if self.embedder is None:
            raise ValueError("captions need a model to embed them. Start with --model")
        texts, z = self.found()
        if not texts:
            raise ValueError("a path needs captions, but there are none. Give --texts FILE, one text per line")
        among, root = len(texts), root if self.gallery.probabilistic else "empty"
        inclusion: str | Pairwise = "log_inclusion"
        if side == "text":
            others = [i for i, text in enumerate(texts) if text != label]
            texts, z = [label, *(texts[i] for i in others)], concatenate([asked, z.select(torch.tensor(others))])

            def others_include(inner: Gaussian, outer: Gaussian) -> Tensor:  # the query includes itself most
                return pairwise_log_inclusion(inner, outer).index_fill(1, torch.tensor([0]), -torch.inf)

            inclusion = others_include
        found = traverse(asked, z, self.embedder.embed_texts([""]), root, inclusion=inclusion)
        path = found.path(0)
        steps = self.describe(texts, z, path)
        if self.gallery.index.side == "image":
            near = self.gallery.index.search(z.select(torch.tensor(path)), BESIDE)
            for step, rows in zip(steps, near.rows.tolist()):
                step["pictures"] = self.gallery.describe([row for row in rows if row >= 0])
        chosen = int(found.root_caption[0])  # -1: the root is the empty text
        return {"steps": steps, "root": root, "root_text": None if chosen < 0 else cut(texts[chosen]), "among": among}
