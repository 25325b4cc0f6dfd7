"""The content of a checkpoint: all that a run needs to resume as if it had never stopped."""

from __future__ import annotations

from typing import Any

from prolip.data.loader import join_states
from prolip.random import VERSIONS
from prolip.utils.fields import AUTO
from prolip.utils.flags import FlagError
from training.checkpoint.reader import by_path, load_shards
from training.config import Config, changed
from training.optim import EpochAverage
from training.parallel.distributed import collect_objects, wait_for_all, write_random_state
from training.parallel.sharding import load_module, load_optimizer
from training.state import AVERAGES, Position, Run, TrainState

#: Keys of a group of parameters that flags set; all others are the optimiser's own.
SETTINGS = ("lr", "lr_scale", "backbone", "weight_decay", "betas", "eps", "momentum", "use_fallback")


def save(run: Run) -> None:
    """Gather state from all ranks; rank 0 writes it, and every rank its shards."""
    trained, outputs, at = run.trained, run.outputs, run.at
    if outputs.ledger is not None:
        outputs.ledger.flush()
    with run.health.watchdog.pause():  # a slow store may outlast a collective's time-out
        if outputs.saver is not None:
            outputs.saver.settle()
        wait_for_all(run.world)
    states = collect_objects(run.data.loader.state_dict(), run.world)
    trained.seeded = True
    outputs.saves.restart(at.step)
    outputs.saved_step = at.step
    state = {"step": at.step, "objective": trained.objective.state_dict(), "optimizer": trained.optimizer.state_dict()}
    state |= {name: model.state_dict() for name, model in trained.averaged(at.step).items()}
    if run.world.is_first:
        state = {
            **vars(at),
            "bad_steps": run.health.meter.bad_steps,
            "global_batch": run.data.global_batch,
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
    if outputs.saver is not None:
        outputs.saver.submit(state)


def restore(run: Run, state: dict[str, Any], shards: str = "") -> None:
    """Restore the run from a checkpoint, with its folder of shards, on all ranks; ValueError for another run's."""
    trained, world = run.trained, run.world
    check_same_run(run.config, trained, run.data.global_batch, state)
    state = load_shards(state, shards, patterns(trained, state), world.waiting)
    keep_draws(run, state.get("draws", 1))
    if run.config.model.init_logit_bias == AUTO:  # the first batch has set it
        run.config = changed(run.config, "model", init_logit_bias=state["config"]["model"].get("init_logit_bias"))
    run.data.loader.load_state_dict(state["data"])
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
    run.outputs.saves.restart(run.at.step)
    run.health.meter.bad_steps = state.get("bad_steps", 0)
    trained.gate.bad_steps = trained.gate.bad_steps + run.health.meter.bad_steps
    saved_by = state.get("random", [])  # a checkpoint from before `seed_step`
    trained.seeded = len(saved_by) != world.world_size
    if not trained.seeded:
        write_random_state(saved_by[world.rank], world.device)
    ranks = state.get("ranks", len(saved_by))
    if ranks != world.world_size:
        was, now = state["data"]["streams"], run.data.loader.state_dict()["streams"]
        order = "stays" if was == now else f"is that of {now} streams, not of {was}, in the epochs from here on"
        order = f"the data's order {order}, and dropout draws other random numbers"
        run.outputs.log.say(f"note: saved by {ranks} ranks, now {world.world_size}: {order}")


def patterns(trained: TrainState, state: dict[str, Any]) -> dict[str, Any]:
    """The run's tensors by the paths of the checkpoint's: they say which shards to read."""
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
    """Draw random numbers by the checkpoint's version instead of --draws, and save that with the config."""
    if version not in VERSIONS:
        raise FlagError(
            f"the checkpoint's random numbers are of version {version}, this code draws versions "
            f"{shown(list(VERSIONS))}: resume with the code that wrote it"
        )
    run.trained.objective.context.draws.version = version
    if version != run.config.run.draws:
        run.outputs.log.say(f"note: random numbers stay at the checkpoint's version {version}")
        run.config = changed(run.config, "run", draws=version)


def check_same_run(config: Config, trained: TrainState, global_batch: int, state: dict[str, Any]) -> None:
    """FlagError where a checkpoint does not fit the run: what it has, what is wanted, what to give."""
    saved, step = state["config"], state["step"]
    own = "or begin a run of its own with its model (--model local-dir:RUN/model)"
    same = ("method", saved["method"], config.method), ("opt", saved["optim"]["opt"], config.optim.opt)
    for flag, old, new in same:
        if old.lower() != new.lower():
            what = f"the checkpoint was trained with --{flag} {old}, this run has {new}"
            raise FlagError(f"{what}: give --{flag} {old}, {own}")
    if state["global_batch"] != global_batch:
        what = f"the checkpoint was trained at a global batch of {state['global_batch']}, this run has {global_batch}"
        raise FlagError(f"{what}: give --global-batch-size {state['global_batch']}")
    bad, allowed = state.get("bad_steps", 0), config.run.max_nonfinite
    if bad > allowed:
        what = f"the checkpoint's run had {bad} steps that were not finite, this run allows {allowed}"
        raise FlagError(f"{what}, so no step would change its parameters: give --max-nonfinite {bad} or more")
    wanted, held = averaged_steps(trained, step), state.get("swa_steps", [])
    if wanted and wanted != held:
        raise FlagError(
            f"at the checkpoint's step {step} SWA is to hold the weights of steps {shown(wanted)}, it holds "
            f"{shown(held)}: give the length and the --swa-epochs of its run, or leave --swa-epochs out"
        )
    for name in (name for name in trained.averaged(step) if state.get(name) is None):
        remedy = f"leave out {AVERAGES[name]}, or begin a run of its own by another --name"
        raise FlagError(f"the checkpoint holds no averaged weights: {remedy}")
    check_parameters(trained, state)


def check_parameters(trained: TrainState, state: dict[str, Any]) -> None:
    """FlagError where a checkpoint has other parameters than the run, or others of them were trained."""
    where = "which stand in its run's config.json"
    states = state["objective"], trained.objective.state_dict()
    if found := differences(*({name: tuple(value.shape) for name, value in part.items()} for part in states)):
        model = state["config"]["model"]["model"]
        raise FlagError(
            f"the checkpoint is of another model ({found}): give its --model {model} and its sizes, {where}"
        )
    groups = state["optimizer"]["param_groups"], trained.optimizer.param_groups
    if found := differences(*({name: "trained" for group in of for name in group["names"]} for of in groups)):
        raise FlagError(
            f"the checkpoint's run did not train the same parameters ({found}): give its --lock-image, --lock-text "
            f"and their unlocked groups, {where}"
        )


def averaged_steps(trained: TrainState, step: int) -> list[int]:
    """The steps whose weights SWA has averaged after `step`; none without it."""
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
    """Fit a saved state to an optimiser that may group its parameters otherwise: moments go by the parameters' names,
    and settings are those of the present groups, so that a changed flag takes effect.
    """
    places: dict[str, tuple[int, dict[str, Any]]] = {}
    for group in state["param_groups"]:
        places |= {name: (number, group) for number, name in zip(group["params"], group["names"])}
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
