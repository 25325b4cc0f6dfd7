"""What is explored, from what a person has: an index, kept features, or a model with data; and what the page can ask of
it, by name: the requests that `server` hands on.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import torch

from prolip.data.faults import SampleFault
from prolip.embedder import Embedder
from prolip.explorer.asking import MOST, Asker
from prolip.explorer.crowd import turn
from prolip.explorer.gallery import MAPPED, Captions, Once, number
from prolip.explorer.pictures import Gone, has_picture
from prolip.explorer.rules import describe, gallery_table, scored_table, try_rules
from prolip.models.diagnose import CONFIG_NAMES
from prolip.search import sources
from prolip.search.answers import calibrate, read_questions
from prolip.search.build import build, find_embedder
from prolip.search.index import SearchIndex
from prolip.search.risk import Threshold
from prolip.search.store import holds_index
from prolip.utils.console import plain
from prolip.utils.messages import explain_missing

#: Items at either end of the order of uncertainty.
ENDS = 24
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Opened:
    """index: of what is shown; embedder: of the model, None where there is none; lacks: what cannot be done, and why;
    temporary: a folder that goes when the page does; changes: what building the index changed.
    """

    index: SearchIndex
    embedder: Embedder | None
    lacks: list[str]
    temporary: tempfile.TemporaryDirectory | None = None
    changes: str = ""


def open_source(
    source: str,
    embedder: Embedder | None = None,
    data: str | None = None,
    output: str | None = None,
    device: torch.device | str = "auto",
    precision: str = "fp32",
    **reading: Any,
) -> Opened:
    """An index, or one of kept features or of what a model embeds, built in `output` or a temporary folder.

    embedder: the one that made the index; by default the one that the index names, if any. device, precision: of that.
    reading: of `prolip.search.build.fill`. ValueError and OSError saying what to give.
    """
    if holds_index(source):
        if data or output:
            raise ValueError(
                f"{source} is an index already: leave --data and --output out, or first add to it, prolip"
                f" search add {source} --data {data or 'SOURCE'}"
            )
        index, temporary, changes = SearchIndex(source), None, ""
    else:
        address, folder, temporary = address_of(source, data), output, None
        if folder is None:
            temporary = tempfile.TemporaryDirectory(prefix="prolip-explore-")
            folder = f"{temporary.name}/index"
        try:
            built = build(folder, address, embedder, device=device, precision=precision, **reading)
        except BaseException:
            if temporary is not None:
                temporary.cleanup()
            raise
        index, changes = built.index, str(built)
    if embedder is not None or index.store.values.get("load"):
        embedder = find_embedder(index, embedder, device, precision)
    return Opened(index, embedder, lacks_of(index, embedder), temporary, changes)


def threshold_of(opened: Opened, path: str, risk: float, delta: float, allow_private_hosts: bool) -> Threshold:
    """The refusal by risk that the questions of a file calibrate."""
    if opened.embedder is None:
        raise ValueError("--calibrate asks questions, and there is no model to embed them: give --model")
    search = partial(opened.index.search, k=MOST + 1)  # as the page asks
    return calibrate(opened.index, *read_questions(path, allow_private_hosts), opened.embedder, risk, delta, search)


def model_of(source: str, data: str | None) -> str | None:
    """The model that a source is, as `load_embedder` names it; None of an index and of features."""
    folder = Path(source)
    if holds_index(folder) or holds_features(source):
        return None
    model = next(
        (
            f"local-dir:{place}"
            for place in (folder / "model", folder)
            if any(place.glob("*.safetensors")) and any((place / name).is_file() for name in CONFIG_NAMES)
        ),
        source,
    )
    if model == source and folder.is_dir():
        raise ValueError(
            f"{source} is no index, no kept features, and no run or model: a run has model/config.json"
            " with weights beside it, an index index.json, features tasks/"
        )
    if model == source and "/" in source and ":" not in source:
        raise FileNotFoundError(f"no folder {source}: {explain_missing(source)}")
    address_of(source, data)  # which refuses what cannot be embedded before the model is loaded
    return model


def holds_features(source: str) -> bool:
    """Whether a source is kept features."""
    return source.startswith("features:") or (Path(source) / "tasks").is_dir()


def address_of(source: str, data: str | None) -> str:
    """What is to be embedded, as `prolip.search` reads it."""
    if holds_features(source):
        if data:
            raise ValueError(f"{source} are features, which were embedded already: leave --data out")
        return source if source.startswith("features:") else f"features:{source}"
    if not data:
        raise ValueError(
            f"{source} is a model, and there is nothing to explore yet: give --data, one of"
            f" {sources.FORMS}; or an index of prolip search"
        )
    return str(sources.parse(data))


def lacks_of(index: SearchIndex, embedder: Embedder | None) -> list[str]:
    """What cannot be done, and why."""
    lacks, some = [], index.items(range(min(len(index.store), 50)))
    if embedder is None:
        lacks.append(
            "There is no model, so no text can be typed, no picture dropped and no path walked; items, the map"
            " and uncertainties work. Give --model."
        )
    if index.side == "image" and not any(has_picture(item) for item in some):
        lacks.append(
            "Nothing says where the pictures of these items are, as of kept features: they are shown by their"
            " keys. An index of images or shards knows."
        )
    if index.side == "image" and not any(item.get("captions") for item in some):
        lacks.append(
            "No captions are kept with these items, so rules know the items alone, and paths need --texts"
            " FILE. Tables, shards and class folders bring captions."
        )
    card = index.card
    if card is not None and not card.probabilistic:
        lacks.append(f"{card.name} gives points, without variances: no ellipses, no uncertainty, no elk.")
    return lacks


class Refused(Exception):
    """A request that is not answered, with the status that says why."""

    def __init__(self, status: HTTPStatus, why: str):
        super().__init__(why)
        self.status = status


class App:
    """The explorer without its web: `looks` take nothing, `questions` JSON values; both give JSON values.

    scores: what `prolip curate score` wrote, for rules over all of its samples; threshold: a calibrated refusal.
    """

    def __init__(
        self,
        opened: Opened,
        title: str,
        captions: Captions,
        scores: Path | None = None,
        threshold: Threshold | None = None,
    ):
        self.opened, self.title, self.captions, self.gallery = opened, plain(title), captions, captions.gallery
        self.asker = Asker(captions, threshold)
        scored = None if scores is None else scored_table(scores)
        self.items = {"item": self.gallery.item} | ({"sample": scored.item} if scored else {})
        self.table = Once(lambda: scored or gallery_table(captions))
        self._model = threading.Lock()  # torch's own threads share one pool: one question after the other
        self._map = Once(self._points)
        self.looks: dict[str, Callable[[], Any]] = {
            "about": self.about,
            "map": self._map,
            "uncertain": self.uncertain,
            "columns": self.columns,
        }
        self.questions: dict[str, Callable[[Values], Any]] = {
            "search": self.search,
            "compare": self.compare,
            "walk": self.walk,
            "rules": self.rules,
        }

    def warm_up(self) -> None:
        """Compute what first visitors would wait for."""
        self.gallery.uncertainty()
        if len(self.gallery.index) > 1:
            self._map()
        with torch.no_grad():
            self.captions.found()  # while texts are answered already

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with turn(self._model, "questions"), torch.no_grad():
            yield

    # --- looks -------------------------------------------------------------------------------------------------------
    def about(self) -> dict[str, Any]:
        """What is shown, by which model, and what cannot be done."""
        index, embedder, gallery = self.opened.index, self.opened.embedder, self.gallery
        name = embedder.name if embedder is not None else index.card.name if index.card is not None else None
        return {
            "title": self.title,
            "items": len(index),
            "dim": index.store.values["dim"],
            "side": index.side,
            "model": name,
            "parameters": None if embedder is None else embedder.parameters,
            "can_ask": embedder is not None,
            "probabilistic": gallery.probabilistic,
            "score": index.score.in_words,
            "own_score": gallery.own.name,
            "kind": index.kind.name,
            "units": None if gallery.units is None else {"images": gallery.units.images, "texts": gallery.units.texts},
            "novelty": embedder is not None and embedder.novelty is not None,
            "lacks": self.opened.lacks,
            "risk": self.asker.threshold is not None,
        }

    def _points(self) -> dict[str, Any]:
        """The map: rows with their ellipses, and how uncertain each is among all."""
        found, trace = self.gallery.mapped(), self.gallery.uncertainty()
        own = trace[found.rows]
        order = own.argsort(kind="stable").argsort(kind="stable") / max(1, len(own) - 1)
        points = [
            {**item, "at": [number(x) for x in place], "level": number(level)}
            for item, place, level in zip(
                self.gallery.describe(found.rows.tolist()), found.places.tolist(), order.tolist()
            )
        ]
        return {
            "points": points,
            "share": [number(x) for x in found.plane.share],
            "most": MAPPED,
            "total": len(self.gallery.index),
        }

    def uncertain(self) -> dict[str, Any]:
        """The least and the most uncertain items. ValueError for points, of which none is more so."""
        if not self.gallery.probabilistic:
            raise ValueError("this model gives points: no item is more uncertain than another")
        least, most = self.gallery.extremes(ENDS)
        return {"least": self.gallery.describe(least), "most": self.gallery.describe(most)}

    def columns(self) -> dict[str, Any]:
        """What rules can be made of."""
        with self._turn():
            return describe(self.table())

    def thumbnail(self, kind: str, row: int) -> bytes:
        """The picture of an `item` of the gallery, or a `sample` of scores. KeyError and `Gone` where there is none."""
        if kind not in self.items:
            raise Gone(f"there are no pictures of {kind!r}")
        return self.gallery.pictures.thumbnail(self.items[kind](row))

    # --- questions ---------------------------------------------------------------------------------------------------
    def upload(self, data: bytes) -> dict[str, Any]:
        """Keep the picture of a file to ask by. `Refused` where it is none, or too large."""
        try:
            pixels, (width, height) = self.asker.prepare(data)
        except SampleFault as fault:
            why = f"this is no picture that can be read: {fault}"
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, why) from fault
        with self._turn():
            return {"upload": self.asker.upload(pixels), "width": width, "height": height}

    def search(self, values: Values) -> dict[str, Any]:
        """Answers to a question; count: how many."""
        count = values.get("count", 24)
        if not isinstance(count, int) or isinstance(count, bool):
            raise ValueError(f"count {count!r}: give a whole number")
        with self._turn():
            return self.asker.search(self.asker.read(values), count)

    def compare(self, values: Values) -> dict[str, Any]:
        """The same question by several scores."""
        with self._turn():
            return self.asker.compare(self.asker.read(values))

    def walk(self, values: Values) -> dict[str, Any]:
        """The path from a question to its root."""
        with self._turn():
            asked = self.asker.read(values)
            return self.captions.walk(asked.z, asked.label, asked.side, str(values.get("root", "included")))

    def rules(self, values: Values) -> dict[str, Any]:
        """What rules would drop."""
        rules = values.get("rules", [])
        if not isinstance(rules, list):
            raise ValueError(f"rules {rules!r}: give a list of NAME: FORMULA")
        with self._turn():
            return try_rules(self.table(), rules)
