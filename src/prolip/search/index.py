"""A search index: built from sources, stored in a folder, extended, reduced and queried."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from prolip.data.faults import FaultCounter
from prolip.embedder import Embedder, ModelCard
from prolip.gaussian import Gaussian, check_embeddings, concatenate
from prolip.measures import MEASURES, pairwise_inclusion_test, pairwise_log_inclusion
from prolip.measures.chance import OwnFirst, evenly, warn_once
from prolip.methods import find_score, score_from_dict
from prolip.scores import Score, Side, Similarity, index_vectors
from prolip.search import ann, exact, sources
from prolip.search.ann import FLAT, HNSW, LEAST, PQ, IndexSpec
from prolip.search.exact import TopK, other_side
from prolip.search.query import Answer, Query, ask
from prolip.search.sources import Rebuild
from prolip.search.store import AGAIN, NAME, REMEDY, Item, Part, Store
from prolip.utils.console import plain
from prolip.utils.outputs import check_output
from prolip.utils.secrecy import redacted

log = logging.getLogger(__name__)

CHUNK = 4096  # rows of a commit: an interrupted build loses at most these
#: Least number of candidates for a score outside the index; candidates of `pq` per answer.
SHORTLIST, PER_ANSWER = 200, 10
SAVE = 600.0  # seconds between two writes of an approximate index during building


class SearchIndex:
    """Gaussians in a folder, with an index of one score. `find`, `items` and `writing` are its store's. score: ranks
    the answers; coarse: the score that the index serves: `score` if it factors, else csd, which chooses items that
    `score` ranks; side: of the gallery; queries are compared as the other side.
    """

    def __init__(self, folder: str | os.PathLike, verify: bool = False):
        """Open an index. verify: read all files and compare checksums. ValueError for a damaged index."""
        self.store = Store(folder)
        if verify:
            self.store.verify()
        values = self.store.values
        try:
            self.score: Score = score_from_dict(values["score"])
            self.coarse: Score = score_from_dict(values["coarse"])
            self.served: bool = values["score"] == values["coarse"]
            self.kind, self.side = IndexSpec(values["kind"]["name"], values["kind"]["lists"]), values["side"]
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
        kind: IndexSpec | None = None,
        side: Side = "image",
        card: ModelCard | None = None,
        further: Mapping[str, Any] | None = None,
    ) -> SearchIndex:
        """Create an empty index of Gaussians (N, dim). card: of the model; further: JSON values to store."""
        some = Gaussian(torch.zeros(1, dim), torch.zeros(1, dim))
        coarse = score if score.factors(some, side) is not None else find_score("csd")()
        values = {"score": score.to_dict(), "coarse": coarse.to_dict(), "dim": dim, "side": side, "sources": []}
        values |= {"kind": asdict(kind or IndexSpec()), "card": None if card is None else asdict(card), "near": None}
        Store.create(folder, values | dict(further or {}))
        return cls(folder)

    @classmethod
    def build(
        cls,
        folder: str | os.PathLike,
        source: str,
        embedder: Embedder | None = None,
        similarity: Similarity = None,
        kind: IndexSpec | None = None,
        verify: bool = False,
        **reading: Any,
    ) -> Rebuild:
        """Index a source, such as "images:photos", or update its index; the result has the `index`. embedder: for a new
        index, except of saved features. similarity: a score other than the model's. reading: arguments of `add`.
        FileExistsError if the folder has an index of another source or type.
        """
        kind = kind or IndexSpec()
        check_output(folder, folder=True)
        if (Path(folder) / NAME).exists():
            index = cls(folder, verify)
            addresses = [x["address"] for x in index.store.values["sources"]]
            same = index.kind == kind and addresses in ([], [redacted(source)])
            if not same or similarity not in (None, index.score.name):
                what = f"an index of {', '.join(addresses)} of the type {index.kind.name} by {index.score.name}"
                raise FileExistsError(f"{folder} is {what}: use prolip search add, or give another folder")
        else:
            card, dim, further = sources.described(source, embedder)
            side: Side = "text" if sources.parse(source).kind == "texts" else "image"
            index = cls.create(folder, card.scored_by(similarity), dim, kind, side, card, further)
        return index.add(source, embedder, **reading)

    def __len__(self) -> int:
        """Return the number of items that can be found."""
        return len(self.store) - len(self.store.deleted)

    def add(
        self,
        source: str,
        embedder: Embedder | None = None,
        batch_size: int = 256,
        workers: int | None = None,
        skip_damaged: bool = False,
        restore: bool = False,
        progress: bool = False,
        **where: Any,
    ) -> Rebuild:
        """Add a source, or update the index to its contents; count items added, replaced and removed. embedder:
        the index's model, loaded by default (where: device and precision). workers: decoding threads.
        skip_damaged: count and skip unreadable images. restore: add deleted items again.
        """
        parsed = sources.parse(source)
        if (side := "text" if parsed.kind == "texts" else "image") != self.side:
            raise ValueError(f"{source} has {side}s, but this index has {self.side}s")
        with self.writing():
            rebuild = Rebuild(self, source, restore, FaultCounter() if skip_damaged else None)
            if parsed.kind == "features":
                parts = sources.parts_of(sources.kept(source), rebuild)
            else:
                embedder = self.find_embedder(embedder, **where)
                parts = sources.read(rebuild, embedder, batch_size, workers)
            rebuild.run(tqdm(parts, "read", unit="", unit_scale=batch_size, disable=not progress), CHUNK)
            if embedder is not None and self.side == "image":
                self.store.write(own_first=self._own_first(embedder))
                self.warn(embedder)
            self.finish(progress=progress)
        return rebuild

    def append(self, address: str, parts: Iterable[Part], rows: int = CHUNK, replace: bool = False) -> None:
        """Append parts of a source, from its position on, `rows` at a time. replace: items with the same keys."""
        position, waiting = self.source(address)["position"], list[Part]()
        with self.writing():
            source, others = self.source(address), [x for x in self.store.values["sources"] if x["address"] != address]
            if position != source["position"]:
                raise ValueError(f"another process has read {plain(address)} since then: start again")
            for part in parts:
                waiting.append(part)
                source = source | {"position": part.position, "done": False}
                if sum(len(x.items) for x in waiting) >= rows:
                    self._append(waiting, [*others, source], replace)
                    waiting = []
            self._append(waiting, [*others, source | {"done": True}], replace)

    def _append(self, parts: Sequence[Part], sources: Sequence[Mapping[str, Any]], replace: bool) -> None:
        items, dim = [item for part in parts for item in part.items], self.store.values["dim"]
        if not items:
            self.store.write(sources=sources)
            return
        z = concatenate([part.z for part in parts])
        if z.mean.shape != (len(items), dim):
            shape = tuple(z.mean.shape)
            raise ValueError(f"{len(items)} items have Gaussians {shape}, expected {dim} dimensions: use its model")
        check_embeddings(z, "the embeddings")
        self.store.append(z, items, self.coarse, self.side, sources, replace)

    def source(self, address: str) -> dict[str, Any]:
        """Return the state of a source: its position and whether it was read completely."""
        nothing = {"address": address, "position": 0, "done": False}
        return next((x for x in self.store.values["sources"] if x["address"] == address), nothing)

    def _tell_unfinished(self) -> None:
        for x in (x for x in self.store.values["sources"] if not x["done"]):
            held = f"has only the first {x['position']:,} items of {plain(x['address'])}"
            log.warning("%s %s: if no build is running, start it again", self.store.folder, held)

    def find_embedder(
        self, embedder: Embedder | None = None, device: torch.device | str = "auto", precision: str = "fp32"
    ) -> Embedder:
        """Load the model of the index, or check the given one. ValueError if it is a different model."""
        if embedder is None:
            words = self.store.values.get("load")
            if words is None:
                raise ValueError("this index contains saved features. Give their model with --model")
            where: Any = {"device": device, "precision": precision}
            embedder = Embedder.load(words["model"], words["pretrained"], tokenizer=words["tokenizer"], **where)
        if self.card is not None and embedder.fingerprint != self.card.fingerprint:
            both = f"{embedder.name} is not the model of this index, {self.card.name}"
            raise ValueError(f"{both}: its weights, settings, preprocessing or tokenizer differ")
        self.warn(embedder)
        return embedder

    def _own_first(self, embedder: Embedder) -> OwnFirst | None:
        """Return how often items rank their own first caption first; None without captions."""
        rows = evenly(len(self.store)).tolist()
        items = [(row, item["captions"][0]) for row, item in zip(rows, self.items(rows)) if item.get("captions")]
        if not items:
            return None
        texts = list(dict.fromkeys(caption for _, caption in items))
        scores = self.score.pairwise(self.gaussians([row for row, _ in items]), embedder.embed_texts(texts))
        return OwnFirst.of(scores, torch.tensor([texts.index(caption) for _, caption in items]))

    def warn(self, embedder: Embedder) -> None:
        """Warn if the model finds the captions of the items no more often than chance, unless its loading warned."""
        if (first := OwnFirst.read(self.store.values.get("own_first"))).at_chance and not embedder.caution:
            warn_once(str(first))

    def finish(self, rebuild: bool = False, progress: bool = False) -> None:
        """Add all rows to the approximate index and write it every SAVE seconds. rebuild: learn it from all rows."""
        with self.writing():
            near, total = self.store.values["near"], len(self.store)
            if self.kind.name == FLAT or total < LEAST:  # no approximate index needed
                return
            least, gallery = self.store.values["bounds"][2], self.store.gallery
            if rebuild or near is None or least > near["constant"]:
                if near is not None and not rebuild:
                    log.warning("a new item is longer than all others. Rebuilding the approximate index")
                constant = least + 1e-3 * abs(least) + 1e-6
                index = ann.make(self.kind, gallery, constant)
            else:
                index, constant = self._read(), near["constant"]
            written, missing = time.monotonic(), total - index.ntotal
            blocks = gallery.blocks(index.ntotal, deleted=True)
            for rows in tqdm(blocks, "index", -(-missing // gallery.block), unit=" blocks", disable=not progress):
                index.add(ann.fitted(index, ann.vectors_of(gallery, rows, constant)))
                if index.ntotal == total or time.monotonic() - written > SAVE:
                    self.store.write_near(partial(faiss.write_index, index), constant)
                    written = time.monotonic()

    def _read(self, mapped: bool = False) -> faiss.Index:
        """Read the approximate index. ValueError if it is missing or damaged."""
        place = self.store.folder / self.store.values["near"]["file"]
        try:
            if self.store.near is None:
                raise RuntimeError("it is missing or cut")
            name = f"/dev/fd/{self.store.near.fileno()}"  # a writer may have replaced the file
            return faiss.read_index(name, faiss.IO_FLAG_MMAP) if mapped else faiss.read_index(name)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise ValueError(f"{place} is damaged ({why}): {AGAIN.format(place.parent)}") from error

    def delete(self, keys: Sequence[str], **values: Any) -> None:
        """Remove keys from the results permanently, and change values of the manifest. ValueError for a missing key."""
        self.store.delete(keys, unwanted=True, **values)

    @property
    def _near(self) -> faiss.Index | None:
        """Return the approximate index, None before its first rows are written."""
        there = self.store.values["near"] is not None
        return self.store.once("near", lambda: self._read(mapped=self.kind.name == ann.IVF)) if there else None

    @property
    def is_flat(self) -> bool:
        """True if a search reads all items: by type, or because there are few."""
        return self.kind.name == FLAT or len(self) < LEAST

    def gaussians(self, rows: Sequence[int]) -> Gaussian:
        """Return the embeddings of rows, (M, D)."""
        return self.store.gallery.gaussian(np.asarray(rows, dtype=np.int64))

    def batches(self) -> Iterator[tuple[list[Item], Gaussian, Tensor]]:
        """Yield items, Gaussians and vectors (n, P + 1) for another program, which ranks by L2 to `query_vectors`."""
        for rows in self.store.gallery.blocks():
            vectors = ann.vectors_of(self.store.gallery, rows, self.store.values["bounds"][2])
            yield self.items(rows.tolist()), self.store.gallery.gaussian(rows), torch.from_numpy(vectors)

    def query_vectors(self, queries: Gaussian) -> Tensor:
        """Return vectors of queries, whose nearest `batches` vectors by L2 are the answers, (Q, P + 1)."""
        check_embeddings(queries, "queries", self.store.values["dim"])
        vectors = index_vectors(self.coarse, queries, gallery=False, distance=True, side=other_side(self.side))
        assert vectors is not None
        return vectors

    def query(
        self, queries: Sequence[str | Query], embedder: Embedder | None = None, top: int = 10, **settings: Any
    ) -> list[list[Answer]]:
        """Return answers to texts or `Query(text, image)`, best first, by the index's model. settings: of `search`."""
        asked = [Query(query) if isinstance(query, str) else query for query in queries]
        return [answers or [] for answers in ask(self, asked, self.find_embedder(embedder), top, **settings)[0]]

    def search(
        self, queries: Gaussian, k: int = 10, probe: int | None = None, rerank: int | None = None, exactly: bool = False
    ) -> TopK:
        """Find the k best items of each query, (Q, D) -> (Q, k). probe: lists to read (`ivf`, `pq`), or candidates of a
        graph to visit; rerank: candidates of the index to score again, by default k, 10 k of `pq`, at least 200 if the
        index does not serve the score; exactly: rank all items.
        """
        check_embeddings(queries, "queries", self.store.values["dim"])
        if k < 1 or (probe is not None and probe < 1) or (rerank is not None and rerank < 1):
            raise ValueError(f"{k} answers, probe {probe}, rerank {rerank}: give at least 1 of each")
        self.store.once("told", self._tell_unfinished)
        gallery, role, served = self.store.gallery, other_side(self.side), self.served
        if exactly or not len(self.store) or (self.is_flat and (served or rerank is None)):
            if getattr(self.score, "measure", None) is MEASURES["elk"]:
                buckets = self.store.once("buckets", lambda: exact.make_buckets(gallery))
                return exact.nearest_by_elk(queries, buckets, k)[0]
            return exact.nearest(self.score, queries, gallery, k, role)
        by_codes = self.kind.name == PQ and not self.is_flat
        count = rerank or (max(SHORTLIST, PER_ANSWER * k) if not served else PER_ANSWER * k if by_codes else k)
        found = self._candidates(queries, min(max(count, k), len(self.store)), probe, role)
        if not served:
            found = found._replace(scores=exact.rescored(self.score, queries, found.rows, gallery.gaussian, role))
        elif by_codes:
            found = found._replace(scores=self._by_vectors(queries, found.rows))
        return exact.top(found, k)

    def _by_vectors(self, queries: Gaussian, rows: Tensor) -> Tensor:
        """Score items of each query by the stored vectors in float32, twice as fast as in float64, (Q, m) -> (Q, m)."""
        own = self.coarse.factors(queries.float(), other_side(self.side))
        assert own is not None
        scores, asked = torch.empty(rows.shape, dtype=torch.float64), F.pad(own.vector, (0, 1), value=1.0)
        for i, some in enumerate(rows.clamp(min=0).numpy()):
            scores[i] = torch.from_numpy(self.store.gallery.vector[some]) @ asked[i] + own.offset[i]
        return scores.masked_fill_(rows < 0, -torch.inf)

    def _candidates(self, queries: Gaussian, count: int, probe: int | None, role: Side) -> TopK:
        """Find candidates (Q, count) by the score u.v + b = (|u|^2 + c - d) / 2, d: squared distance; or exactly."""
        if self.is_flat:
            return exact.nearest(self.coarse, queries, self.store.gallery, count, role)
        held, total = 0 if self._near is None else self._near.ntotal, len(self.store)
        if self._near is None or held < total:
            resume = f"prolip search finish {self.store.folder}"
            raise ValueError(f"the index is incomplete ({held} of {total} rows). Resume with: {resume}")
        own, asked = self.coarse.factors(queries.float(), role), self.query_vectors(queries.float())
        assert own is not None
        usual = 128 if self.kind.name == HNSW else max(8, self.kind.lists_for(total) // 16)
        rows, distance = ann.search(self._near, asked, count, probe or usual, self.store.gallery.alive)
        squares = own.vector.double().square().sum(1) + self.store.values["near"]["constant"]
        scores = (squares.unsqueeze(1) - distance.double()) / 2 + own.offset.double().unsqueeze(1)
        return TopK(rows, scores.masked_fill(rows < 0, -torch.inf))

    def search_inclusion(self, queries: Gaussian, k: int = 10, more_general: bool = True, rerank: int = 1000) -> TopK:
        """Find near items that include a query, or that it includes, (Q, D) -> (Q, k), or fewer. ValueError for points.
        Of the `rerank` nearest, those that pass `inclusion_test`, ranked by `log_inclusion`, as the test also grows
        with the distance of the means.
        """
        near, parts = self.search(queries, rerank), []
        for i, rows in enumerate(row[row >= 0] for row in near.rows):
            query, items = queries.select(slice(i, i + 1)).to(torch.float64), self.gaussians(rows.tolist())
            if bool(items.log_var.isneginf().any() or query.log_var.isneginf().any()):
                raise ValueError("--more-general and --more-specific need variances, but these are points")
            pair = (query, items.to(torch.float64)) if more_general else (items.to(torch.float64), query)
            included = pairwise_inclusion_test(*pair).flatten() > 0
            scores = pairwise_log_inclusion(*pair).flatten()
            parts.append(exact.top(TopK(rows[included].unsqueeze(0), scores[included].unsqueeze(0)), k))
        return exact.joined(parts)
