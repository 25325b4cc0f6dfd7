"""Run a function on several gloo processes, one thread each, and collect what it returns."""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
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
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _enter, args=(world_size, folder, function, args), nprocs=world_size, start_method="forkserver"
        )
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world_size)]


def _enter(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    names = {name for _, name in socket.if_nameindex()}
    for loopback in ("lo", "lo0"):
        if loopback in names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    try:
        torch.save(function(rank, *args), Path(folder, f"{rank}.pt"))
        dist.barrier()
    finally:
        dist.destroy_process_group()
