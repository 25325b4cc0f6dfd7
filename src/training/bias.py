"""The bias that a run from trained weights starts with: where the loss of its first batch has no slope in it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from prolip.methods.accumulate import join_reps, split_batch
from prolip.methods.base import Batch, Objective, Reps
from prolip.utils.flags import FlagError
from training.checkpoint.run_folder import write_json
from training.config import changed
from training.parallel.distributed import World, share_object
from training.state import Run

#: No bias is beyond, and how exactly it is found.
FARTHEST, EXACT = 1e4, 1e-4


def start_bias(run: Run, batch: Batch) -> None:
    """Set the bias by the first batch, say it, and save it with the config."""
    before, value = run.trained.objective.model.logit_bias.item(), balanced_bias(run, batch)
    set_bias(run, value)
    run.kept.log.say(f"bias {value:.4g}, where the loss of the first batch is balanced; the weights had {before:.4g}")
    if run.world.is_first:
        write_json(run.kept.folder / "config.json", run.config.to_dict())


@torch.no_grad()
def set_bias(run: Run, value: float) -> None:
    """Start at this bias: the model, and its averaged twins."""
    for model in (run.trained.objective.model, *(average.module for average in run.trained.averages.values())):
        model.logit_bias.fill_(value)
    run.config = changed(run.config, "model", init_logit_bias=value)


def balanced_bias(run: Run, batch: Batch) -> float:
    """The bias at which the method's own loss of the first batch, of all ranks, has no slope in the bias."""
    trained, devices = run.trained, [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    batch = trained.objective.prepare(batch, 0)
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"), trained.autocast():
        with torch.no_grad():
            pieces = [trained.objective.embed(piece) for piece in split_batch(batch, trained.accum_freq)]
        reps = join_reps(pieces, trained.objective.shared)
        return share_object(root(lambda bias: slope(trained.objective, reps, batch, bias, run.world)), run.world)


def slope(objective: Objective, reps: Reps, batch: Batch, bias: float, world: World) -> float:
    """dL/db of the global batch, whose loss is the mean of those of the ranks; the same on all of them."""
    b = torch.full_like(reps["bias"], bias, requires_grad=True)
    found = torch.autograd.grad(objective.terms(reps | {"bias": b}, batch)["loss"], b)[0].double()
    if world.world_size > 1:
        dist.all_reduce(found)
    return found.item() / world.world_size


def root(rising: Callable[[float], float]) -> float:
    """Where a rising function of the bias crosses 0, by bisection. FlagError where it does not."""
    from scipy.optimize import bisect  # late: most runs need none of it

    if not rising(-FARTHEST) < 0 < rising(FARTHEST):
        raise FlagError(
            "--init-logit-bias auto, and no bias balances matches and others of the first batch: give a "
            "number such as --init-logit-bias -10"
        )
    return round(bisect(rising, -FARTHEST, FARTHEST, xtol=EXACT), 4)
