"""Real gloo processes for the tests of this folder."""
from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(world_size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`work(rank, world_size, *arguments)` in as many processes of one gloo group; what they return, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_serve, args=(world_size, folder, work, arguments), nprocs=world_size)
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world_size)]


def _serve(rank: int, world_size: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    torch.save(work(rank, world_size, *arguments), Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()
