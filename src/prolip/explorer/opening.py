"""What is explored, from what a person has: an index, kept features, or a model with data that it embeds."""
from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from prolip.evaluation.model import Embedder
from prolip.explorer.asking import MOST
from prolip.search import sources
from prolip.search.answers import calibrate, read_questions
from prolip.search.build import build, embedder_of
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


class Source(NamedTuple):
    """The folder of an index, or the address that one is built of, by `model` if it is named."""

    folder: Path | None = None
    address: str = ""
    model: str | None = None


def find_source(source: str, data: str | None = None, output: str | None = None) -> Source:
    """Index, features or model by the look of `source`, a model with data. ValueError and OSError say what to give."""
    folder = Path(source)
    if holds_index(folder):
        if data or output:
            raise ValueError(f"{source} is an index already: leave --data and --output out, or first add to it, prolip"
                             f" search add {source} --data {data or 'SOURCE'}")  # fmt: skip
        return Source(folder)
    if source.startswith("features:") or (folder / "tasks").is_dir():
        if data:
            raise ValueError(f"{source} are features, which were embedded already: leave --data out")
        return Source(address=source if source.startswith("features:") else f"features:{source}")
    model = model_of(source)
    if not data:
        raise ValueError(f"{source} is a model, and there is nothing to explore yet: give --data, a folder, .tar"
                         f" files or {sources.FORMS}; or an index of prolip search")  # fmt: skip
    return Source(address=address_of(data), model=model)


def open_source(
    source: Source, embedder: Embedder | None = None, output: str | None = None,
    device: torch.device | str = "auto", precision: str = "fp32", **reading: Any,
) -> Opened:  # fmt: skip
    """The index, or one that is built in `output`, where that goes on, or in a temporary folder.

    embedder: the one that made the index; by default the one that the index names, if any. device, precision: of that.
    reading: of `prolip.search.build.fill`.
    """
    if source.folder is not None:
        index, temporary, changes = SearchIndex(source.folder), None, ""
    else:
        folder, temporary = output, None
        if folder is None:
            temporary = tempfile.TemporaryDirectory(prefix="prolip-explore-")
            folder = f"{temporary.name}/index"
        try:
            built = build(folder, source.address, embedder, device=device, precision=precision, **reading)
        except BaseException:
            if temporary is not None:
                temporary.cleanup()
            raise
        index, changes = built.index, str(built)
    if embedder is not None or index.store.values.get("load"):
        embedder = embedder_of(index, embedder, device, precision)
    return Opened(index, embedder, lacks_of(index, embedder), temporary, changes)


def threshold_of(opened: Opened, path: str, risk: float, delta: float, allow_private_hosts: bool) -> Threshold:
    """The refusal by risk that the questions of a file calibrate."""
    if opened.embedder is None:
        raise ValueError("--calibrate asks questions, and there is no model to embed them: give --model")
    search = partial(opened.index.search, k=MOST + 1)  # as the page asks
    return calibrate(opened.index, *read_questions(path, allow_private_hosts), opened.embedder, risk, delta, search)


def model_of(source: str) -> str:
    """A run's folder or a model's as `load_embedder` names it; anything else as it is."""
    folder = Path(source)
    for place in (folder / "model", folder):
        if any((place / name).is_file() for name in ("config.json", "open_clip_config.json")) \
                and any(place.glob("*.safetensors")):  # fmt: skip
            return f"local-dir:{place}"
    if folder.is_dir():
        raise ValueError(f"{source} is no index, no kept features, and no run or model: a run has model/config.json"
                         " with weights beside it, an index index.json, features tasks/")  # fmt: skip
    if "/" in source and ":" not in source:
        raise FileNotFoundError(f"no folder {source}: {explain_missing(source)}")
    return source


def address_of(data: str) -> str:
    """A source of `prolip.search`; a folder counts as images:, tar files as shards:."""
    if data.partition(":")[0] in ("images", "shards", "features", "texts"):
        return data
    if Path(data).is_dir():
        return f"images:{data}" if not any(Path(data).glob("*.tar")) else f"shards:{data}"
    if ".tar" in data:
        return f"shards:{data}"
    raise ValueError(f"--data {data!r} is neither a folder nor shards: give {sources.FORMS}")


def lacks_of(index: SearchIndex, embedder: Embedder | None) -> list[str]:
    """What cannot be done, and why."""
    lacks, some = [], index.items(range(min(len(index.store), 50)))
    if embedder is None:
        lacks.append("There is no model, so no text can be typed, no picture dropped and no path walked; items, the map"
                     " and uncertainties work. Give --model.")  # fmt: skip
    if index.side == "image" and not any("path" in item or "shard" in item for item in some):
        lacks.append("Nothing says where the pictures of these items are, as of kept features: they are shown by their"
                     " keys. An index of images:FOLDER or shards:TARS knows.")  # fmt: skip
    if index.side == "image" and not any(item.get("captions") for item in some):
        lacks.append("No captions are kept with these items, so rules know the items alone, and paths need --texts"
                     " FILE. shards:TARS brings captions.")  # fmt: skip
    card = index.card
    if card is not None and not card.probabilistic:
        lacks.append(f"{card.name} gives points, without variances: no ellipses, no uncertainty, no elk.")
    return lacks
