"""A single simulated rank of many on torch's fake process group: bytes sent, peak memory, and files touched."""

from __future__ import annotations

import inspect
import os
import pickle
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operators of torch.distributed -> the collective; positions of its inputs and outputs among the arguments.
COLLECTIVES: dict[str, tuple[str, int | None, int | None] | None] = {
    "send": ("send", 0, None),
    "recv_": ("receive", None, 0),
    "_allgather_base_": ("all-gather", 1, 0),
    "allgather_": ("all-gather", 1, 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1, 0),
    "reduce_scatter_": ("reduce-scatter", 1, 0),
    "alltoall_base_": ("all-to-all", 1, 0),
    "alltoall_": ("all-to-all", 1, 0),
    "allreduce_": ("all-reduce", 0, 0),
    "broadcast_": ("broadcast", 0, 0),
    # for sharded tensors; these return what is received
    "all_reduce": ("all-reduce", 0, None),
    "all_gather_into_tensor": ("all-gather", 0, None),
    "reduce_scatter_tensor": ("reduce-scatter", 0, None),
    "wait_tensor": None,
    "_wrap_tensor_autograd": None,
}


class Ledger(TorchDispatchMode):
    """Counter of collectives, of the bytes this rank sends in each, and of the bytes of live storages.

    counts, sent: by collective; peak: most live bytes of storages created inside. Received data is zeros.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.counts, self.sent = ranks, Counter[str](), Counter[str]()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls operators on the shards, which are counted here
        if func.namespace in ("c10d", "_c10d_functional"):
            self.note(func.overloadpacket.__name__, args)
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.hold(x.untyped_storage())
        return out

    def note(self, name: str, args: tuple) -> None:
        """Record a collective. A rank sends all of its W parts but its own."""
        if (collective := COLLECTIVES[name]) is None:
            return
        kind, outward, inward = collective
        self.counts[kind] += 1
        out = 0 if outward is None else sum(x.nbytes for x in tensors(args[outward]))
        part = {"all-gather": self.ranks - 1, "reduce-scatter": 1 - 1 / self.ranks, "all-to-all": 1 - 1 / self.ranks}
        self.sent[kind] += round(out * part.get(kind, 1))
        if inward is not None and inward != outward:
            for x in tensors(args[inward]):
                x.zero_()

    def hold(self, storage: Any) -> None:
        """Count a new storage."""
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.release, key, size)

    def release(self, key: int, size: int) -> None:
        """Count a freed storage."""
        self.known.discard(key)
        self.live -= size


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in an argument."""
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


@contextmanager
def one_rank(rank: int, ranks: int) -> Iterator[None]:
    """Simulate rank `rank` of `ranks` in torch.distributed. OpenCLIP's losses use their NCCL code."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        with patch.object(dist, "get_backend", lambda *_, **__: dist.Backend.NCCL), real_looking_ddp():
            yield
    finally:
        dist.destroy_process_group()


def real_looking_ddp() -> Any:
    """Make DDP send its buckets through `send`."""
    return patch.object(nn.parallel, "DistributedDataParallel", Sending)


class Sending(nn.parallel.DistributedDataParallel):
    """DDP with the hook `send`."""

    __signature__ = inspect.signature(nn.parallel.DistributedDataParallel)

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.register_comm_hook(None, send)


def send(_, bucket):  # DDP does not accept annotations that are strings
    """Send a bucket as DDP does with real ranks; fake ranks return no future."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


# --- files and objects ------------------------------------------------------------------------------------------------
class Calls:
    """Counter of this process's calls while `counting`: files looked up (stat, lstat), opened, and folders listed."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.on = False
        names = {"open": "opened", "os.listdir": "listed", "os.scandir": "listed"}
        sys.addaudithook(lambda event, _: self.count(names[event]) if event in names else None)
        for name in ("stat", "lstat"):
            setattr(os, name, self.counted(getattr(os, name)))
        self.map: Any = torch.UntypedStorage.from_file
        patch.object(torch.UntypedStorage, "from_file", self.mapped).start()

    def mapped(self, name: str, shared: bool, size: int) -> torch.UntypedStorage:
        """Map a file as torch does, and count its bytes."""
        if self.on:
            self.found["mapped"] += size
        return self.map(name, shared, size)

    def count(self, what: str) -> None:
        """Count one call."""
        if self.on:
            self.found[what] += 1

    def counted(self, call: Any) -> Any:
        """Return the same function with counting."""

        def counting(*args: Any, **options: Any) -> Any:
            self.count("looked up")
            return call(*args, **options)

        return counting

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """Yield the counts of the block, with bytes read (Linux only) and processor seconds."""
        self.found, self.own = Counter(), -bytes_read() + bytes_read()
        before, start = bytes_read(), time.process_time()
        self.on = True
        try:
            yield self.found
        finally:
            self.on = False
            self.found["seconds"] = time.process_time() - start  # type: ignore[assignment]
            self.found["read"] = bytes_read() - before - self.own


def bytes_read() -> int:
    """Return the bytes that this process has read from files and pipes so far; 0 if the system does not report them."""
    try:
        return int(Path("/proc/self/io").read_text(encoding="utf-8").split()[1])
    except OSError:
        return 0


class Rank:
    """Context that simulates one rank of many with torch's fake group. Objects are counted and received.

    sent: objects that rank 0 broadcasts, in order; other ranks read them from there.
    """

    OBJECTS = (
        "broadcast_object_list",
        "all_gather_object",
        "gather_object",
        "barrier",
        "new_group",
        "destroy_process_group",
    )

    def __init__(self, rank: int, ranks: int, sent: list[bytes]):
        self.rank, self.ranks, self.sent, self.waiting = rank, ranks, sent, iter(list(sent))
        self.found: Counter[str] = Counter()
        self.real = {name: getattr(dist, name) for name in self.OBJECTS}

    def __enter__(self) -> Rank:
        dist.init_process_group("fake", rank=self.rank, world_size=self.ranks, store=FakeStore())
        for name in self.OBJECTS:
            setattr(dist, name, getattr(self, name))
        return self

    def __exit__(self, *_: Any) -> None:
        for name, real in self.real.items():
            setattr(dist, name, real)
        dist.destroy_process_group()

    def broadcast_object_list(self, box: list[Any], *_: Any, **__: Any) -> None:
        self.found["collectives"] += 1
        if self.rank == 0:
            self.sent.append(pickle.dumps(list(box)))
        else:
            box[:] = pickle.loads(data := next(self.waiting))
            self.found["received"] += len(data)

    def all_gather_object(self, boxes: list[Any], value: Any, **_: Any) -> None:
        self.found["collectives"] += 1
        data = pickle.dumps(value)
        self.found["received"] += len(data) * (self.ranks - 1)
        boxes[:] = [pickle.loads(data) for _ in range(self.ranks)]

    def gather_object(self, value: Any, boxes: list[Any] | None = None, **_: Any) -> None:
        if boxes is None:
            self.found["collectives"] += 1
        else:
            self.all_gather_object(boxes, value)

    def barrier(self, *_: Any, **__: Any) -> None:
        self.found["collectives"] += 1

    def new_group(self, *_: Any, **__: Any) -> None:
        """Return the group of a machine. This rank treats its first rank as rank 0."""
        self.found["collectives"] += 1

    def destroy_process_group(self, *_: Any) -> None:
        """Do nothing: the fake group remains."""

    def add(self, ledger: Ledger, found: Counter[str]) -> None:
        """Add the tensors and objects counted since the last call to the counts of files."""
        self.found["collectives"] += sum(ledger.counts.values())
        self.found["sent"] += sum(ledger.sent.values())
        found.update(self.found)
        self.found.clear()
