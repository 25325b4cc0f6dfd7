"""Writing, checking and loading of checkpoints, `step_N.pt`. With --fsdp, every rank writes its shards to
`step_N.shards`, torch's distributed checkpoint, under paths such as `['objective']['model.logit_scale']`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import tempfile
import time
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map, tree_map_with_path

from prolip.data.reading.stream import check_address
from prolip.models.diagnose import checkpoints_in, foreign_objects
from prolip.utils.flags import FlagError
from prolip.utils.messages import appearance_of
from prolip.utils.outputs import replacing
from training.health.signals import WAY_ON
from training.parallel import World, from_first, node_of, wait_for_all

FORMAT = 2
NAME = re.compile(r"^step_(\d+)\.pt$")
REMEDY = "give a file of <run>/checkpoints, or --pretrained for weights to start from"


class Storage:
    """Files in one folder, each complete or absent. Downloads use the second folder if /tmp is in memory."""

    def __init__(self, url: str, beside: Path = Path()):
        self.filesystem, self.root = url_to_fs(check_address(url))
        self.local = Path(self.root) if isinstance(self.filesystem, LocalFileSystem) else None
        self.url, self.beside = str(self.local or url).rstrip("/"), beside

    def path(self, name: str) -> str:
        """Return the address of a file."""
        return f"{self.url}/{name}"

    def names(self) -> list[str]:
        """Return the names of all files and folders, unordered; empty if the folder is missing."""
        self.filesystem.invalidate_cache()
        try:
            found = self.filesystem.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        return [name.rstrip("/").rsplit("/", 1)[-1] for name in found]

    def write(self, name: str, fill: Callable[[IO[bytes]], object]) -> None:
        """Call `fill` to write a file, then rename it to `name` once it is complete."""
        if self.local is not None:
            with replacing(self.local / name) as temporary, open(temporary, "wb") as file:
                fill(file)
            return
        self.filesystem.makedirs(self.root, exist_ok=True)
        # not every store hides a file until it is complete, but a move is atomic in all of them
        hidden = f"{self.root}/.{name}.tmp"
        with self.filesystem.open(hidden, "wb") as file:
            fill(file)
        self.filesystem.mv(hidden, f"{self.root}/{name}")

    @contextmanager
    def fetched(self, name: str) -> Iterator[Path]:
        """Yield a local path of the file; FlagError if there is no disk for a download."""
        if self.local is not None:
            yield self.local / name
            return
        places = [tempfile.gettempdir(), os.environ.get("SLURM_TMPDIR") or "", str(self.beside.resolve())]
        disk = next((place for place in places if os.path.isdir(place) and not in_memory(place)), None)
        if disk is None:
            what = f"downloading a checkpoint from {self.url} needs a folder on a disk"
            raise FlagError(f"{what}, but {', '.join(filter(None, places))} is in memory: set TMPDIR to one on disk")
        with tempfile.TemporaryDirectory(prefix=".checkpoint-", suffix=".tmp", dir=disk) as folder:
            self.filesystem.get_file(f"{self.root}/{name}", str(Path(folder) / name))
            yield Path(folder) / name

    def rename(self, name: str, new: str) -> None:
        """Rename a file or folder; replaces an existing one."""
        if new in self.names():
            self.delete(new)
        self.filesystem.mv(f"{self.root}/{name}", f"{self.root}/{new}", recursive=True)

    def delete(self, name: str) -> None:
        """Remove a file or a folder."""
        self.filesystem.rm(f"{self.root}/{name}", recursive=True)

    def size(self, name: str) -> int:
        """Return the bytes of a file, or of all files in a folder."""
        self.filesystem.invalidate_cache()
        return self.filesystem.du(f"{self.root}/{name}")

    def sweep(self) -> list[str]:
        """Remove temporary files of a killed process, and shards without a checkpoint file; returns their names."""
        for folder in self.beside.glob(".checkpoint-*.tmp") if self.local is None else ():
            shutil.rmtree(folder)
        there = {*self.names()}
        left = [name for name in there if name.startswith(".") and name.endswith(".tmp")]
        left += [name for name in there if name.endswith(".shards") and name.replace(".shards", ".pt") not in there]
        for name in left:
            self.delete(name)
        return left


def in_memory(folder: str) -> bool:
    """Return True if a folder is on tmpfs or ramfs; False if the system does not report it."""
    mounts = Path("/proc/self/mounts")
    lines = mounts.read_text("utf-8").splitlines() if mounts.exists() else []  # Linux only
    kinds, place = {line.split()[1]: line.split()[2] for line in lines}, Path(folder).resolve()
    kind = next((kinds[str(above)] for above in (place, *place.parents) if str(above) in kinds), "")
    return kind in ("tmpfs", "ramfs")


def shards_of(name: str) -> str:
    """Return the name of the shard folder of a checkpoint file."""
    return name.removesuffix(".pt") + ".shards"


def list_steps(storage: Storage) -> list[int]:
    """Return the steps of all checkpoints, newest first."""
    return sorted((int(match[1]) for name in storage.names() if (match := NAME.match(name))), reverse=True)


def by_path(state: Any) -> dict[str, Any]:
    """Return the leaves of a state by path."""
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(state)[0]}


def find_checkpoint(resume: str, storage: Storage) -> tuple[str | None, list[str]]:
    """Return (address or None, why newer ones are skipped): the named file, or the run's newest valid checkpoint."""
    if resume not in ("latest", "auto"):
        check_checkpoint(resume, remedy="; --resume auto uses the newest valid checkpoint of the run")
        return resume, []
    passed_over: list[str] = []
    for step in list_steps(storage):
        address = storage.path(f"step_{step}.pt")
        try:
            check_checkpoint(address)
            return address, passed_over
        except FlagError as error:
            passed_over.append(str(error))
    if passed_over:
        remedy = "replace --resume with --overwrite to start the run again, or give another --name"
        why = "; ".join(passed_over)
        raise FlagError(f"--resume {resume} found no valid checkpoint ({why}): {remedy}")
    if resume == "latest":
        raise FlagError(f"--resume {resume}: {storage.url} holds no checkpoint: --resume auto starts at step 0")
    return None, []


def check_checkpoint(address: str, flag: str = "--resume", remedy: str = "") -> None:
    """Raise FlagError if a checkpoint, given by `flag`, is missing, truncated or damaged (CRC-32)."""
    folder, _, name = address.rpartition("/")
    storage = Storage(folder or ".")
    if name not in storage.names():
        raise FlagError(f"{flag} {address} does not exist; --resume auto uses the newest checkpoint of the run")
    if storage.filesystem.isdir(f"{storage.root}/{name}"):
        found = [*checkpoints_in(Path(address)), *checkpoints_in(Path(address) / "checkpoints")]
        newest = f", such as {found[-1]}" if found else ""
        remedy = f"give a file in it{newest}, or --name RUN --resume latest"
        raise FlagError(f"{flag} {address} is a folder: {remedy}")
    with storage.fetched(name) as path:
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
        except Exception as error:  # zipfile raises many kinds for a damaged file
            what = appearance_of(path).what
            why = f"truncated or damaged ({error}){remedy}" if "zip archive" in what else f"it is {what}; {REMEDY}"
            raise FlagError(f"{address} cannot be loaded: {why}") from None
    wrong = "" if damaged is None else f"its part {damaged} is damaged"
    if not wrong and (shards := shards_of(name)) in storage.names():
        wrong = damage_of(storage, shards)
    if wrong:
        raise FlagError(f"{address} cannot be loaded: {wrong}{remedy}")


def damage_of(storage: Storage, folder: str, contents: bool = True) -> str:
    """Describe the damage of the shards in a folder; empty if valid. contents: also compute every part's CRC-32."""
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
                return f"{folder}/{name} is truncated"
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


def load_checkpoint(address: str | Path) -> dict[str, Any]:
    """Return the whole state on the CPU; FlagError if the file is damaged or not a checkpoint of a run."""
    return load_shards(read_checkpoint(address, World()), shards_of(str(address)))


def read_checkpoint(address: str | Path, world: World) -> dict[str, Any]:
    """Return the state on the CPU, without values of sharded tensors; on all ranks. FlagError as `load_checkpoint`.

    The file is memory-mapped: a machine holds it once for all its ranks. Copy tensors used after the start of the run.
    """
    folder, _, name = str(address).rpartition("/")
    with node_of(world) as node, contextlib.ExitStack() as held:
        path = from_first(lambda: held.enter_context(Storage(folder or ".").fetched(name)), node)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*TorchScript archive")  # the error reports it
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many kinds for a damaged file
            reason = str(error).strip().split("\n")[0]
            why = f" ({type(error).__name__}: {reason[:120]}): {REMEDY}"
            if foreign := foreign_objects(path, error):
                why = f": it holds Python objects other than tensors ({foreign}), so no run wrote it; {REMEDY}"
            elif "TorchScript" in reason:
                why = f": it is a TorchScript archive; {REMEDY}"
            raise FlagError(f"{address} cannot be loaded{why}") from None
        wait_for_all(node)  # before the file is deleted
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise FlagError(f"{address} is not a checkpoint of a run (format {FORMAT}): {REMEDY}")
    return state


def load_shards(state: Any, place: str, patterns: Mapping[str, Any] | None = None, group: Any = None) -> Any:
    """Return the state with the values of its shards in `place`. patterns: tensors by path; only this rank's shards of
    them are read. group: of all ranks, which must all call this; without it, one process reads.
    """
    found = {}
    for path, leaf in by_path(state).items():
        if isinstance(leaf, Tensor) and leaf.is_meta:
            own = (patterns or {}).get(path)
            if isinstance(own, DTensor) and own.shape == leaf.shape:
                found[path] = torch.empty_like(own, dtype=leaf.dtype, requires_grad=False)
            else:
                found[path] = torch.empty(leaf.shape, dtype=leaf.dtype)
    if not found:
        return state
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*load in a single process")  # as intended
            dcp.load(found, storage_reader=FsspecReader(place), process_group=group, no_dist=group is None)
    except dcp.api.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        remedy = "keep this folder of shards next to its checkpoint file"
        raise FlagError(f"{place} cannot be loaded ({type(cause).__name__}: {cause}): {remedy}") from None
    return tree_map_with_path(lambda path, leaf: found.get(keystr(path), leaf), state)


@dataclass
class CheckpointWriter:
    """Writer of a run's checkpoints, one at a time in a thread. Training waits only for the copy to the host.

    A failed write is reported by `say`; only the last one stops the run.
    """

    storage: Storage
    keep: int = 0
    keep_every: int = 0
    say: Callable[[str], None] = print
    saved: Callable[[str, int], None] = lambda address, step: None  # called once a checkpoint is on the disk
    group: Any = None  # of all ranks, for a sharded state; otherwise only rank 0 has a writer

    def __post_init__(self) -> None:
        self.is_first = self.group is None or dist.get_rank(self.group) == 0
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: Future[None] | None = None
        self.last: str | None = None

    def submit(self, state: dict[str, Any]) -> None:
        """Copy `state` to the host and start to write it; waits for the previous write."""
        self.settle()  # before the copy: the host holds one checkpoint at a time
        shards = {path: leaf for path, leaf in by_path(state).items() if isinstance(leaf, DTensor)}
        rest: dict[str, Any] = {"step": state["step"]}
        if self.is_first:
            bare = tree_map(lambda x: torch.empty_like(x, device="meta") if isinstance(x, DTensor) else x, state)
            rest = on_host(bare | {"format": FORMAT})
        self.pending = self.thread.submit(self._write, rest, on_host(shards))

    def settle(self, final: bool = False) -> None:
        """Wait for the current write; with `final`, OSError if it failed."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        error = pending.exception()  # no `except`: torch may raise the end of a worker anywhere
        if error is None:
            return
        if final:
            raise OSError(f"the last checkpoint was not written: {error}; fix this, then {WAY_ON}") from error
        self.say(f"warning: a checkpoint was NOT written; the run continues: {type(error).__name__}: {error}")

    def close(self) -> None:
        """End the thread after its last write."""
        self.thread.shutdown()

    def _write(self, state: dict[str, Any], shards: dict[str, Any]) -> None:
        start, name = time.perf_counter(), f"step_{state['step']}.pt"
        address = self.storage.path(name)
        if shards:
            try:
                dcp.save(shards, storage_writer=FsspecWriter(shards_of(address)), process_group=self.group)
            except dcp.api.CheckpointException as error:  # on all ranks
                rank, (cause, _) = next(iter(error.failures.items()))
                raise OSError(f"{shards_of(address)}, on rank {rank}: {type(cause).__name__}: {cause}") from error
            if self.is_first and (wrong := damage_of(self.storage, shards_of(name), contents=False)):
                what = f"{wrong}: every rank writes there, so all machines must share {self.storage.url}"
                raise OSError(f"{what}: give a shared --checkpoint-dir")
        if not self.is_first:
            return

        def fill(file: IO[bytes]) -> None:
            try:
                torch.save(state, file)
            except RuntimeError as error:  # without a cause
                said, place = "the store is full or failed", self.storage.local
                if place is not None:
                    said = f"{shutil.disk_usage(place).free / 2**20:.0f} MiB are free on the disk of {place}"
                raise OSError(f"{said} ({str(error).splitlines()[0]})") from error

        self.storage.write(name, fill)
        size = self.storage.size(name) + (self.storage.size(shards_of(name)) if shards else 0)
        self.last = address
        self.say(f"saved {address} ({size / 2**20:.0f} MiB in {time.perf_counter() - start:.1f} s)")
        try:
            self.saved(address, state["step"])
            written = [step for step in list_steps(self.storage) if step <= state["step"]]
            for step in obsolete(written, self.keep, self.keep_every):
                self.storage.delete(f"step_{step}.pt")  # first: shards without this file are not a checkpoint
                if (folder := f"step_{step}.shards") in self.storage.names():
                    self.storage.delete(folder)
        except Exception as error:  # the checkpoint itself exists
            what = f"cannot change the status or an old checkpoint: {type(error).__name__}: {error}"
            self.say(f"warning: {address} is written, but {what}")


def on_host(value: Any) -> Any:
    """Copy a state to the host; device tensors through pinned memory, all at once."""

    def copy(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        if not item.is_cuda:
            return item.detach().clone()
        return torch.empty_like(item, device="cpu", pin_memory=True).copy_(item.detach(), non_blocking=True)

    copied = tree_map(copy, value)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # a rank has one device
    return copied


def obsolete(steps: Sequence[int], keep: int, keep_every: int) -> list[int]:
    """Return steps to delete: all but the newest `keep` (0: none) and the first at or after each `keep_every`-th."""
    ordered = sorted(steps)
    first = {step // keep_every: step for step in reversed(ordered)} if keep_every else {}
    lasting = {step for multiple, step in first.items() if multiple}
    return [step for step in ordered[:-keep] if step not in lasting] if keep else []
