"""Open what is explored: an index, saved features, or a model with data."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from prolip.embedder import Embedder
from prolip.explorer.thumbnails import has_picture
from prolip.models.diagnose import CONFIG_NAMES
from prolip.search import sources
from prolip.search.index import SearchIndex
from prolip.search.store import holds_index
from prolip.utils.messages import explain_missing


@dataclass(frozen=True)
class Explored:
    """An open gallery. limitations: what is impossible, and why; temporary: a folder that is deleted with the page."""

    index: SearchIndex
    embedder: Embedder | None
    limitations: list[str]
    temporary: tempfile.TemporaryDirectory | None = None
    changes: str = ""  # by building the index


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
    one that the index names. reading: of `SearchIndex.add`. ValueError and OSError say what to give.
    """
    temporary, changes = None, ""
    if holds_index(source):
        if data or output:
            add = f"prolip search add {source} --data {data or 'SOURCE'}"
            raise ValueError(f"{source} is an index already: leave --data and --output out, or first add to it, {add}")
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
    return Explored(index, embedder, limitations_of(index, embedder), temporary, changes)


def resolved(source: str, data: str | None) -> tuple[str, str | None]:
    """The address of what is indexed, and the model of the source as `Embedder.load` names it, None of features."""
    folder = Path(source)
    if source.startswith("features:") or (folder / "tasks").is_dir():
        if data:
            raise ValueError(f"{source} are features, which were embedded already: leave --data out")
        return f"features:{source.removeprefix('features:')}", None
    places = [
        place
        for place in (folder / "model", folder)
        if any(place.glob("*.safetensors")) and any((place / name).is_file() for name in CONFIG_NAMES)
    ]
    if not places and folder.is_dir():
        marks = "a run has model/config.json and weights, an index index.json, features tasks/"
        raise ValueError(f"{source} is no index, no kept features, and no run or model: {marks}")
    if not places and "/" in source and ":" not in source:
        raise FileNotFoundError(f"no folder {source}: {explain_missing(source)}")
    if not data:
        what = f"{source} is a model, and there is nothing to explore yet"
        raise ValueError(f"{what}: give --data, one of {sources.FORMS}; or an index of prolip search")
    return str(sources.parse(data)), f"local-dir:{places[0]}" if places else source


def limitations_of(index: SearchIndex, embedder: Embedder | None) -> list[str]:
    """What cannot be done, and why."""
    found, some = [], index.items(range(min(len(index.store), 50)))
    if embedder is None:
        lost = "no text can be typed, no picture dropped and no path walked"
        found.append(f"There is no model, so {lost}; items, the map and uncertainties work. Give --model.")
    if index.side == "image" and not any(has_picture(item) for item in some):
        lost = "Nothing says where the pictures of these items are, as of kept features"
        found.append(f"{lost}: they are shown by their keys. An index of images or shards knows.")
    if index.side == "image" and not any(item.get("captions") for item in some):
        lost = "No captions are kept with these items, so rules know the items alone, and paths need --texts FILE"
        found.append(f"{lost}. Tables, shards and class folders bring captions.")
    if index.card is not None and not index.card.probabilistic:
        found.append(f"{index.card.name} gives points, without variances: no ellipses, no uncertainty, no elk.")
    return found
