"""What is explored, from what a person has: an index, kept features, or a model with data that it embeds."""
from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from prolip.data.reading.named import NamedSource
from prolip.evaluation.model import Embedder
from prolip.explorer.asking import MOST
from prolip.explorer.pictures import has_picture
from prolip.models.weights.unreadable import CONFIG_NAMES
from prolip.search import sources
from prolip.search.answers import calibrate, read_questions
from prolip.search.build import build, find_embedder
from prolip.search.index import SearchIndex
from prolip.search.risk import Threshold
from prolip.search.store import holds_index
from prolip.utils.messages import explain_missing


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
    source: str, embedder: Embedder | None = None, data: str | None = None, output: str | None = None,
    device: torch.device | str = "auto", precision: str = "fp32", **reading: Any,
) -> Opened:  # fmt: skip
    """An index, or one of kept features or of what a model embeds, built in `output` or a temporary folder.

    embedder: the one that made the index; by default the one that the index names, if any. device, precision: of that.
    reading: of `prolip.search.build.fill`. ValueError and OSError saying what to give.
    """
    if holds_index(source):
        if data or output:
            raise ValueError(f"{source} is an index already: leave --data and --output out, or first add to it, prolip"
                             f" search add {source} --data {data or 'SOURCE'}")  # fmt: skip
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
    model = next((f"local-dir:{place}" for place in (folder / "model", folder) if any(place.glob("*.safetensors"))
                  and any((place / name).is_file() for name in CONFIG_NAMES)), source)  # fmt: skip
    if model == source and folder.is_dir():
        raise ValueError(f"{source} is no index, no kept features, and no run or model: a run has model/config.json"
                         " with weights beside it, an index index.json, features tasks/")  # fmt: skip
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
        raise ValueError(f"{source} is a model, and there is nothing to explore yet: give --data, one of"
                         f" {sources.FORMS}; or an index of prolip search")  # fmt: skip
    return str(NamedSource(*sources.split(data)))


def lacks_of(index: SearchIndex, embedder: Embedder | None) -> list[str]:
    """What cannot be done, and why."""
    lacks, some = [], index.items(range(min(len(index.store), 50)))
    if embedder is None:
        lacks.append("There is no model, so no text can be typed, no picture dropped and no path walked; items, the map"
                     " and uncertainties work. Give --model.")  # fmt: skip
    if index.side == "image" and not any(has_picture(item) for item in some):
        lacks.append("Nothing says where the pictures of these items are, as of kept features: they are shown by their"
                     " keys. An index of images or shards knows.")  # fmt: skip
    if index.side == "image" and not any(item.get("captions") for item in some):
        lacks.append("No captions are kept with these items, so rules know the items alone, and paths need --texts"
                     " FILE. Tables, shards and class folders bring captions.")  # fmt: skip
    card = index.card
    if card is not None and not card.probabilistic:
        lacks.append(f"{card.name} gives points, without variances: no ellipses, no uncertainty, no elk.")
    return lacks
