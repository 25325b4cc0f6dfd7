"""What a checkpoint holds: all that a run needs to go on as if it had never stopped."""
from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prolip.data.loader import join_states
from training.distributed import gather_objects, read_random_state, write_random_state
from training.sharding import load_module, load_optimizer, whole

if TYPE_CHECKING:
    from training.loop import Run


@dataclass(kw_only=True)
class Position:
    """Where a run stands: optimiser steps taken, whole epochs done, batches taken of the present epoch."""

    step: int = 0
    epoch: int = 0
    batch_in_epoch: int = 0


@dataclass(kw_only=True)
class SaveClock:
    """When the next checkpoint is due, by steps and by minutes (0: not by these), beside those between epochs."""

    every_steps: int = 0
    every_minutes: float = 0.0
    saved_step: int = 0
    saved_time: float = field(default_factory=time.monotonic)

    def by_steps(self, step: int) -> bool:
        """Whether it is time after `step` steps."""
        return bool(self.every_steps) and step - self.saved_step >= self.every_steps

    def by_minutes(self) -> bool:
        """Whether it is time by this rank's clock."""
        return bool(self.every_minutes) and time.monotonic() - self.saved_time >= 60 * self.every_minutes

    def restart(self, step: int) -> None:
        """A checkpoint was taken at `step`."""
        self.saved_step, self.saved_time = step, time.monotonic()


def save(run: Run) -> None:
    """Hand the state of all ranks, each with its random state and its place in the data, to the writer of rank 0."""
    if run.ledger is not None:
        run.ledger.flush()
    mine = {"random": read_random_state(run.world.device), "data": run.loader.state_dict()}
    states = gather_objects(mine, run.world)
    run.clock.restart(run.at.step)
    weights = {
        "objective": run.objective.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "ema": None if run.ema is None else run.ema.module.state_dict(),
    }
    weights = whole(weights, run.world.is_first)
    if run.saver is not None:
        run.saver.submit(
            {
                "step": run.at.step,
                "epoch": run.at.epoch,
                "batch_in_epoch": run.at.batch_in_epoch,
                "global_batch": run.global_batch,
                "total_steps": run.total_steps,
                **weights,
                "scaler": run.scaler.state_dict(),
                "random": [state["random"] for state in states],
                "data": join_states([state["data"] for state in states]),
                "config": run.config.to_dict(),
            }
        )


def restore(run: Run, state: dict[str, Any]) -> None:
    """Put the run where a checkpoint stands; raises ValueError when the two cannot be the same run."""
    if state["global_batch"] != run.global_batch:
        raise ValueError(
            f"the checkpoint was trained at a global batch of {state['global_batch']}, this run has "
            f"{run.global_batch}: give --global-batch-size {state['global_batch']}"
        )
    if run.ema is not None and state["ema"] is None:
        raise ValueError("the checkpoint holds no averaged weights: leave out --ema-decay, or start without --resume")
    run.loader.load_state_dict(state["data"])
    load_module(run.objective, state["objective"])
    load_optimizer(run.optimizer, state["optimizer"])
    run.scaler.load_state_dict(state["scaler"])
    if run.ema is not None:
        load_module(run.ema.module, state["ema"])
    run.at = Position(step=state["step"], epoch=state["epoch"], batch_in_epoch=state["batch_in_epoch"])
    run.clock.restart(run.at.step)
    if len(state["random"]) == run.world.world_size:
        write_random_state(state["random"][run.world.rank], run.world.device)
    else:
        run.log.say(f"note: saved by {len(state['random'])} ranks, so dropout draws other random numbers from here on")
