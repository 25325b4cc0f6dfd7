"""Checkpoints: written behind the training, checked by their checksums, kept as long as asked.

One is a file, `step_N.pt`. Of a run with --fsdp, what is sharded lies beside it in the folder `step_N.shards`, which
all ranks have written before.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
import warnings
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from prolip.models.diagnose import checkpoints_in, foreign_objects
from prolip.utils.flags import FlagError
from prolip.utils.messages import appearance_of
from training.checkpoint.shards import damage_of, load_shards, only_shards, save_shards, without_shards
from training.checkpoint.storage import Storage
from training.health.preemption import WAY_ON
from training.parallel.distributed import World, from_first, node_of, wait_for_all

FORMAT = 2
NAME = re.compile(r"^step_(\d+)\.pt$")
WANTED = "give one of <run>/checkpoints; weights to start from are --pretrained"


# --- writing ---------------------------------------------------------------------------------------------------------
class Saver:
    """Writes the checkpoints of a run one after the other, in a thread: training waits only for the copy to the host.

    A write that fails is reported by `say` and does not stop the run, unless it is the last one. saved: called with the
    address and the step of every checkpoint, once it is on the disk. group: of all ranks, each with a Saver, for a
    state in shards; without, rank 0 alone has one.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        keep: int = 0,
        keep_every: int = 0,
        say: Callable[[str], None] = print,
        saved: Callable[[str, int], None] = lambda address, step: None,
        group: Any = None,
    ):
        self.group, self.is_first = group, group is None or dist.get_rank(group) == 0
        self.storage, self.keep, self.keep_every, self.say, self.saved = storage, keep, keep_every, say, saved
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: Future[None] | None = None
        self.last: str | None = None

    def submit(self, state: dict[str, Any]) -> None:
        """Copy `state` to the host and have it written; waits for the checkpoint before, if that is still under way."""
        self.settle()  # before the copy: the host holds one checkpoint at a time
        shards = only_shards(state)
        rest = on_host(without_shards(state | {"format": FORMAT})) if self.is_first else {"step": state["step"]}
        self.pending = self.thread.submit(self._write, rest, on_host(shards))

    def settle(self, final: bool = False) -> None:
        """Wait for the write that is under way; with `final`, OSError where it failed."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        error = pending.exception()  # not by `except`, in which a worker's end could be met, that torch raises anywhere
        if error is None:
            return
        if final:
            raise OSError(f"the last checkpoint was not written: {error}; mend that, then {WAY_ON}") from error
        self.say(f"warning: a checkpoint was NOT written, the run goes on: {type(error).__name__}: {error}")

    def close(self) -> None:
        """End the thread behind its last write."""
        self.thread.shutdown()

    def _write(self, state: dict[str, Any], shards: dict[str, Any]) -> None:
        start, name = time.perf_counter(), f"step_{state['step']}.pt"
        address = self.storage.path(name)
        if shards:
            save_shards(shards, shards_of(address), self.group)
            if self.is_first and (wrong := damage_of(self.storage, shards_of(name), contents=False)):
                raise OSError(
                    f"{wrong}: every rank writes there, so all machines have to see {self.storage.url}: give "
                    "a --checkpoint-dir that they share"
                )
        if not self.is_first:
            return

        def fill(file: IO[bytes]) -> None:
            try:
                torch.save(state, file)
            except RuntimeError as error:  # torch does not say why
                said, place = "the store took no more", self.storage.local
                if place is not None:
                    said = f"{shutil.disk_usage(place).free / 2**20:.0f} MiB are left on the disk of {place}"
                raise OSError(f"{said} ({str(error).splitlines()[0]})") from error

        self.storage.write(name, fill)
        size, seconds = self.storage.size(name), time.perf_counter() - start
        size += self.storage.size(shards_of(name)) if shards else 0
        self.last = address
        self.say(f"saved {address} ({size / 2**20:.0f} MiB in {seconds:.1f} s)")
        try:
            self.saved(address, state["step"])
            written = [step for step in list_steps(self.storage) if step <= state["step"]]
            for step in obsolete(written, self.keep, self.keep_every):
                self.storage.delete(f"step_{step}.pt")  # before its shards: without the file, they are no checkpoint
                if (folder := f"step_{step}.shards") in self.storage.names():
                    self.storage.delete(folder)
        except Exception as error:  # the checkpoint itself is there
            self.say(
                f"warning: behind {address}, the status or an old checkpoint could not be changed: "
                f"{type(error).__name__}: {error}"
            )


def on_host(value: Any) -> Any:
    """A copy that later steps do not change; tensors of a device come through pinned memory, all under way at once."""
    devices: set[torch.device] = set()

    def copy(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        if not item.is_cuda:
            return item.detach().clone()
        devices.add(item.device)
        return torch.empty_like(item, device="cpu", pin_memory=True).copy_(item.detach(), non_blocking=True)

    copied = tree_map(copy, value)
    for device in devices:
        torch.cuda.synchronize(device)
    return copied


def shards_of(name: str) -> str:
    """The folder beside a checkpoint's file."""
    return name.removesuffix(".pt") + ".shards"


def obsolete(steps: Sequence[int], keep: int, keep_every: int) -> list[int]:
    """The steps whose checkpoints may go: all but the newest `keep` (0: all stay), and, with keep_every = n, but the
    first one at or behind each multiple of n.
    """
    ordered = sorted(steps)
    first = {step // keep_every: step for step in reversed(ordered)} if keep_every else {}
    lasting = {step for multiple, step in first.items() if multiple}
    return [step for step in ordered[:-keep] if step not in lasting] if keep else []


# --- reading ---------------------------------------------------------------------------------------------------------
def list_steps(storage: Storage) -> list[int]:
    """Steps of the checkpoints that are there, newest first."""
    return sorted((int(match[1]) for name in storage.names() if (match := NAME.match(name))), reverse=True)


def find_checkpoint(resume: str, storage: Storage) -> tuple[str | None, list[str]]:
    """(address, what was passed over): the file that was named, or the newest checkpoint of this run that is valid.

    With `auto` there may be none, but not only damaged ones: FlagError.
    """
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
    """FlagError where a checkpoint is missing, cut off or damaged: every part of it has a CRC-32, which is computed.

    flag: what its address was given as; remedy: the end of the message about a damaged one.
    """
    folder, _, name = address.rpartition("/")
    storage = Storage(folder or ".")
    if name not in storage.names():
        raise FlagError(f"{flag} {address}: there is no such file; --resume auto takes the newest of the run")
    if storage.filesystem.isdir(f"{storage.root}/{name}"):
        found = [*checkpoints_in(Path(address)), *checkpoints_in(Path(address) / "checkpoints")]
        newest = f", such as {found[-1]}" if found else ""
        raise FlagError(
            f"{flag} {address} is a folder: give a file in it{newest}, or --name of the run with --resume latest"
        )
    with storage.fetched(name) as path:
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
        except Exception as error:  # zipfile raises many kinds for a damaged file
            what = appearance_of(path).what
            why = f"cut off or damaged ({error}){remedy}" if "zip archive" in what else f"it is {what}; {WANTED}"
            raise FlagError(f"{address} cannot be loaded: {why}") from None
        if damaged is not None:
            raise FlagError(f"{address} cannot be loaded: its part {damaged} is not what was written{remedy}")
    if (shards := shards_of(name)) in storage.names() and (wrong := damage_of(storage, shards)):
        raise FlagError(f"{address} cannot be loaded: {wrong}{remedy}")


def load_checkpoint(address: str | Path) -> dict[str, Any]:
    """The whole state on the CPU; FlagError when the file is damaged or no checkpoint of ours."""
    return load_shards(read_checkpoint(address, World()), shards_of(str(address)))


def read_checkpoint(address: str | Path, world: World) -> dict[str, Any]:
    """The state on the CPU, of sharded tensors the sizes alone; all ranks together. FlagError as above.

    The file is mapped: a machine reads it once and holds it once for all its ranks, the first of which fetches what
    lies behind a URL. What outlives the start of the run must be copied.
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
