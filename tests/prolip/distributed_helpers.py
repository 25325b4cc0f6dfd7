"""Run a function on several gloo processes, one thread each, and collect what it returns."""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=120)
# Children are forked from one clean server that has imported these already, and with them what test modules import:
# each child would need some seconds of a core for it.
PRELOADED = [
    "torch",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch._dynamo",
    "triton",
    "pytest",
    "hypothesis",
    "open_clip",
    "prolip.factory",
    "prolip.losses",
    "prolip.loading",
    "training.run",
    "training.loop",
]


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """[function(rank, *args) of every rank]; the first rank that raises ends the run with its traceback.

    `function` must be importable (top level of a test module), its arguments and its result picklable. The default
    process group is initialised; it meets at a file, so no port is needed.
    """
    return run_worlds([world_size], function, *args)[world_size]


def run_worlds(sizes: Sequence[int], function: Callable[..., Any], *args: Any) -> dict[int, list[Any]]:
    """`run_ranks` of worlds of several sizes, one after the other in the same processes."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_enter, args=(sizes, folder, function, args), nprocs=max(sizes), start_method="forkserver")
        load = partial(torch.load, weights_only=False)
        return {size: [load(Path(folder, f"{size}-{rank}.pt")) for rank in range(size)] for size in sizes}


def _enter(rank: int, sizes: Sequence[int], folder: str, function: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    names = {name for _, name in socket.if_nameindex()}
    for loopback in ("lo", "lo0"):
        if loopback in names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    for size in (size for size in sizes if rank < size):
        dist.init_process_group("gloo", f"file://{folder}/{size}", rank=rank, world_size=size, timeout=TIMEOUT)
        try:
            torch.save(function(rank, *args), Path(folder, f"{size}-{rank}.pt"))
            dist.barrier()
        finally:
            dist.destroy_process_group()
