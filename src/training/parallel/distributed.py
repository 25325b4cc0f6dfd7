"""Process group, device, host memory, and the few helpers that know about ranks."""
from __future__ import annotations

import ctypes
import os
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from prolip.data.workers import raise_file_limit
from prolip.random import mix_seed

T = TypeVar("T")
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PATIENCE = timedelta(hours=24)
# malloc.h of glibc
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
GROWTH = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all: rank of world_size, and its device."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    waiting: Any = None  # gloo group for waits longer than a collective's time-out

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def read_environment(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, world_size, local_rank) that torchrun set, or (0, 1, 0); a half-set environment is refused."""
    given = [name for name in TORCHRUN_VARIABLES if environment.get(name)]
    if not any(name in given for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return 0, 1, 0
    missing = [name for name in TORCHRUN_VARIABLES if name not in given]
    if missing:
        raise ValueError(
            f"{', '.join(given)} are set but {', '.join(missing)} not: start with torchrun, "
            "which sets all of them, or unset them to run in one process"
        )
    rank, world_size, local_rank = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} of WORLD_SIZE={world_size}: start with torchrun, which numbers the ranks")
    return rank, world_size, local_rank


def choose_device(name: str, local_rank: int) -> torch.device:
    """`auto`, `cpu` or `cuda` to the device of this process; raises ValueError when there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= count:
        raise ValueError(
            f"--device {name}, but this machine has {count} CUDA devices for local rank {local_rank}: "
            + (f"start at most {count} processes here" if count else "use --device cpu")
        )
    return torch.device("cuda", local_rank)


@contextmanager
def process_group(device_name: str) -> Iterator[World]:
    """The ranks around a run; taken down also when the run fails."""
    rank, world_size, local_rank = read_environment(os.environ)
    device = choose_device(device_name, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1:
        yield World(device=device)
        return
    raise_file_limit()  # a group over gloo connects every rank with every other
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        waiting = dist.new_group(backend="gloo", timeout=PATIENCE)
        yield World(rank=rank, world_size=world_size, device=device, waiting=waiting)
    finally:
        dist.destroy_process_group()


def wait_for_all(world: World) -> None:
    """Meet here, however long the slowest takes (rank 0 may be evaluating)."""
    if world.world_size > 1:
        dist.barrier(group=world.waiting)


def check_equal_batches(rows: int, world: World) -> None:
    """ValueError on every rank unless all have the same local batch: the order of the data, the mean of gradients and
    the exchanges between ranks rest on it.
    """
    sizes = gather_objects(rows, world)
    if len(set(sizes)) > 1:
        raise ValueError(
            f"local batch sizes differ between ranks: got {sizes}, wanted {world.world_size} equal ones: "
            f"use {min(sizes)} on every rank"
        )


class Agreement:
    """What any rank asks for (a stop, a checkpoint), known to all ranks at the same step.

    The ranks' numbers travel beside the training, from one call to the next, so that no rank waits for another.
    """

    def __init__(self, world: World):
        self.world = world
        self.under_way: tuple[Any, Tensor] | None = None

    def exchange(self, *asked: int) -> list[int]:
        """Post this rank's numbers; returns the largest of all ranks, of the call before (with one rank: of this)."""
        if self.world.world_size == 1:
            return list(asked)
        agreed = [0] * len(asked)
        if self.under_way is not None:
            work, numbers = self.under_way
            work.wait()
            agreed = numbers.tolist()
        numbers = torch.tensor(asked, dtype=torch.int64)
        work = dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.world.waiting, async_op=True)
        self.under_way = work, numbers
        return agreed


def share_object(value: Any, world: World) -> Any:
    """Rank 0's value on every rank."""
    if world.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=world.waiting)
    return box[0]


def from_first(work: Callable[[], T], world: World) -> T:
    """What `work` gives on rank 0, which alone does it, on every rank: one broadcast of its pickle.

    What it raises there is raised on every rank, so that none waits for what never comes.
    """
    if world.world_size == 1:
        return work()
    found: Any = None
    error: Exception | None = None
    if world.is_first:
        try:
            found = work()
        except Exception as raised:
            error = raised
    found, told = share_object((found, portable(error)), world)
    if told is not None:
        raise error or told
    return found


def portable(error: Exception | None) -> Exception | None:
    """An error that says the same when it was pickled; of a class that cannot be, the nearest built-in one."""
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    except Exception:  # what a class makes of its arguments may be anything
        pass
    kinds = (OSError, ValueError, ImportError)
    return next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)(str(error))


def gather_objects(value: Any, world: World) -> list[Any]:
    """The values of all ranks, in their order, on every rank."""
    if world.world_size == 1:
        return [value]
    boxes: list[Any] = [None] * world.world_size
    dist.all_gather_object(boxes, value, group=world.waiting)
    return boxes


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed Python, numpy and torch alike; with `deterministic`, forbid algorithms whose results vary."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  libraries draw from the global generator
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def part_random_numbers(seed: int, world: World) -> None:
    """Let torch draw other numbers on each rank from here on: dropout and drop path would repeat themselves on all."""
    if not world.is_first:
        torch.manual_seed(mix_seed(seed, world.rank))


def read_random_state(device: torch.device) -> dict[str, Any]:
    """States of every global generator of this process, in types that torch.load takes with weights_only."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def write_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Go on where `read_random_state` stood."""
    torch.set_rng_state(state["torch"].cpu())
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def keep_freed_memory() -> bool:
    """Have malloc keep what is freed for the next tensor; False where the C library is not glibc.

    Left to itself glibc hands each large block back to the kernel, which clears its pages anew for the next operation.
    Measured: 6 to 15% of a step on a CPU. Peak memory does not grow, it is only never given back.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, another system
        return False
    wanted = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, GROWTH))
    return all(mallopt(name, value) == 1 for name, value in wanted)
