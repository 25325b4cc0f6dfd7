"""Finds, checks and loads checkpoints; see `writer` for what one consists of."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_with_path

from prolip.models.diagnose import checkpoints_in, foreign_objects
from prolip.utils.flags import FlagError
from prolip.utils.messages import appearance_of
from training.checkpoint.storage import Storage
from training.parallel.distributed import World, from_first, node_of, wait_for_all

FORMAT = 2
NAME = re.compile(r"^step_(\d+)\.pt$")
WANTED = "give one of <run>/checkpoints; weights to start from are --pretrained"


def shards_of(name: str) -> str:
    """The folder beside a checkpoint's file."""
    return name.removesuffix(".pt") + ".shards"


def list_steps(storage: Storage) -> list[int]:
    """Steps of all checkpoints, newest first."""
    return sorted((int(match[1]) for name in storage.names() if (match := NAME.match(name))), reverse=True)


def find_checkpoint(resume: str, storage: Storage) -> tuple[str | None, list[str]]:
    """(address or None, why newer ones are skipped) of the named file, or of the run's newest valid checkpoint."""
    if resume not in ("latest", "auto"):
        check_checkpoint(resume, remedy="; --resume auto takes the newest whole one of the run")
        return resume, []
    passed_over: list[str] = []
    for step in list_steps(storage):
        address = storage.path(f"step_{step}.pt")
        try:
            check_checkpoint(address)
            return address, passed_over
        except FlagError as error:
            passed_over.append(str(error))
    if resume == "auto" and not passed_over:
        return None, []
    if not passed_over:
        raise FlagError(f"--resume {resume}: {storage.url} holds none: --resume auto begins at step 0")
    raise FlagError(
        f"--resume {resume} found no checkpoint that can be loaded ({'; '.join(passed_over)}): instead of --resume, "
        "--overwrite deletes the run and begins it again, another --name leaves it"
    )


def check_checkpoint(address: str, flag: str = "--resume", remedy: str = "") -> None:
    """FlagError for a checkpoint, given by `flag`, that is missing, cut off or damaged by the CRC-32 of a part."""
    folder, _, name = address.rpartition("/")
    storage = Storage(folder or ".")
    if name not in storage.names():
        raise FlagError(f"{flag} {address}: there is no such file; --resume auto takes the newest of the run")
    if storage.filesystem.isdir(f"{storage.root}/{name}"):
        found = [*checkpoints_in(Path(address)), *checkpoints_in(Path(address) / "checkpoints")]
        newest = f", such as {found[-1]}" if found else ""
        remedy = f"give a file in it{newest}, or --name of the run with --resume latest"
        raise FlagError(f"{flag} {address} is a folder: {remedy}")
    with storage.fetched(name) as path:
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
        except Exception as error:  # zipfile raises many kinds for a damaged file
            what = appearance_of(path).what
            why = f"cut off or damaged ({error}){remedy}" if "zip archive" in what else f"it is {what}; {WANTED}"
            raise FlagError(f"{address} cannot be loaded: {why}") from None
    wrong = "" if damaged is None else f"its part {damaged} is not what was written"
    if not wrong and (shards := shards_of(name)) in storage.names():
        wrong = damage_of(storage, shards)
    if wrong:
        raise FlagError(f"{address} cannot be loaded: {wrong}{remedy}")


def load_checkpoint(address: str | Path) -> dict[str, Any]:
    """The whole state on the CPU; FlagError for a file that is damaged or no checkpoint of ours."""
    return load_shards(read_checkpoint(address, World()), shards_of(str(address)))


def read_checkpoint(address: str | Path, world: World) -> dict[str, Any]:
    """The state on the CPU, without the values of sharded tensors; all ranks together. FlagError as `load_checkpoint`.

    The file is mapped: a machine reads and holds it once for all its ranks, the first of which fetches a URL. Copy what
    outlives the start of the run.
    """
    folder, _, name = str(address).rpartition("/")
    with node_of(world) as node, contextlib.ExitStack() as held:
        path = from_first(lambda: held.enter_context(Storage(folder or ".").fetched(name)), node)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*TorchScript archive")  # the error says it
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many kinds for a damaged file
            reason = str(error).strip().split("\n")[0]
            why = f" ({type(error).__name__}: {reason[:120]}): {WANTED}"
            if foreign := foreign_objects(path, error):
                why = f": it holds Python objects besides tensors ({foreign}), so no run wrote it; {WANTED}"
            elif "TorchScript" in reason:
                why = f": it is a TorchScript archive; {WANTED}"
            raise FlagError(f"{address} cannot be loaded{why}") from None
        wait_for_all(node)  # before the file goes
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise FlagError(f"{address} is no checkpoint of this program (format {FORMAT}): {WANTED}")
    return state


def by_path(state: Any) -> dict[str, Any]:
    """The leaves of a state by their paths."""
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(state)[0]}


def load_shards(state: Any, place: str, patterns: Mapping[str, Any] | None = None, group: Any = None) -> Any:
    """The state with the values of its shards in the folder `place`.

    patterns: tensors by path, of which only this rank's shards are read; others are read whole. group: of all ranks,
    which all must call this; without it, one process reads.
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
        remedy = "it holds the ranks' shards of a checkpoint and must lie beside its file"
        raise FlagError(f"{place} cannot be loaded ({type(cause).__name__}: {cause}): {remedy}") from None
    return tree_map_with_path(lambda path, leaf: found.get(keystr(path), leaf), state)


def empty_like(pattern: Any, leaf: Tensor) -> Tensor:
    """An empty tensor, sharded as the pattern where that has its shape."""
    if isinstance(pattern, DTensor) and pattern.shape == leaf.shape:
        return torch.empty_like(pattern, dtype=leaf.dtype, requires_grad=False)
    return torch.empty(leaf.shape, dtype=leaf.dtype)


def damage_of(storage: Storage, folder: str, contents: bool = True) -> str:
    """What is wrong with the shards in a folder, or nothing. contents: also compute every part's CRC-32."""
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
