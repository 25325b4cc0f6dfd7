"""One rank of any number, without the others: torch's fake process group, what a rank sends, and the most it holds."""
from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operators of torch.distributed -> the collective; places of what goes out and of what comes in among the arguments.
COLLECTIVES = {
    "send": ("send", 0, None), "recv_": ("receive", None, 0), "_allgather_base_": ("all-gather", 1, 0),
    "allgather_": ("all-gather", 1, 0), "_reduce_scatter_base_": ("reduce-scatter", 1, 0),
    "reduce_scatter_": ("reduce-scatter", 1, 0), "alltoall_base_": ("all-to-all", 1, 0),
    "alltoall_": ("all-to-all", 1, 0), "allreduce_": ("all-reduce", 0, 0), "broadcast_": ("broadcast", 0, 0),
}  # fmt: skip


class Ledger(TorchDispatchMode):
    """Counts collectives and the bytes that this rank has for others in each, and the bytes of storages alive.

    counts, sent: by collective; peak: most bytes alive at a time of what was made inside. What comes in is zeros.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.counts, self.sent = ranks, Counter[str](), Counter[str]()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.note(func.overloadpacket.__name__, args)
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.hold(x.untyped_storage())
        return out

    def note(self, name: str, args: tuple) -> None:
        """A collective: of all that it takes a rank keeps its own part, of W parts."""
        kind, outward, inward = COLLECTIVES[name]
        self.counts[kind] += 1
        out = 0 if outward is None else sum(x.nbytes for x in tensors(args[outward]))
        part = {"all-gather": self.ranks - 1, "reduce-scatter": 1 - 1 / self.ranks, "all-to-all": 1 - 1 / self.ranks}
        self.sent[kind] += round(out * part.get(kind, 1))
        if inward is not None and inward != outward:
            for x in tensors(args[inward]):
                x.zero_()

    def hold(self, storage: Any) -> None:
        """Count a storage that is new."""
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.release, key, size)

    def release(self, key: int, size: int) -> None:
        """A storage is gone."""
        self.known.discard(key)
        self.live -= size


def tensors(value: Any) -> list[Tensor]:
    """Those in an argument."""
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


@contextmanager
def one_rank(rank: int, ranks: int) -> Iterator[None]:
    """While entered, torch.distributed has so many ranks, of which this is one; OpenCLIP's losses take NCCL's way."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        with patch.object(dist, "get_backend", lambda *_, **__: dist.Backend.NCCL), real_looking_ddp():
            yield
    finally:
        dist.destroy_process_group()


def real_looking_ddp() -> Any:
    """While entered, DDP sends its buckets by `send`."""
    return patch.object(nn.parallel, "DistributedDataParallel", Sending)


class Sending(nn.parallel.DistributedDataParallel):
    """DDP whose hook is `send` from its beginning."""

    @wraps(nn.parallel.DistributedDataParallel.__init__)
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.register_comm_hook(None, send)


def send(_, bucket):  # DDP takes no annotations that are words
    """DDP's hook that does what it does by itself with real ranks; the fake ones give it no future."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
