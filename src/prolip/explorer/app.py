"""The explorer without its web server: opens an index, saved features or a model with data, and answers requests."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import torch

from prolip.data.faults import SampleFault
from prolip.embedder import Embedder
from prolip.explorer.gallery import MAPPED, Captions, Once, number
from prolip.explorer.query import Asker
from prolip.explorer.rules import describe, gallery_table, scored_table, try_rules
from prolip.explorer.thumbnails import Gone, has_picture, turn
from prolip.models.diagnose import CONFIG_NAMES
from prolip.search import sources
from prolip.search.index import SearchIndex
from prolip.search.risk_control import Threshold
from prolip.search.store import holds_index
from prolip.utils.console import plain
from prolip.utils.messages import explain_missing

ENDS = 24  # items at each end of the order of uncertainty
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Explored:
    """An open gallery. limitations: what is impossible, and why; temporary: a folder deleted with the page."""

    index: SearchIndex
    embedder: Embedder | None
    limitations: list[str]
    temporary: tempfile.TemporaryDirectory | None = None
    changes: str = ""  # made by building the index


def open_source(
    source: str,
    embedder: Embedder | None = None,
    data: str | None = None,
    output: str | None = None,
    device: torch.device | str = "auto",
    precision: str = "fp32",
    **reading: Any,
) -> Explored:
    """Open an index, or build one of saved features or data in `output` or a temporary folder. embedder: by default the
    model named by the index. reading: of `SearchIndex.add`. ValueError and OSError name the remedy.
    """
    temporary, changes = None, ""
    if holds_index(source):
        if data or output:
            add = f"prolip search add {source} --data {data or 'SOURCE'}"
            raise ValueError(f"{source} is already an index. Remove --data and --output, or first add to it: {add}")
        index = SearchIndex(source)
    else:
        address, _ = resolved(source, data)
        if output is None:
            temporary = tempfile.TemporaryDirectory(prefix="prolip-explore-")
            output = f"{temporary.name}/index"
        try:
            built = SearchIndex.build(output, address, embedder, device=device, precision=precision, **reading)
        except BaseException:
            if temporary is not None:
                temporary.cleanup()
            raise
        index, changes = built.index, str(built)
    if embedder is not None or index.store.values.get("load"):
        embedder = index.find_embedder(embedder, device, precision)
    lacks, some = list[str](), index.items(range(min(len(index.store), 50)))
    if embedder is None:
        lost = "Searches by text or image, and paths,"
        lacks.append(f"{lost} need a model; items, the map and uncertainties do not. Give --model.")
    if index.side == "image" and not any(has_picture(item) for item in some):
        lost = "The images of these items are unknown, as with saved features"
        lacks.append(f"{lost}, so the page shows keys. An index of images or shards has images.")
    if index.side == "image" and not any(item.get("captions") for item in some):
        lost = "These items have no captions, so rules only use the items, and paths need --texts FILE"
        lacks.append(f"{lost}. Tables, shards and class folders have captions.")
    if index.card is not None and not index.card.probabilistic:
        lacks.append(f"{index.card.name} gives points, without variances: no ellipses, no uncertainty, no elk.")
    if embedder is not None and embedder.caution:
        lacks.append(f"{embedder.name}: {embedder.caution}. The page hides bits, shares and ambiguity.")
    return Explored(index, embedder, lacks, temporary, changes)


def resolved(source: str, data: str | None) -> tuple[str, str | None]:
    """Return the address of the indexed data, and the source's model for `Embedder.load`, None for features."""
    folder = Path(source)
    if source.startswith("features:") or (folder / "tasks").is_dir():
        if data:
            raise ValueError(f"{source} are features, which are already embedded. Remove --data")
        return f"features:{source.removeprefix('features:')}", None
    places = [
        place
        for place in (folder / "model", folder)
        if any(place.glob("*.safetensors")) and any((place / name).is_file() for name in CONFIG_NAMES)
    ]
    if not places and folder.is_dir():
        marks = "a run has model/config.json and weights, an index index.json, features tasks/"
        raise ValueError(f"{source} is not an index, saved features, a run or a model: {marks}")
    if not places and "/" in source and ":" not in source:
        raise FileNotFoundError(f"no folder {source}: {explain_missing(source)}")
    if not data:
        what = f"{source} is a model, and the data to explore is missing"
        raise ValueError(f"{what}. Give --data, one of {sources.FORMS}; or an index of prolip search")
    return str(sources.parse(data)), f"local-dir:{places[0]}" if places else source


class Refused(Exception):
    """A refused request, with its HTTP status."""

    def __init__(self, status: HTTPStatus, why: str):
        super().__init__(why)
        self.status = status


class App:
    """The explorer without its web server: `looks` take no input, `questions` JSON values; both return JSON values."""

    def __init__(
        self, explored: Explored, title: str, captions: Captions, scores: Path | None, threshold: Threshold | None
    ):
        self.explored, self.title, self.captions, self.gallery = explored, plain(title), captions, captions.gallery
        self.asker = Asker(captions, threshold)
        scored = None if scores is None else scored_table(scores)
        self.items = {"item": self.gallery.item} | ({"sample": scored.item} if scored else {})
        self.table = Once(lambda: scored or gallery_table(captions))
        self._model = threading.Lock()  # torch's threads share one pool: one query at a time
        self.looks: dict[str, Callable[[], Any]] = {"about": self.about, "map": Once(self._points)}
        self.looks |= {"uncertain": self.uncertain, "columns": self.columns}
        self.questions = {"search": self.search, "compare": self.compare, "walk": self.walk, "rules": self.rules}

    def warm_up(self) -> None:
        with suppress(Exception), torch.no_grad():  # a failure is computed again and reported when the result is needed
            self.gallery.uncertainty()
            if len(self.gallery.index) > 1:
                self.looks["map"]()
            self.captions.found()  # texts are already answered at this time

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with turn(self._model, "queries"), torch.no_grad():
            yield

    def about(self) -> dict[str, Any]:
        index, embedder, units = self.explored.index, self.explored.embedder, self.gallery.units
        return {
            "items": len(index),
            "dim": index.store.values["dim"],
            "side": index.side,
            "model": embedder.name if embedder is not None else index.card.name if index.card is not None else None,
            "can_ask": embedder is not None,
            "probabilistic": self.gallery.probabilistic,
            "score": index.score.in_words,
            "units": None if units is None else {"images": units.images, "texts": units.texts},
            "lacks": self.explored.limitations,
        }

    def _points(self) -> dict[str, Any]:
        """Return the map: rows with their ellipses, and the rank of their uncertainty among all, 0 to 1."""
        rows, plane, places = self.gallery.mapped()
        own = self.gallery.uncertainty()[rows]
        order = own.argsort(kind="stable").argsort(kind="stable") / max(1, len(own) - 1)
        points = [
            {**item, "at": [number(x) for x in place], "level": number(level)}
            for item, place, level in zip(self.gallery.describe(rows.tolist()), places.tolist(), order.tolist())
        ]
        share = [number(x) for x in plane.share]
        return {"points": points, "share": share, "most": MAPPED, "total": len(self.gallery.index)}

    def uncertain(self) -> dict[str, Any]:
        """Return the least and the most uncertain items. ValueError for points."""
        if not self.gallery.probabilistic:
            raise ValueError("this model gives points, so all items are equally uncertain")
        least, most = self.gallery.extremes(ENDS)
        return {"least": self.gallery.describe(least), "most": self.gallery.describe(most)}

    def columns(self) -> dict[str, Any]:
        with self._turn():
            return describe(self.table())

    def thumbnail(self, kind: str, row: int) -> bytes:
        """Return the image of an `item` of the gallery, or of a `sample` of scores. KeyError and `Gone` without one."""
        if kind not in self.items:
            raise Gone(f"there are no images of {kind!r}")
        return self.gallery.pictures.thumbnail(self.items[kind](row))

    def upload(self, data: bytes) -> dict[str, Any]:
        """Store the image of a file to search by. `Refused` if it is not an image, or too large."""
        try:
            pixels, (width, height) = self.asker.prepare(data)
        except SampleFault as fault:
            why = f"this is not a readable image: {fault}"
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, why) from fault
        with self._turn():
            return {"upload": self.asker.upload(pixels), "width": width, "height": height}

    def search(self, values: Values) -> dict[str, Any]:
        count = values.get("count", 24)
        if not isinstance(count, int) or isinstance(count, bool):
            raise ValueError(f"count {count!r}: give a whole number")
        with self._turn():
            return self.asker.search(self.asker.read(values), count)

    def compare(self, values: Values) -> dict[str, Any]:
        with self._turn():
            return self.asker.compare(self.asker.read(values))

    def walk(self, values: Values) -> dict[str, Any]:
        with self._turn():
            asked = self.asker.read(values)
            return self.captions.walk(asked.z, asked.label, asked.side, str(values.get("root", "included")))

    def rules(self, values: Values) -> dict[str, Any]:
        rules = values.get("rules", [])
        if not isinstance(rules, list):
            raise ValueError(f"rules {rules!r}: give a list of NAME: FORMULA")
        with self._turn():
            return try_rules(self.table(), rules)
