"""What is explored, from what a person has: an index, kept features, or a model with data that it embeds."""
from __future__ import annotations

import tempfile
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from prolip.evaluation.model import Embedder
from prolip.search import __main__ as command
from prolip.search import sources
from prolip.search.index import SearchIndex
from prolip.search.store import holds_index
from prolip.utils.messages import explain_missing


@dataclass(frozen=True)
class Opened:
    """index: of what is shown; embedder: of the model, None where there is none; lacks: what cannot be done, and why;
    temporary: a folder that goes when the page does.
    """

    index: SearchIndex
    embedder: Embedder | None
    lacks: list[str]
    temporary: tempfile.TemporaryDirectory | None = None


def open_source(args: Namespace) -> Opened:
    """Index, features or model by the look of `args.source`. ValueError and OSError saying what to give.

    The embedder is the one that made the index, None where nobody names one.
    """
    source, folder, temporary = args.source, Path(args.source), None
    if holds_index(folder):
        if args.data or args.index:
            raise ValueError(f"{source} is an index already: add to it with prolip-search extend {source} --data"
                             f" {args.data or 'SOURCE'}, and leave --data and --index out")  # fmt: skip
        index = SearchIndex(folder)
    elif source.startswith("features:") or (folder / "tasks").is_dir():
        if args.data:
            raise ValueError(f"{source} are features, which were embedded already: leave --data out")
        index, temporary = build(args, source if source.startswith("features:") else f"features:{source}")
    else:
        args.model = model_of(source)
        if not args.data:
            raise ValueError(f"{source} is a model, and there is nothing to explore yet: give --data, a folder, .tar"
                             f" files or {sources.FORMS}; or an index of prolip-search")  # fmt: skip
        index, temporary = build(args, address_of(args.data))
    embedder = command.load(index, args) if args.model or index.store.values.get("load") else None
    return Opened(index, embedder, lacks_of(index, embedder), temporary)


def build(args: Namespace, address: str) -> tuple[SearchIndex, tempfile.TemporaryDirectory | None]:
    """The index as `prolip-search build` makes it, in `args.index`, where it goes on, or a temporary folder."""
    temporary = None if args.index else tempfile.TemporaryDirectory(prefix="prolip-explore-")
    options = command.parse(["build", f"{temporary.name}/index" if temporary else args.index, "--data", address])
    for name in ("model", "pretrained", "tokenizer", "device", "precision", "skip_damaged"):
        setattr(options, name, getattr(args, name))
    try:
        return command.build(options), temporary
    except BaseException:
        if temporary is not None:
            temporary.cleanup()
        raise


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
