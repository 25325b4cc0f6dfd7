"""Writes checkpoints behind the training, in a thread, and deletes old ones.

A checkpoint is a file, `step_N.pt`. With --fsdp, every rank also writes its shards into the folder `step_N.shards`
beside it: torch's distributed checkpoint, in which a sharded tensor is known by its path in the state, such as
`['objective']['model.logit_scale']`. The file holds a tensor on the meta device, without values, in its place.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from training.checkpoint.reader import FORMAT, by_path, damage_of, list_steps, shards_of
from training.checkpoint.storage import Storage
from training.health.signals import WAY_ON


class CheckpointWriter:
    """Writes the checkpoints of a run one after the other, in a thread: training waits only for the copy to the host.

    A write that fails is reported by `say` and does not stop the run, unless it is the last one. saved: called with
    the address and the step of every checkpoint on the disk. group: of all ranks, each with a writer, for a sharded
    state; without it, only rank 0 has one.
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
        """Copy `state` to the host and have it written; waits for the write before."""
        self.settle()  # before the copy: the host holds one checkpoint at a time
        shards = only_shards(state)
        rest = on_host(without_shards(state | {"format": FORMAT})) if self.is_first else {"step": state["step"]}
        self.pending = self.thread.submit(self._write, rest, on_host(shards))

    def settle(self, final: bool = False) -> None:
        """Wait for the write under way; with `final`, OSError where it failed."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        error = pending.exception()  # no `except`: torch may raise a worker's end anywhere
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
                self.storage.delete(f"step_{step}.pt")  # first: without the file, shards are no checkpoint
                if (folder := f"step_{step}.shards") in self.storage.names():
                    self.storage.delete(folder)
        except Exception as error:  # the checkpoint itself is there
            what = f"the status or an old checkpoint could not be changed: {type(error).__name__}: {error}"
            self.say(f"warning: {address} is written, but {what}")


def on_host(value: Any) -> Any:
    """Copy a state to the host; tensors of a device go through pinned memory, all at once."""
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


def obsolete(steps: Sequence[int], keep: int, keep_every: int) -> list[int]:
    """Steps to delete: all but the newest `keep` (0: none), and the first at or after each `keep_every`-th."""
    ordered = sorted(steps)
    first = {step // keep_every: step for step in reversed(ordered)} if keep_every else {}
    lasting = {step for multiple, step in first.items() if multiple}
    return [step for step in ordered[:-keep] if step not in lasting] if keep else []


def only_shards(state: Any) -> dict[str, DTensor]:
    """The sharded tensors by their paths."""
    return {path: leaf for path, leaf in by_path(state).items() if isinstance(leaf, DTensor)}


def without_shards(state: Any) -> Any:
    """The state without the values of sharded tensors."""
    return tree_map(lambda x: torch.empty_like(x, device="meta") if isinstance(x, DTensor) else x, state)


def save_shards(shards: Mapping[str, DTensor], place: str, group: Any) -> None:
    """Write the shards of all ranks of the group, which all must call this; OSError on all of them where one fails."""
    try:
        dcp.save(dict(shards), storage_writer=FsspecWriter(place), process_group=group)
    except dcp.api.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"{place}, on rank {rank}: {type(cause).__name__}: {cause}") from error
