"""What a checkpoint holds: all that a run needs to go on as if it had never stopped."""

from __future__ import annotations

from typing import Any

from prolip.data.loader import join_states
from prolip.random import VERSIONS
from prolip.utils.fields import AUTO
from prolip.utils.flags import FlagError
from training.checkpoint.shards import by_path, load_shards
from training.config import Config, changed
from training.optim import EpochAverage
from training.parallel.distributed import collect_objects, wait_for_all, write_random_state
from training.parallel.sharding import load_module, load_optimizer
from training.state import AVERAGES, Position, Run, Trained

#: What flags say of a group of parameters; everything else that a group holds is the optimiser's own.
SETTINGS = ("lr", "lr_scale", "backbone", "weight_decay", "betas", "eps", "momentum", "use_fallback")


def save(run: Run) -> None:
    """Hand the state of all ranks, each with its place in the data, to the writer of rank 0; shards to that of each."""
    trained, kept, at = run.trained, run.kept, run.at
    if kept.ledger is not None:
        kept.ledger.flush()
    with run.health.watchdog.pause():  # the store may take longer for the checkpoint before than a collective may wait
        if kept.saver is not None:
            kept.saver.settle()
        wait_for_all(run.world)
    states = collect_objects(run.fed.loader.state_dict(), run.world)
    trained.seeded = True
    kept.saves.restart(at.step)
    kept.saved_step = at.step
    state = {"step": at.step, "objective": trained.objective.state_dict(), "optimizer": trained.optimizer.state_dict()}
    state |= {name: model.state_dict() for name, model in trained.averaged(at.step).items()}
    if run.world.is_first:
        state = {
            **vars(at),
            "bad_steps": run.health.meter.bad_steps,
            "global_batch": run.fed.global_batch,
            "total_steps": run.total_steps,
            **dict.fromkeys(AVERAGES),
            **state,
            "memory": dict(trained.objective.pool_state),
            "draws": trained.objective.context.draws.version,
            "swa_steps": averaged_steps(trained, at.step),
            "scaler": trained.scaler.state_dict(),
            "data": join_states(states),
            "ranks": run.world.world_size,
            "config": run.config.to_dict(),
        }
    if kept.saver is not None:
        kept.saver.submit(state)


def restore(run: Run, state: dict[str, Any], shards: str = "") -> None:
    """Put the run where a checkpoint stands, with its shards in that folder; all ranks together. ValueError when the
    two cannot be the same run.
    """
    trained, world = run.trained, run.world
    check_same_run(run.config, trained, run.fed.global_batch, state)
    state = load_shards(state, shards, patterns(trained, state), world.waiting)
    keep_draws(run, state.get("draws", 1))
    if run.config.model.init_logit_bias == AUTO:  # it was found by the first batch
        run.config = changed(run.config, "model", init_logit_bias=state["config"]["model"].get("init_logit_bias"))
    run.fed.loader.load_state_dict(state["data"])
    load_module(trained.objective, state["objective"])
    load_optimizer(trained.optimizer, fit_optimizer(state["optimizer"], trained.optimizer.param_groups))
    if state["scaler"] and trained.scaler.is_enabled():
        trained.scaler.load_state_dict(state["scaler"])
    trained.objective.pool_state = {name: value.clone() for name, value in state.get("memory", {}).items()}
    for name in trained.averaged(state["step"]):
        load_module(trained.averages[name].module, state[name])
    run.at = Position(
        step=state["step"],
        epoch=state["epoch"],
        batch_in_epoch=state["batch_in_epoch"],
        seconds=state.get("seconds", 0.0),
        closed=state.get("closed", state["step"] == state["total_steps"]),
    )
    run.at.closed &= run.at.step == run.total_steps  # more steps, more to fit
    run.kept.saves.restart(run.at.step)
    run.health.meter.bad_steps = state.get("bad_steps", 0)
    trained.gate.bad_steps = trained.gate.bad_steps + run.health.meter.bad_steps
    saved_by = state.get("random", [])  # of a checkpoint that holds the states of generators
    trained.seeded = len(saved_by) != world.world_size
    if not trained.seeded:
        write_random_state(saved_by[world.rank], world.device)
    ranks = state.get("ranks", len(saved_by))
    if ranks != world.world_size:
        was, now = state["data"]["streams"], run.fed.loader.state_dict()["streams"]
        order = "stays" if was == now else f"is that of {now} streams, not of {was}, in the epochs from here on"
        run.kept.log.say(
            f"note: saved by {ranks} ranks, now {world.world_size}: the data's order {order}, "
            "and dropout draws other random numbers"
        )


def patterns(trained: Trained, state: dict[str, Any]) -> dict[str, Any]:
    """What in the run has the place of a checkpoint's tensors, by their paths: it says which shards are to be read."""
    groups = trained.optimizer.param_groups
    own = {name: parameter for group in groups for name, parameter in zip(group["names"], group["params"])}
    of = {
        number: own.get(name)
        for group in state["optimizer"]["param_groups"]
        for number, name in zip(group["params"], group["names"])
    }
    moments = {number: dict.fromkeys(parts, of[number]) for number, parts in state["optimizer"]["state"].items()}
    averages = {name: average.module.state_dict() for name, average in trained.averages.items()}
    return by_path({"objective": trained.objective.state_dict(), "optimizer": {"state": moments}} | averages)


def keep_draws(run: Run, version: Any) -> None:
    """Draw the random numbers of the checkpoint's version, whatever --draws says, and save that with the config."""
    if version not in VERSIONS:
        raise FlagError(
            f"the checkpoint's random numbers are of version {version}, this code draws versions "
            f"{shown(list(VERSIONS))}: resume with the code that wrote it"
        )
    run.trained.objective.context.draws.version = version
    if version != run.config.run.draws:
        run.kept.log.say(f"note: random numbers stay at the checkpoint's version {version}")
        run.config = changed(run.config, "run", draws=version)


def check_same_run(config: Config, trained: Trained, global_batch: int, state: dict[str, Any]) -> None:
    """FlagError where a checkpoint does not fit the run: what it has, what is wanted, what to give."""
    saved = state["config"]
    for flag, old, new in (
        ("method", saved["method"], config.method),
        ("opt", saved["optim"]["opt"], config.optim.opt),
    ):
        if old.lower() != new.lower():
            raise FlagError(
                f"the checkpoint was trained with --{flag} {old}, this run has {new}: give --{flag} {old}, "
                "or begin a run of its own with its model (--model local-dir:RUN/model)"
            )
    if state["global_batch"] != global_batch:
        raise FlagError(
            f"the checkpoint was trained at a global batch of {state['global_batch']}, this run has "
            f"{global_batch}: give --global-batch-size {state['global_batch']}"
        )
    bad, allowed = state.get("bad_steps", 0), config.run.max_nonfinite
    if bad > allowed:
        raise FlagError(
            f"the checkpoint's run had {bad} steps that were not finite, this run allows {allowed}, so no step would "
            f"change its parameters: give --max-nonfinite {bad} or more"
        )
    wanted, held = averaged_steps(trained, state["step"]), state.get("swa_steps", [])
    if wanted and wanted != held:
        raise FlagError(
            f"at the checkpoint's step {state['step']} SWA is to hold the weights of steps {shown(wanted)}, it holds "
            f"{shown(held)}: give the length and the --swa-epochs of its run, or leave --swa-epochs out"
        )
    for name in trained.averaged(state["step"]):
        if state.get(name) is None:
            raise FlagError(
                f"the checkpoint holds no averaged weights: leave out {AVERAGES[name]}, or begin a run of "
                "its own by another --name"
            )
    sizes = [
        {name: tuple(value.shape) for name, value in part.items()}
        for part in (state["objective"], trained.objective.state_dict())
    ]
    differing = differences(*sizes)
    if differing:
        raise FlagError(
            f"the checkpoint is of another model ({differing}): give its --model, which was "
            f"{saved['model']['model']}, and its sizes, which stand in its run's config.json"
        )
    names = [
        dict.fromkeys((name for group in groups for name in group["names"]), "trained")
        for groups in (state["optimizer"]["param_groups"], trained.optimizer.param_groups)
    ]
    differing = differences(*names)
    if differing:
        raise FlagError(
            f"the checkpoint's run did not train the same parameters ({differing}): give its --lock-image, "
            "--lock-text and their unlocked groups, which stand in its run's config.json"
        )


def averaged_steps(trained: Trained, step: int) -> list[int]:
    """The steps whose weights SWA has taken in behind `step`; none without it."""
    average = trained.averages.get("swa")
    return average.taken(step) if isinstance(average, EpochAverage) else []


def shown(steps: list[int]) -> str:
    """Steps for a person."""
    return ", ".join(map(str, steps)) or "none"


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
    places = {
        name: (number, group)
        for group in state["param_groups"]
        for number, name in zip(group["params"], group["names"])
    }
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
