"""Make an index of a source or of an earlier version, bring it to what its source holds now, and find its model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from prolip.data.faults import FaultCounter
from prolip.embedder import Embedder, ModelCard
from prolip.gaussian import Gaussian
from prolip.loading import load_embedder
from prolip.measures.chance import OwnFirst, evenly
from prolip.scores import Similarity
from prolip.search import sources
from prolip.search.index import CHUNK, SearchIndex
from prolip.search.indexes import Kind
from prolip.search.sources import Rebuild
from prolip.search.store import FORMER, LOCK, NAME, NUMBERED, Store, locked
from prolip.utils.documents import loads
from prolip.utils.outputs import check_output, replacing_folder
from prolip.utils.secrecy import redacted


def build(
    folder: str | os.PathLike,
    source: str,
    embedder: Embedder | None = None,
    similarity: Similarity = None,
    kind: Kind | None = None,
    verify: bool = False,
    **reading: Any,
) -> Rebuild:
    """Make an index of a source, or bring the one that is there to what the source holds now. Its `index` has it.

    embedder: of a new index, but of kept features; of one that is there the index's own by default. similarity: the
    score of the model's method by default. verify: compare checksums of what is there first. reading: of `fill`.
    FileExistsError where an index of another source or kind is there.
    """
    kind = kind or Kind()
    check_output(folder, folder=True)
    if (Path(folder) / NAME).exists():
        index = SearchIndex(folder, verify)
        addresses = [x["address"] for x in index.store.values["sources"]]
        same = index.kind == kind and addresses in ([], [redacted(source)])
        if not same or similarity not in (None, index.score.name):
            raise FileExistsError(
                f"{folder} is an index of {', '.join(addresses)}, of the type {index.kind.name}, by"
                f" {index.score.name}: use prolip search add, or give another folder"
            )
    else:
        card, dim, further = described(source, embedder)
        score, side = card.scored_by(similarity), sources.side_of(sources.parse(source))
        index = SearchIndex.create(folder, score, dim, kind, side, card, further)
    return fill(index, source, embedder, **reading)


def described(source: str, embedder: Embedder | None) -> tuple[ModelCard, int, dict[str, Any]]:
    """What a new index keeps of its model: the card, the dimensions, and how to load it, {} of kept features."""
    if sources.parse(source).kind == "features":
        features = sources.kept(source)
        return features.model, features.image.mean.shape[1], {}
    if embedder is None:
        raise ValueError("--model is wanted: what the images, and the questions, are embedded by")
    words = {"load": dict(embedder.loaded_from)} if embedder.loaded_from else {}
    return embedder.card, embedder.embed_texts([""]).mean.shape[1], words


def fill(
    index: SearchIndex,
    source: str,
    embedder: Embedder | None = None,
    batch_size: int = 256,
    workers: int | None = None,
    skip_damaged: bool = False,
    restore: bool = False,
    progress: bool = False,
    **where: Any,
) -> Rebuild:
    """Bring an index to what a source holds now; what was added, replaced, removed and left out.

    workers: threads that decode, all cores but one by default. skip_damaged: leave out what cannot be read, and count
    it. restore: add what `delete` removed, too. where: device and precision of `find_embedder`.
    """
    parsed = sources.parse(source)
    if sources.side_of(parsed) != index.side:
        raise ValueError(f"{source} gives {sources.side_of(parsed)}s, and this index has {index.side}s")
    with index.writing():
        rebuild = Rebuild(index, source, restore, FaultCounter() if skip_damaged else None)
        if parsed.kind == "features":
            parts = sources.parts_of(sources.kept(source), rebuild)
        else:
            embedder = find_embedder(index, embedder, **where)
            parts = sources.read(rebuild, embedder, batch_size, workers)
        rebuild.run(tqdm(parts, "read", unit="", unit_scale=batch_size, disable=not progress), CHUNK)
        if embedder is not None and index.side == "image":
            index.store.write(own_first=own_first(index, embedder))
            index.warn()
        index.finish(progress=progress)
    return rebuild


def own_first(index: SearchIndex, embedder: Embedder) -> OwnFirst | None:
    """Of items with the first caption of each, None where there are none."""
    items = [
        (row, item["captions"][0])
        for row in evenly(len(index.store)).tolist()
        for item in index.items([row])
        if item.get("captions")
    ]
    if not items:
        return None
    texts = list(dict.fromkeys(caption for _, caption in items))
    scores = index.score.pairwise(index.gaussians([row for row, _ in items]), embedder.embed_texts(texts))
    return OwnFirst.of(scores, torch.tensor([texts.index(caption) for _, caption in items]))


def find_embedder(
    index: SearchIndex, embedder: Embedder | None = None, device: torch.device | str = "auto", precision: str = "fp32"
) -> Embedder:
    """The model of an index; `embedder` where it is given and the same model. ValueError where it is another."""
    if embedder is None:
        words = index.store.values.get("load")
        if words is None:
            raise ValueError("this index was made of kept features: give the model that made them, --model")
        embedder = load_embedder(words["model"], words["pretrained"], device, precision, words["tokenizer"])
    if index.card is not None and embedder.fingerprint != index.card.fingerprint:
        raise ValueError(
            f"{embedder.name} is another model than made this index, {index.card.name}: its weights,"
            " settings, preprocessing or tokenizer differ"
        )
    index.warn()
    return embedder


def convert(folder: str | os.PathLike) -> None:
    """Put an index of today in the place of one of the first version, without its deleted rows, when it is whole.

    ValueError for what is no such index, for a damaged one, and for a folder with other files; BlockingIOError.
    """
    folder = Path(folder)
    values: dict[str, Any] = loads((folder / NAME).read_bytes())
    if not isinstance(values, dict) or values.pop("format", None) != FORMER:
        raise ValueError(f"{folder} is no index of an earlier version: there is nothing to convert")
    for name in os.listdir(folder):
        if name not in (NAME, LOCK, "chunks", "deleted.npy") and not NUMBERED.fullmatch(name):
            raise ValueError(f"{folder} holds {name} beside the index: move it elsewhere")
    with locked(folder), replacing_folder(folder) as beside:
        try:
            dead = np.load(folder / "deleted.npy") if (folder / "deleted.npy").exists() else np.zeros(0, dtype=int)
            chunks, start = values.pop("chunks"), 0
            Store.create(beside, values | {"near": None})
            index = SearchIndex(beside)
            for number, entry in enumerate(chunks):
                place, shape = folder / "chunks" / f"{number:06}", (entry["rows"], values["dim"])
                found = {path.stem: torch.from_numpy(np.load(path)) for path in place.glob("*.npy")}
                mean = found["mean"] if "mean" in found else found["vector"][:, : shape[1]].contiguous()
                log_var = found.get("log_var", torch.full_like(mean, -torch.inf))
                items = [json.loads(line) for line in (place / "items.jsonl").read_bytes().split(b"\n")[:-1]]
                if not len(items) == shape[0] or not mean.shape == log_var.shape == shape:
                    raise ValueError(f"{place} has not the {shape[0]} rows of the manifest")
                kept = np.flatnonzero(~np.isin(np.arange(start, start + len(items)), dead))
                start += len(items)
                if own := [items[row] for row in kept]:
                    z = Gaussian(mean, log_var).select(kept)
                    index.store.append(z, own, index.coarse, index.side, values["sources"])
        except (FileNotFoundError, EOFError, ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{folder} is damaged ({error}): build the index anew in another folder") from error
        index.finish()
