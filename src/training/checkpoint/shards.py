"""What FSDP2 has in shards, by torch's distributed checkpoint: every rank writes and reads its own part.

A sharded tensor of a state is known by its path, such as `['objective']['model.logit_scale']`; in the checkpoint's file
a tensor without values, on the meta device, is in its place.
"""

from __future__ import annotations

import io
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map, tree_map_with_path

from prolip.utils.flags import FlagError
from training.checkpoint.storage import Storage


def by_path(state: Any) -> dict[str, Any]:
    """The leaves of a state by their paths."""
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(state)[0]}


def only_shards(state: Any) -> dict[str, DTensor]:
    """The tensors that are sharded, by their paths."""
    return {path: leaf for path, leaf in by_path(state).items() if isinstance(leaf, DTensor)}


def without_shards(state: Any) -> Any:
    """The same state, without the values of sharded tensors."""
    return tree_map(lambda x: torch.empty_like(x, device="meta") if isinstance(x, DTensor) else x, state)


def save_shards(shards: Mapping[str, DTensor], place: str, group: Any) -> None:
    """Write the shards of all ranks of the group, which all must call this; OSError on all of them where one fails."""
    try:
        dcp.save(dict(shards), storage_writer=FsspecWriter(place), process_group=group)
    except dcp.api.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"{place}, on rank {rank}: {type(cause).__name__}: {cause}") from error


def load_shards(state: Any, place: str, patterns: Mapping[str, Any] | None = None, group: Any = None) -> Any:
    """The same state with the values that its file does not hold.

    patterns: tensors by path, whose shards are read alone; what has none is read whole. group: of all ranks, which all
    must call this; without, one process reads.
    """
    absent = {path: leaf for path, leaf in by_path(state).items() if isinstance(leaf, Tensor) and leaf.is_meta}
    if not absent:
        return state
    found = {path: empty_like((patterns or {}).get(path), leaf) for path, leaf in absent.items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*load in a single process")  # which is what is wanted
            dcp.load(found, storage_reader=FsspecReader(place), process_group=group, no_dist=group is None)
    except dcp.api.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise FlagError(
            f"{place} cannot be loaded ({type(cause).__name__}: {cause}): it is the part of its checkpoint "
            "that ranks wrote, and has to lie beside it"
        ) from None
    return tree_map_with_path(lambda path, leaf: found.get(keystr(path), leaf), state)


def empty_like(pattern: Any, leaf: Tensor) -> Tensor:
    """A tensor to be filled, in the shards of the pattern where that has the same shape."""
    if isinstance(pattern, DTensor) and pattern.shape == leaf.shape:
        return torch.empty_like(pattern, dtype=leaf.dtype, requires_grad=False)
    return torch.empty(leaf.shape, dtype=leaf.dtype)


def damage_of(storage: Storage, folder: str, contents: bool = True) -> str:
    """What is wrong with the shards in a folder; empty where nothing is. contents: compute every part's CRC-32."""
    files, found = defaultdict(list), storage.filesystem
    try:
        for part in FsspecReader(storage.path(folder)).read_metadata().storage_data.values():
            files[part.relative_path].append((part.offset, part.length))
    except Exception as error:  # pickle raises many kinds for a damaged file
        return f"{folder}/.metadata cannot be read ({type(error).__name__}: {error})"
    for name, parts in sorted(files.items()):
        path = f"{storage.root}/{folder}/{name}"
        try:
            if found.size(path) < max(map(sum, parts)):
                return f"{folder}/{name} is cut off"
            with found.open(path) as file:
                for offset, length in sorted(parts) if contents else ():
                    file.seek(offset)
                    with zipfile.ZipFile(io.BytesIO(file.read(length))) as archive:
                        if archive.testzip() is not None:
                            raise zipfile.BadZipFile("a wrong CRC-32")
        except FileNotFoundError:
            return f"{folder}/{name} is missing"
        except Exception as error:  # zipfile, too
            return f"{folder}/{name} is damaged ({error})"
    return ""
