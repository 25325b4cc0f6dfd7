"""FSDP2: parameters, gradients and optimiser state sharded over the ranks.

A run may stop with FSDP2 and resume with DDP, and the other way round (training.checkpoint).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from prolip.utils.flags import FlagError
from training.parallel.distributed import World


def shard_model(model: Any, world: World, dtype: torch.dtype | None = None) -> None:
    """Shard the towers in place, block by block; dtype: what blocks are gathered in (embeddings and heads: float32).

    Scale and bias stay whole: their gradients are averaged as they arrive. FlagError for one rank.
    """
    if world.world_size == 1:
        raise FlagError("--fsdp shards over ranks, and there is one: start with torchrun, or leave --fsdp out")
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    dtype = dtype if world.device.type == "cuda" else None  # a norm on the CPU takes no parameters of lower precision
    low = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for tower in model.towers().values():
        for block in tower.blocks:
            fully_shard(block, mesh=mesh, mp_policy=low)
        fully_shard(tower, mesh=mesh)

    def average_gradient(parameter: Tensor) -> None:
        """Average over ranks; micro-batches may accumulate, as averaging twice changes nothing."""
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average_gradient)


def like(value: Tensor, pattern: Tensor) -> Tensor:
    """A whole tensor, the same on all ranks, sharded as `pattern`, if that is."""
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
        """A copy: the checkpoint's file may be mapped, and go."""
        if not isinstance(part, Tensor) or isinstance(part, DTensor):
            return part
        return like(part.to(parameter.device, copy=True) if part.shape == parameter.shape else part.clone(), parameter)

    moments = {
        number: {name: own(part, parameters[number]) for name, part in parts.items()}
        for number, parts in state["state"].items()
    }
    optimizer.load_state_dict(state | {"state": moments})


def whole_model(model: Any, world: World, everywhere: bool = False) -> Any:
    """The model itself, or a whole copy of a sharded one on rank 0, or `everywhere`, else None; all ranks must call."""
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return model
    keep, state = world.is_first or everywhere, {}
    for name, part in model.state_dict().items():
        full = part.full_tensor() if isinstance(part, DTensor) else part
        if keep:
            state[name] = full.cpu()
    if not keep:
        return None
    with torch.random.fork_rng(devices=[]):  # the drawn weights are overwritten
        copy = model.twin()
    copy.load_state_dict(state)
    return copy.to(world.device)
