"""What a checkpoint holds: all that a run needs to go on as if it had never stopped."""
from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prolip.data.loader import join_states
from training.distributed import gather_objects, read_random_state, write_random_state
from training.flags import FlagError
from training.sharding import load_module, load_optimizer, whole

if TYPE_CHECKING:
    from training.loop import Run

#: What flags say of a group of parameters; everything else that a group holds is the optimiser's own.
SETTINGS = ("lr", "lr_scale", "weight_decay", "betas", "eps", "momentum", "use_fallback")


@dataclass(kw_only=True)
class Position:
    """Where a run stands: optimiser steps taken, whole epochs done, batches taken of the present epoch; seconds of
    training up to the last checkpoint.
    """

    step: int = 0
    epoch: int = 0
    batch_in_epoch: int = 0
    seconds: float = 0.0


@dataclass(kw_only=True)
class SaveClock:
    """When the next checkpoint is due, by steps and by minutes (0: not by these), beside those between epochs.

    saved_step: of the last one, which may be the one that the run goes on from, in another place; own_step: of the last
    one that this process took.
    """

    every_steps: int = 0
    every_minutes: float = 0.0
    saved_step: int = 0
    own_step: int | None = None
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
    run.clock.own_step = run.at.step
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
                "seconds": run.at.seconds,
                "bad_steps": run.meter.bad_steps,
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
    check_same_run(run, state)
    run.loader.load_state_dict(state["data"])
    load_module(run.objective, state["objective"])
    load_optimizer(run.optimizer, fit_optimizer(state["optimizer"], run.optimizer.param_groups))
    if state["scaler"] and run.scaler.is_enabled():
        run.scaler.load_state_dict(state["scaler"])
    if run.ema is not None:
        load_module(run.ema.module, state["ema"])
    run.at = Position(step=state["step"], epoch=state["epoch"], batch_in_epoch=state["batch_in_epoch"],
                      seconds=state.get("seconds", 0.0))  # fmt: skip
    run.clock.restart(run.at.step)
    run.meter.bad_steps = state.get("bad_steps", 0)
    run.gate.bad_steps = run.gate.bad_steps + run.meter.bad_steps
    if len(state["random"]) == run.world.world_size:
        write_random_state(state["random"][run.world.rank], run.world.device)
    else:
        run.log.say(f"note: saved by {len(state['random'])} ranks, so dropout draws other random numbers from here on")


def check_same_run(run: Run, state: dict[str, Any]) -> None:
    """FlagError where a checkpoint does not fit the run: what it has, what is wanted, what to give."""
    saved, now = state["config"], run.config
    for flag, old, new in (("method", saved["method"], now.method), ("opt", saved["optim"]["opt"], now.optim.opt)):
        if old.lower() != new.lower():
            raise FlagError(f"the checkpoint was trained with --{flag} {old}, this run has {new}: give --{flag} {old}, "
                            "or begin a run of its own with its model (--model local-dir:RUN/model)")  # fmt: skip
    if state["global_batch"] != run.global_batch:
        raise FlagError(
            f"the checkpoint was trained at a global batch of {state['global_batch']}, this run has "
            f"{run.global_batch}: give --global-batch-size {state['global_batch']}"
        )
    if run.ema is not None and state["ema"] is None:
        raise FlagError("the checkpoint holds no averaged weights: leave out --ema-decay, or begin a run of its own "
                        "by another --name")  # fmt: skip
    sizes = [{name: tuple(value.shape) for name, value in part.items()}
             for part in (state["objective"], run.objective.state_dict())]  # fmt: skip
    differing = differences(*sizes)
    if differing:
        raise FlagError(f"the checkpoint is of another model ({differing}): give its --model, which was "
                        f"{saved['model']['model']}, and its sizes, which stand in its run's config.json")  # fmt: skip
    trained = [dict.fromkeys((name for group in groups for name in group["names"]), "trained")
               for groups in (state["optimizer"]["param_groups"], run.optimizer.param_groups)]  # fmt: skip
    differing = differences(*trained)
    if differing:
        raise FlagError(f"the checkpoint's run did not train the same parameters ({differing}): give its --lock-image, "
                        "--lock-text and their unlocked groups, which stand in its run's config.json")  # fmt: skip


def differences(saved: dict[str, Any], now: dict[str, Any]) -> str:
    """The first of the names whose values differ, and how many there are; empty where there is none."""
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    if not names:
        return ""
    first = f"{names[0]} is {saved.get(names[0], 'not there')}, here {now.get(names[0], 'not there')}"
    return first + (f", and {len(names) - 1} more" if len(names) > 1 else "")


def fit_optimizer(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """A saved state for an optimiser that may group its parameters in another way: moments go by the parameters' names,
    and settings are those of the present groups, so that a flag that was changed is in force.
    """
    places = {name: (number, group) for group in state["param_groups"]
              for number, name in zip(group["params"], group["names"])}  # fmt: skip
    moments, fitted, count = {}, [], 0
    for group in groups:
        settings = {name: group[name] for name in SETTINGS if name in group}
        numbers = list(range(count, count + len(group["names"])))
        for number, name in zip(numbers, group["names"]):
            if places[name][0] in state["state"]:
                moments[number] = state["state"][places[name][0]]
        # what else a group holds may be counted by the optimiser
        fitted.append(places[group["names"][0]][1] | settings | {"names": group["names"], "params": numbers})
        count += len(numbers)
    return {"state": moments, "param_groups": fitted}
