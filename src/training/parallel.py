"""Process group, device, exchanges between ranks, seeds, host memory; shards of parameters (FSDP2)."""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from prolip.random import mix_seed
from prolip.utils.flags import FlagError
from prolip.utils.threads import raise_file_limit

T = TypeVar("T")
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PATIENCE = timedelta(hours=24)
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # malloc.h of glibc
GROWTH = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all ranks: its rank of world_size, and its device."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    waiting: Any = None  # gloo group for waits longer than a collective's time-out
    local_rank: int = 0  # among the ranks of this machine, which have consecutive numbers
    local_size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def read_environment(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Return (rank, world_size, local_rank) as set by torchrun, or (0, 1, 0); ValueError if only some are set."""
    given = [name for name in TORCHRUN_VARIABLES if environment.get(name)]
    if not any(name in given for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return 0, 1, 0
    if missing := [name for name in TORCHRUN_VARIABLES if name not in given]:
        what = f"{', '.join(given)} are set, but not {', '.join(missing)}"
        raise ValueError(f"{what}: start with torchrun, which sets all of them, or unset them to run one process")
    rank, world_size, local_rank = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} of WORLD_SIZE={world_size}: start with torchrun, which numbers the ranks")
    return rank, world_size, local_rank


def choose_device(name: str, local_rank: int) -> torch.device:
    """Return the device of this process for `auto`, `cpu` or `cuda`; ValueError if there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= count:
        remedy = f"start at most {count} processes on this machine" if count else "use --device cpu"
        raise ValueError(f"--device {name}: no device for local rank {local_rank} ({count} CUDA devices): {remedy}")
    return torch.device("cuda", local_rank)


@contextmanager
def process_group(device_name: str) -> Iterator[World]:
    """Join the ranks of a run; yields this process's `World`."""
    rank, world_size, local_rank = read_environment(os.environ)
    device = choose_device(device_name, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1:
        yield World(device=device)
        return
    raise_file_limit()  # connections count as files
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # ranks connect when needed, not all to all at once
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        waiting = dist.new_group(backend="gloo", timeout=PATIENCE)
        size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        place = {"rank": rank, "world_size": world_size, "local_rank": local_rank, "local_size": size}
        yield World(**place, device=device, waiting=waiting)
    finally:
        dist.destroy_process_group()


@contextmanager
def node_of(world: World) -> Iterator[World]:
    """Yield the ranks of this machine as a separate world; all of them must enter."""
    if world.local_size == 1:
        yield World(device=world.device)
        return
    ranks = [world.rank - world.local_rank + number for number in range(world.local_size)]
    group = dist.new_group(ranks, backend="gloo", timeout=PATIENCE, use_local_synchronization=True)
    try:
        yield World(rank=world.local_rank, world_size=world.local_size, device=world.device, waiting=group)
    finally:
        dist.destroy_process_group(group)


def wait_for_all(world: World) -> None:
    """Wait for all ranks, up to PATIENCE."""
    if world.world_size > 1:
        dist.barrier(group=world.waiting)


def check_equal_batches(rows: Any, world: World) -> None:
    """Raise ValueError on every rank unless all local batches are equal."""
    count = rows if isinstance(rows, int) else 0  # auto is the same on all ranks
    most, least = largest(world, count, -count)
    if most != -least:
        what = f"local batch sizes differ between ranks ({-least} to {most})"
        raise ValueError(f"{what}: use the same on all {world.world_size} ranks, such as {-least}")


class StopConsensus:
    """Asynchronous maximum of stop and save requests over ranks, available on all ranks at the same step.

    One all-reduce every few steps (SECONDS on the slowest rank), read when the next one is due: the host waits only if
    the device lags by more steps.
    """

    SECONDS, MOST = 0.25, 100

    def __init__(self, world: World):
        self.world = world
        self.under_way: tuple[Callable[[], Any], Tensor] | None = None
        self.last, self.every, self.left = time.monotonic(), 1, 1

    def exchange(self, *asked: int) -> list[int]:
        """Return the largest numbers that ranks sent in the previous exchange; zeros between exchanges."""
        if self.world.world_size == 1:
            return list(asked)
        self.left -= 1
        agreed = [0] * len(asked)
        if self.left:
            return agreed
        now = time.monotonic()
        microseconds = round(1e6 * (now - self.last) / self.every)
        if self.under_way is not None:
            wait, numbers = self.under_way
            wait()
            *agreed, slowest = numbers.tolist()
            self.every = min(max(1, round(1e6 * self.SECONDS / max(1, slowest))), self.MOST)
        self.under_way = self._post(torch.tensor([*asked, microseconds]))
        self.last, self.left = now, self.every
        return agreed

    def _post(self, numbers: Tensor) -> tuple[Callable[[], Any], Tensor]:
        """Start the all-reduce; returns a function that waits for it, and the result tensor."""
        if self.world.device.type == "cpu":
            return dist.all_reduce(numbers, op=dist.ReduceOp.MAX, async_op=True).wait, numbers
        there = numbers.pin_memory().to(self.world.device, non_blocking=True)
        dist.all_reduce(there, op=dist.ReduceOp.MAX)
        here = torch.empty_like(numbers, pin_memory=True).copy_(there, non_blocking=True)
        after = torch.cuda.Event()
        after.record()
        return after.synchronize, here


def share_object(value: Any, world: World) -> Any:
    """Return rank 0's value on every rank."""
    if world.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=world.waiting, group_src=0)
    return box[0]


def largest(world: World, *numbers: int) -> list[int]:
    """Return the elementwise maximum of the numbers over ranks."""
    found = torch.tensor(numbers)
    if world.world_size > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=world.waiting)
    return found.tolist()


def collect_objects(value: Any, world: World) -> list[Any]:
    """Return the values of all ranks, in order, on rank 0; an empty list on others."""
    if world.world_size == 1:
        return [value]
    boxes = [None] * world.world_size if world.is_first else None
    dist.gather_object(value, boxes, group=world.waiting, group_dst=0)
    return boxes or []


def from_first(work: Callable[[], T], world: World) -> T:
    """Run `work` on rank 0 and return its result on every rank; errors are raised on all ranks."""
    if world.world_size == 1:
        return work()
    found, error, sent = None, None, b""
    if world.is_first:
        try:
            found = work()
            sent = pickle.dumps((found, None))
        except Exception as raised:
            error = raised
            try:
                sent = pickle.dumps((None, raised))
                portable = str(pickle.loads(sent)[1]) == str(raised)
            except Exception:  # pickling may raise anything
                portable = False
            if not portable:  # the nearest built-in class, with its message
                kinds = (OSError, ValueError, ImportError)
                kind = next((kind for kind in kinds if isinstance(raised, kind)), RuntimeError)
                sent = pickle.dumps((None, kind(str(raised))))
    received, sent_error = pickle.loads(share_object(sent, world))
    if sent_error is not None:
        raise error or sent_error
    return cast(T, found) if world.is_first else received


def gathered(value: Any, work: Callable[[list[Any]], T], world: World) -> T:
    """Run `work` on rank 0 on the values of all ranks; returns its result on every rank; errors as `from_first`."""
    values = collect_objects(value, world)
    return from_first(partial(work, values), world)


def collect_rows(own: Tensor, counts: Sequence[int], world: World) -> Tensor:
    """Collect the rows (n, ...) of all ranks on rank 0, in order, without copies. counts: rows per rank, on rank 0."""
    if world.world_size == 1:
        return own
    if not world.is_first:
        if len(own):
            dist.send(own.contiguous(), 0, group=world.waiting)
        return own[:0]
    rows = own.new_empty((sum(counts), *own.shape[1:]))
    for rank, place in enumerate(rows.split(list(counts))):
        if rank == 0:
            place.copy_(own)
        elif len(place):
            dist.recv(place, rank, group=world.waiting)
    return rows


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed Python, numpy and torch; with `deterministic`, forbid non-deterministic algorithms."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  libraries draw from the global generator
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def seed_step(seed: int, step: int, world: World) -> None:
    """Seed torch's generators from (seed, rank, step), for dropout and drop path; checkpoints then need no states."""
    number = mix_seed(seed, world.rank, step)
    torch.default_generator.manual_seed(number)
    if world.device.type == "cuda":
        torch.cuda.default_generators[world.device.index].manual_seed(number)


def write_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the generators of an old checkpoint, from before `seed_step`."""
    torch.set_rng_state(state["torch"].cpu())
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory: otherwise the kernel clears its pages again, 6 to 15% of a step on a CPU."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, another system
        return False
    options = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, GROWTH))
    return all(mallopt(name, value) == 1 for name, value in options)


def shard_model(model: Any, world: World, dtype: torch.dtype | None = None) -> None:
    """Shard the towers in place, block by block, gathered in `dtype` (embeddings and heads: float32).

    Scale and bias stay whole; their gradients are averaged as they arrive. FlagError for one rank.
    """
    if world.world_size == 1:
        raise FlagError("--fsdp needs several ranks: start with torchrun, or remove --fsdp")
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    dtype = dtype if world.device.type == "cuda" else None  # CPU norms reject lower precision
    low = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for tower in model.towers().values():
        for block in tower.blocks:
            fully_shard(block, mesh=mesh, mp_policy=low)
        fully_shard(tower, mesh=mesh)

    def average_gradient(parameter: Tensor) -> None:
        """Average over ranks; micro-batches may accumulate, because averaging twice changes nothing."""
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average_gradient)


def like(value: Tensor, pattern: Tensor) -> Tensor:
    """Shard a whole tensor, equal on all ranks, like `pattern`; return it unchanged if that is not sharded."""
    if isinstance(pattern, DTensor) and not isinstance(value, DTensor) and value.shape == pattern.shape:
        value = value.to(pattern.device)
        return distribute_tensor(value, pattern.device_mesh, pattern.placements, src_data_rank=None)
    return value


def load_module(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Load whole tensors into a module, sharded or not."""
    patterns = module.state_dict()
    module.load_state_dict({name: like(value, patterns.get(name, value)) for name, value in state.items()})


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a whole state into an optimiser of sharded or whole parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def own(part: Any, parameter: Tensor) -> Any:
        """Return a copy: the checkpoint file may be memory-mapped and deleted later."""
        if not isinstance(part, Tensor) or isinstance(part, DTensor):
            return part
        return like(part.to(parameter.device, copy=True) if part.shape == parameter.shape else part.clone(), parameter)

    moments = {
        number: {name: own(part, parameters[number]) for name, part in parts.items()}
        for number, parts in state["state"].items()
    }
    optimizer.load_state_dict(state | {"state": moments})


def whole_model(model: Any, world: World, everywhere: bool = False) -> Any:
    """Return the model; if sharded, a whole copy on rank 0 (or `everywhere`), else None. All ranks must call this."""
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return model
    keep, state = world.is_first or everywhere, {}
    for name, part in model.state_dict().items():
        full = part.full_tensor() if isinstance(part, DTensor) else part
        if keep:
            state[name] = full.cpu()
    if not keep:
        return None
    with torch.random.fork_rng(devices=[]):  # `twin` draws weights, which are then overwritten
        copy = model.twin()
    copy.load_state_dict(state)
    return copy.to(world.device)
