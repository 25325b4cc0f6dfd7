"""A gallery that is searched: built from parts, kept in a folder, extended, thinned out, and asked."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import faiss
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from prolip.embedder import ModelCard
from prolip.gaussian import Gaussian, check_embeddings, concatenate
from prolip.losses import Factors
from prolip.measures import MEASURES, pairwise_inclusion_test, pairwise_log_inclusion
from prolip.measures.chance import OwnFirst, warn_once
from prolip.methods import find_score, score_from_dict
from prolip.scores import Score, Side, index_vectors
from prolip.search import exact, indexes
from prolip.search.exact import Found, make_buckets, nearest_by_elk, other_side
from prolip.search.indexes import FLAT, HNSW, LEAST, PQ, Kind, lists_for
from prolip.search.store import AGAIN, NAME, REMEDY, Item, Store
from prolip.utils.console import plain

log = logging.getLogger(__name__)

#: Rows of a chunk, which is what a killed build loses at most.
CHUNK = 4096
#: Of a score that an index does not serve, candidates that are scored, at least; of `pq`, how many per answer.
SHORTLIST, PER_ANSWER = 200, 10
#: Seconds after which an approximate index that is being built is written, to go on from there.
SAVE = 600.0


class Part(NamedTuple):
    """Some of what a source holds. position: how much of it was read then, in its own count."""

    items: list[Item]
    z: Gaussian
    position: int


class SearchIndex:
    """Gaussians in a folder, with an index of one score; `find`, `items` and `writing` are those of its store.

    score: what the answers are ranked by; coarse: itself where it factors, otherwise what the index serves, by which
    the items are chosen that the score then ranks; kind: of the approximate index; side: what the gallery is of.
    Queries are compared as the other side, whatever they are of.
    """

    def __init__(self, folder: str | os.PathLike, verify: bool = False):
        """Open an index. verify: read all of it, and compare checksums. ValueError for one that is damaged."""
        self.store = Store(folder)
        if verify:
            self.store.verify()
        values = self.store.values
        try:
            self.score: Score = score_from_dict(values["score"])
            self.coarse: Score = score_from_dict(values["coarse"])
            self.served: bool = values["score"] == values["coarse"]
            self.kind, self.side = Kind(values["kind"]["name"], values["kind"]["lists"]), values["side"]
            self.card: ModelCard | None = None if values["card"] is None else ModelCard(**values["card"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{self.store.folder / NAME} is of another version ({error}): {REMEDY}") from error
        self.find, self.items, self.writing = self.store.find, self.store.items, self.store.writing

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike,
        score: Score,
        dim: int,
        kind: Kind | None = None,
        side: Side = "image",
        card: ModelCard | None = None,
        further: Mapping[str, Any] | None = None,
    ) -> SearchIndex:
        """An empty one of Gaussians of width `dim`; card, further: of the model, and JSON values to keep with it."""
        some = Gaussian(torch.zeros(1, dim), torch.zeros(1, dim))
        coarse = score if score.factors(some, side) is not None else find_score("csd")()
        values = {
            "score": score.to_dict(),
            "coarse": coarse.to_dict(),
            "dim": dim,
            "kind": asdict(kind or Kind()),
            "side": side,
            "card": None if card is None else asdict(card),
            "sources": [],
            "near": None,
            **(further or {}),
        }
        Store.create(folder, values)
        return cls(folder)

    def __len__(self) -> int:
        """Items that can be found."""
        return len(self.store) - len(self.store.deleted)

    def warn(self) -> None:
        """Warn where the model finds the captions of the items as chance would."""
        if (first := OwnFirst(*self.store.values.get("own_first") or (0, 0, 0))).at_chance:
            warn_once(str(first))

    # --- building ----------------------------------------------------------------------------------------------------
    def add(self, address: str, parts: Iterable[Part], rows: int = CHUNK, replace: bool = False) -> None:
        """Append what a source holds, chunk by chunk; `finish` makes it findable in an approximate index.

        parts: from the position of `source` on, where one that was broken off goes on; replace: whether an item takes
        the place of the one that has its key, in one step.
        """
        position, waiting = self.source(address)["position"], list[Part]()
        with self.writing():
            source, others = self.source(address), [x for x in self.store.values["sources"] if x["address"] != address]
            if position != source["position"]:
                raise ValueError(f"another process has read {plain(address)} meanwhile: start again")
            for part in parts:
                waiting.append(part)
                source = source | {"position": part.position, "done": False}
                if sum(len(x.items) for x in waiting) >= rows:
                    self._append(waiting, [*others, source], replace)
                    waiting = []
            self._append(waiting, [*others, source | {"done": True}], replace)

    def _append(self, parts: Sequence[Part], sources: Sequence[Mapping[str, Any]], replace: bool) -> None:
        items = [item for part in parts for item in part.items]
        if not items:
            self.store.write(sources=sources)
            return
        z = concatenate([part.z for part in parts])
        if z.mean.shape != (len(items), self.store.values["dim"]):
            raise ValueError(
                f"{len(items)} items have Gaussians {tuple(z.mean.shape)}, and this index has"
                f" {self.store.values['dim']} dimensions: embed them by its model"
            )
        check_embeddings(z, "the embeddings")
        self.store.append(z, items, self.coarse, self.side, sources, replace)

    def source(self, address: str) -> dict[str, Any]:
        """What is known of a source: its position, how far it was read, and whether it is done, to its end."""
        nothing = {"address": address, "position": 0, "done": False}
        return next((x for x in self.store.values["sources"] if x["address"] == address), nothing)

    def unfinished(self) -> list[str]:
        """A line for every source that was not read to its end."""
        return [
            f"{self.store.folder} holds {plain(x['address'])} up to its item {x['position']:,} alone: its build was"
            " broken off, or goes on. Start it again to have it whole"
            for x in self.store.values["sources"]
            if not x["done"]
        ]

    def finish(self, anew: bool = False, progress: bool = False) -> None:
        """Have the approximate index hold every row; killed, it goes on with the last that was written, next time.

        anew: learn its centres again, of what is there now. It is made anew, too, where a new row asks for a larger
        constant of `distance_vectors`. Fewer than LEAST rows need none.
        """
        with self.writing():
            near, total = self.store.values["near"], len(self.store)
            if self.kind.name == FLAT or total < LEAST:
                return
            least = self.store.values["bounds"][2]
            if anew or near is None or least > near["constant"]:
                if near is not None and not anew:
                    log.warning("an item's length is beyond that of all others: making the index anew")
                constant = least + 1e-3 * abs(least) + 1e-6
                sample = indexes.sample_of(self.store.gallery, indexes.sample_size(self.kind, total), constant)
                index = indexes.make(self.kind, sample.shape[1], sample, total)
            else:
                index, constant = self._read(), near["constant"]
            written, gallery, missing = time.monotonic(), self.store.gallery, total - index.ntotal
            blocks = gallery.blocks(index.ntotal, deleted=True)
            for rows in tqdm(blocks, "index", -(-missing // gallery.block), unit=" blocks", disable=not progress):
                index.add(indexes.fitted(index, indexes.vectors_of(gallery, rows, constant)))
                if index.ntotal == total or time.monotonic() - written > SAVE:
                    self.store.write_near(partial(faiss.write_index, index), constant)
                    written = time.monotonic()

    def _read(self, mapped: bool = False) -> faiss.Index:
        """The approximate index. ValueError where it is gone or damaged."""
        place = self.store.folder / self.store.values["near"]["file"]
        try:
            if self.store.near is None:
                raise RuntimeError("it is gone or cut")
            name = f"/dev/fd/{self.store.near.fileno()}"  # a writer may have replaced the file of this name
            return faiss.read_index(name, faiss.IO_FLAG_MMAP) if mapped else faiss.read_index(name)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise ValueError(f"{place} is damaged ({why}): {AGAIN.format(place.parent)}") from error

    def delete(self, keys: Sequence[str], **values: Any) -> None:
        """Have these keys found no more, also when their source is read again, and change values of the manifest.

        ValueError, and nothing changes, where one is not there.
        """
        self.store.delete(keys, unwanted=True, **values)

    # --- asking ------------------------------------------------------------------------------------------------------
    @property
    def _near(self) -> faiss.Index | None:
        """The approximate index, None before its first rows are written."""
        if self.store.values["near"] is None:
            return None
        return self.store.once("near", lambda: self._read(mapped=self.kind.name == indexes.IVF))

    @property
    def is_flat(self) -> bool:
        """Whether all items are looked at: by its kind, or because there are few."""
        return self.kind.name == FLAT or len(self) < LEAST

    def gaussians(self, rows: Sequence[int]) -> Gaussian:
        """The embeddings of rows, (M, D)."""
        return self.store.gallery.gaussian(np.asarray(rows, dtype=np.int64))

    def batches(self) -> Iterator[tuple[list[Item], Gaussian, Tensor]]:
        """Items, Gaussians and vectors (n, P + 1) of all that can be found, block by block, for another's index.

        By L2 the vectors nearest to `question_vectors` are what scores highest (`prolip.scores.distance_vectors`).
        """
        for rows in self.store.gallery.blocks():
            vectors = indexes.vectors_of(self.store.gallery, rows, self.store.values["bounds"][2])
            yield self.items(rows.tolist()), self.store.gallery.gaussian(rows), torch.from_numpy(vectors)

    def question_vectors(self, queries: Gaussian) -> Tensor:
        """What asks for the nearest of `batches`, (Q, P + 1)."""
        check_embeddings(queries, "queries", self.store.values["dim"])
        vectors = index_vectors(self.coarse, queries, gallery=False, distance=True, side=other_side(self.side))
        assert vectors is not None
        return vectors

    def search(
        self,
        queries: Gaussian,
        k: int = 10,
        effort: int | None = None,
        shortlist: int | None = None,
        exactly: bool = False,
    ) -> Found:
        """The k best items of every query, (Q, D) -> (Q, k).

        effort: lists that are read (`ivf`, `pq`), or candidates that a graph is walked with; shortlist: how many of
        what the index finds are scored again, by default k, 10 k of `pq`, and 200 of a score that an index does not
        serve; exactly: as brute force ranks them, by any kind, and of `flat` without a shortlist always.
        """
        check_embeddings(queries, "queries", self.store.values["dim"])
        if k < 1 or (effort is not None and effort < 1) or (shortlist is not None and shortlist < 1):
            raise ValueError(f"{k} answers, effort {effort}, shortlist {shortlist}: give 1 or more of each")
        self.store.once("told", lambda: list(map(log.warning, self.unfinished())))
        role, served = other_side(self.side), self.served
        if exactly or not len(self.store) or (self.is_flat and (served or shortlist is None)):
            if getattr(self.score, "measure", None) is MEASURES["elk"]:
                buckets = self.store.once("buckets", lambda: make_buckets(self.store.gallery))
                return nearest_by_elk(queries, buckets, k)[0]
            return exact.nearest(self.score, queries, self.store.gallery, k, role)
        by_codes = self.kind.name == PQ and not self.is_flat
        usual = PER_ANSWER * k if by_codes else k
        count = shortlist or (usual if served else max(SHORTLIST, PER_ANSWER * k))
        found = self._near_found(queries, min(max(count, k), len(self.store)), effort, role)
        if not served:
            again = exact.rescored(self.score, queries, found.rows, self.store.gallery.gaussian, role)
            found = Found(found.rows, again)
        elif by_codes:
            found = Found(found.rows, self._by_vectors(queries, found.rows))
        return exact.joined([exact.top(found, k)], k)

    def _near_found(self, queries: Gaussian, count: int, effort: int | None, role: Side) -> Found:
        """Candidates, (Q, count), by the coarse score, exactly where there is no approximate index.

        Of the squared distance d of [u, 0] and [v, sqrt(c - |v|^2 - 2 b)] the score is u.v + b = (|u|^2 + c - d) / 2.
        """
        if self.is_flat:
            return exact.nearest(self.coarse, queries, self.store.gallery, count, role)
        if self._near is None or self._near.ntotal < len(self.store):
            held = 0 if self._near is None else self._near.ntotal
            raise ValueError(
                f"the index holds {held} of {len(self.store)} rows: its building was broken off, go on"
                f" with prolip search finish {self.store.folder}"
            )
        own, asked = self._factors(queries.float()), self.question_vectors(queries.float())
        usual = 128 if self.kind.name == HNSW else max(8, (self.kind.lists or lists_for(len(self.store))) // 16)
        rows, distance = indexes.search(self._near, asked, count, effort or usual, self.store.gallery.alive)
        squares = own.vector.double().square().sum(1) + self.store.values["near"]["constant"]
        scores = (squares.unsqueeze(1) - distance.double()) / 2 + own.offset.double().unsqueeze(1)
        return Found(rows, scores.masked_fill(rows < 0, -torch.inf))

    def _factors(self, queries: Gaussian) -> Factors:
        """Those of queries by the coarse score."""
        factors = self.coarse.factors(queries, other_side(self.side))
        assert factors is not None
        return factors

    def _by_vectors(self, queries: Gaussian, rows: Tensor) -> Tensor:
        """The scores of rows of each query from the kept vectors, in float32, as float64 (Q, m)."""
        own = self._factors(queries.float())
        asked = torch.cat([own.vector, torch.ones(len(own.vector), 1)], 1)
        out = torch.empty(rows.shape, dtype=torch.float64)
        for i, some in enumerate(rows.clamp(min=0).numpy()):
            out[i] = torch.from_numpy(self.store.gallery.vector[some]) @ asked[i] + own.offset[i]
        return out.masked_fill(rows < 0, -torch.inf)

    def search_inclusion(self, queries: Gaussian, k: int = 10, wider: bool = True, shortlist: int = 1000) -> Found:
        """Items near a query that include it (`wider`), or that it includes, (Q, D) -> (Q, k), fewer where there are.

        Of the `shortlist` best by the index those are kept that pass `inclusion_test`, and ranked by `log_inclusion`:
        the test also grows with the distance of the means, so that it says of a pair which is the wider, but not which
        of many is the best. ValueError for points.
        """
        near = self.search(queries, shortlist)
        parts = []
        for i in range(len(near.rows)):
            rows = near.rows[i][near.rows[i] >= 0]
            query, items = queries.select(slice(i, i + 1)).to(torch.float64), self.gaussians(rows.tolist())
            if bool(items.log_var.isneginf().any() or query.log_var.isneginf().any()):
                raise ValueError("points include nothing: wider and narrower want a probabilistic model")
            items = items.to(torch.float64)
            inner, outer = (query, items) if wider else (items, query)
            included = pairwise_inclusion_test(inner, outer).flatten() > 0
            scores = pairwise_log_inclusion(inner, outer).flatten()
            parts.append(exact.top(Found(rows[included].unsqueeze(0), scores[included].unsqueeze(0)), k))
        return exact.joined(parts, k)
