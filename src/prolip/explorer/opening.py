"""What is explored, from what a person has: an index, kept features, or a model with data that it embeds."""
from __future__ import annotations

import tempfile
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from prolip.evaluation.loading import load_embedder
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
    """Index, features or model by the look of `args.source`. ValueError and OSError saying what to give."""
    source, folder = args.source, Path(args.source)
    if holds_index(folder):
        if args.data or args.index:
            raise ValueError(f"{source} is an index already: add to it with prolip-search extend {source} --data"
                             f" {args.data or 'SOURCE'}, and leave --data and --index out")  # fmt: skip
        index = SearchIndex(folder)
        return opened(index, embedder_for(index, args))
    if source.startswith("features:") or (folder / "tasks").is_dir():
        address = source if source.startswith("features:") else f"features:{source}"
        if args.data:
            raise ValueError(f"{source} are features, which were embedded already: leave --data out")
        built, temporary = build(args, address, None)
        return opened(built, embedder_for(built, args), temporary)
    model = model_of(source)
    if not args.data:
        raise ValueError(f"{source} is a model, and there is nothing to explore yet: give --data, a folder, .tar files"
                         f" or {sources.FORMS}; or an index of prolip-search")  # fmt: skip
    built, temporary = build(args, address_of(args.data), model)
    embedder = load_embedder(model, args.pretrained, args.device, args.precision, args.tokenizer)
    return opened(built, embedder, temporary)


def build(args: Namespace, address: str, model: str | None) -> tuple[SearchIndex, tempfile.TemporaryDirectory | None]:
    """The index as `prolip-search build` makes it, in `args.index`, where it goes on, or a temporary folder."""
    temporary = None if args.index else tempfile.TemporaryDirectory(prefix="prolip-explore-")
    place = args.index if temporary is None else f"{temporary.name}/index"
    words = ["build", place, "--data", address]
    for name, value in (("model", model), ("pretrained", args.pretrained), ("tokenizer", args.tokenizer),
                        ("device", args.device), ("precision", args.precision)):  # fmt: skip
        words += [f"--{name}", value] if value and model else []
    words += ["--skip-damaged"] if args.skip_damaged else []
    try:
        return command.build(command.parse(words)), temporary
    except BaseException:
        if temporary is not None:
            temporary.cleanup()
        raise


def embedder_for(index: SearchIndex, args: Namespace) -> Embedder | None:
    """The model of an index, which must be the one that made it; None where nobody names one."""
    if not args.model and not index.store.values.get("load"):
        return None
    return command.load(index, args)


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


def opened(
    index: SearchIndex, embedder: Embedder | None, temporary: tempfile.TemporaryDirectory | None = None
) -> Opened:
    """With what cannot be done."""
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
    return Opened(index, embedder, lacks, temporary)
