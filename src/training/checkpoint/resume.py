"""Save and resume: the complete state of a run, which continues as if it had never stopped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from prolip.data.loader import join_states
from prolip.random import VERSIONS
from prolip.utils.fields import AUTO
from prolip.utils.flags import FlagError, flag_of
from prolip.utils.outputs import replacing
from prolip.utils.secrecy import adopt, redacted
from training import parallel as ranks
from training.checkpoint import run_dir
from training.checkpoint.files import CheckpointWriter, Storage, by_path, list_steps, load_shards, shards_of
from training.checkpoint.run_dir import SUPERSEDED, is_finished, rows_of, write_json
from training.config import REDACTED, Config, changed
from training.health.log import StepProfiler
from training.state import AVERAGES, Position, Run, TrainState

#: Keys of a parameter group that flags set; all others belong to the optimiser.
SETTINGS = ("lr", "lr_scale", "backbone", "weight_decay", "betas", "eps", "momentum", "use_fallback")
PLACE = ("run.name", "run.output")  # settings that may change


def save(run: Run) -> None:
    """Gather the state of all ranks; rank 0 writes it, and every rank writes its shards."""
    trained, outputs, at = run.trained, run.outputs, run.at
    if outputs.ledger is not None:
        outputs.ledger.flush()
    with run.health.watchdog.pause():  # a slow store may outlast a collective's time-out
        if outputs.saver is not None:
            outputs.saver.settle()
        ranks.wait_for_all(run.world)
    states = ranks.collect_objects(run.data.loader.state_dict(), run.world)
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
            "swa_steps": trained.swa_steps(at.step),
            "scaler": trained.scaler.state_dict(),
            "data": join_states(states),
            "ranks": run.world.world_size,
            "config": run.config.to_dict(),
        }
    if outputs.saver is not None:
        outputs.saver.submit(state)


def resume(run: Run, address: str, state: dict[str, Any]) -> None:
    """Restore a run from a checkpoint; FlagError or ValueError if it belongs to another or a finished run."""
    step, total = state["step"], run.total_steps
    if step > total or (step == total and is_finished(run.outputs.folder) and (run.outputs.folder / "model").exists()):
        remedy = "give a larger --epochs or --max-steps to train longer"
        raise FlagError(f"{address} is at step {step} of {total}: the run is finished; {remedy}")
    hashes = state["config"].get(REDACTED, {})
    for tagged in hashes.values():
        adopt(tagged)  # its salt, which makes the hashes comparable
    now = run.config.to_dict().get(REDACTED, {})
    differing = [name for name in hashes if name.startswith("data.") and hashes[name] != now.get(name)]
    if differing and not run.config.run.renewed_addresses:
        flags = " and ".join(flag_of(name.removeprefix("data.")) for name in differing)
        remedy = "give the same address; if only its login, signature or command is new, add --renewed-addresses"
        raise FlagError(f"{flags}: the address differs from the checkpoint's (by its hash): {remedy}")
    restore(run, state, shards_of(address))
    say = run.outputs.log.say
    say(f"resuming from {address} at step {step}")
    if step == total:
        say("all steps are done; only the last evaluation and the model are missing")
    changes = list(changed_settings(redacted(state["config"]), run.config.to_dict()))
    if changes:
        say(f"note: settings that differ from the checkpoint's: {'; '.join(changes)}")
    if state.get("memory") and any(change.startswith("objective.") for change in changes):
        say("note: the method's summary of the whole data is the checkpoint's, computed with the checkpoint's settings")
    scheduler, before = run.config.optim.lr_scheduler, state["total_steps"]
    if before != total and scheduler != "const":
        say(f"note: the planned length was {before} steps; from now on the {scheduler} schedule is for {total} steps")


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield `section.setting: old -> new` for each setting that differs between the configs."""
    for name in saved:
        path = above + name
        if name not in now or path in (*PLACE, REDACTED):
            continue
        old, new = saved[name], now[name]
        if isinstance(old, dict) and isinstance(new, dict) and not above:
            yield from changed_settings(old, new, f"{path}.")
        elif old != new:
            yield f"{path}: {old} -> {new}"


def restore(run: Run, state: dict[str, Any], shards: str = "") -> None:
    """Restore the run from a checkpoint and its folder of shards, on all ranks; ValueError for another run's."""
    trained, world = run.trained, run.world
    check_same_run(run.config, trained, run.data.global_batch, state)
    groups = trained.optimizer.param_groups
    own = {name: parameter for group in groups for name, parameter in zip(group["names"], group["params"])}
    saved = state["optimizer"]["param_groups"]
    of = {number: own.get(name) for group in saved for number, name in zip(group["params"], group["names"])}
    moments = {number: dict.fromkeys(parts, of[number]) for number, parts in state["optimizer"]["state"].items()}
    averages = {name: average.module.state_dict() for name, average in trained.averages.items()}
    # the paths select the shards to read
    patterns = {"objective": trained.objective.state_dict(), "optimizer": {"state": moments}} | averages
    state = load_shards(state, shards, by_path(patterns), world.waiting)
    version = state.get("draws", 1)
    trained.objective.context.draws.version = version
    if version != run.config.run.draws:
        run.outputs.log.say(f"note: random numbers keep the checkpoint's version {version}")
        run.config = changed(run.config, "run", draws=version)
    if run.config.model.init_logit_bias == AUTO:  # the first batch has set it
        run.config = changed(run.config, "model", init_logit_bias=state["config"]["model"].get("init_logit_bias"))
    run.data.loader.load_state_dict(state["data"])
    ranks.load_module(trained.objective, state["objective"])
    ranks.load_optimizer(trained.optimizer, fit_optimizer(state["optimizer"], trained.optimizer.param_groups))
    if state["scaler"] and trained.scaler.is_enabled():
        trained.scaler.load_state_dict(state["scaler"])
    trained.objective.pool_state = {name: value.clone() for name, value in state.get("memory", {}).items()}
    for name in trained.averaged(state["step"]):
        ranks.load_module(trained.averages[name].module, state[name])
    place = {name: state[name] for name in ("step", "epoch", "batch_in_epoch")}
    ended = state.get("closed", state["step"] == state["total_steps"])
    closed = ended and state["step"] == run.total_steps  # a longer run fits again
    run.at = Position(**place, seconds=state.get("seconds", 0.0), closed=closed)
    run.outputs.saves.restart(run.at.step)
    run.health.meter.bad_steps = state.get("bad_steps", 0)
    trained.gate.bad_steps = trained.gate.bad_steps + run.health.meter.bad_steps
    saved_by = state.get("random", [])  # a checkpoint from before `seed_step`
    trained.seeded = len(saved_by) != world.world_size
    if not trained.seeded:
        ranks.write_random_state(saved_by[world.rank], world.device)
    before = state.get("ranks", len(saved_by))
    if before != world.world_size:
        was, now = state["data"]["streams"], run.data.loader.state_dict()["streams"]
        order = "stays the same" if was == now else f"is that of {now} streams instead of {was} in later epochs"
        order = f"the data order {order}, and dropout draws other random numbers"
        run.outputs.log.say(f"note: saved by {before} ranks, now {world.world_size}: {order}")


def check_same_run(config: Config, trained: TrainState, global_batch: int, state: dict[str, Any]) -> None:
    """Raise FlagError if a checkpoint does not match the run's settings."""
    saved, step = state["config"], state["step"]
    own = "or start a new run from its model (--model local-dir:RUN/model)"
    same = ("method", saved["method"], config.method), ("opt", saved["optim"]["opt"], config.optim.opt)
    for flag, old, new in same:
        if old.lower() != new.lower():
            what = f"the checkpoint was trained with --{flag} {old}, but this run has {new}"
            raise FlagError(f"{what}: give --{flag} {old}, {own}")
    if state["global_batch"] != global_batch:
        what = f"the checkpoint has a global batch of {state['global_batch']}, but this run has {global_batch}"
        raise FlagError(f"{what}: give --global-batch-size {state['global_batch']}")
    bad, allowed = state.get("bad_steps", 0), config.run.max_nonfinite
    if bad > allowed:
        what = f"the checkpoint's run had {bad} non-finite steps, but this run allows {allowed}"
        raise FlagError(f"{what}, so it would skip every step: give --max-nonfinite {bad} or more")
    expected, held = trained.swa_steps(step), state.get("swa_steps", [])
    if expected and expected != held:
        to_hold, holds = (", ".join(map(str, steps)) or "none" for steps in (expected, held))
        what = f"at step {step} this run's SWA averages steps {to_hold}, but the checkpoint holds {holds}"
        raise FlagError(f"{what}: give the length and --swa-epochs of its run, or remove --swa-epochs")
    if lacking := [AVERAGES[name] for name in trained.averaged(step) if state.get(name) is None]:
        remedy = f"remove {lacking[0]}, or start a new run with another --name"
        raise FlagError(f"the checkpoint holds no averaged weights: {remedy}")
    if (version := state.get("draws", 1)) not in VERSIONS:
        what = f"the checkpoint's random numbers have version {version}, but this code supports versions"
        raise FlagError(f"{what} {', '.join(map(str, VERSIONS))}: resume with the code that wrote it")
    where = "as in its run's config.json"
    states = state["objective"], trained.objective.state_dict()
    if found := differences(*({name: tuple(value.shape) for name, value in part.items()} for part in states)):
        what = f"the checkpoint has another model ({found})"
        raise FlagError(f"{what}: give its --model {saved['model']['model']} and sizes, {where}")
    groups = state["optimizer"]["param_groups"], trained.optimizer.param_groups
    if found := differences(*({name: "trained" for group in of for name in group["names"]} for of in groups)):
        what = f"the checkpoint's run trained other parameters ({found})"
        raise FlagError(f"{what}: give its --lock-image, --lock-text and unlocked groups, {where}")


def differences(saved: dict[str, Any], now: dict[str, Any]) -> str:
    """Describe the first name whose values differ, and count the others; empty if all agree."""
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    if not names:
        return ""
    first = f"{names[0]} is {saved.get(names[0], 'missing')}, here {now.get(names[0], 'missing')}"
    return first + (f", and {len(names) - 1} more" if len(names) > 1 else "")


def fit_optimizer(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Adapt a saved state to new groups: moments by the parameters' names, settings of the new groups."""
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
        # other keys of a group may be the optimiser's counters
        fitted.append(places[group["names"][0]][1] | settings | {"names": group["names"], "params": numbers})
        count += len(numbers)
    return {"state": moments, "param_groups": fitted}


def open_records(run: Run, storage: Storage) -> None:
    """Open config, log, ledger, profile and checkpoints of the run; drop entries of steps that it repeats."""
    settings, outputs, begin, world = run.config.run, run.outputs, run.at.step, run.world
    evaluated = None
    if world.is_first:
        write_json(outputs.folder / "config.json", run.config.to_dict())
        if (noise := run.data.loader.noise) is not None:
            with replacing(outputs.folder / "noise.jsonl") as temporary:
                noise.write(temporary)
        # a run without steps left evaluates again: the log does not hold all of its metrics
        log = outputs.folder / "metrics.jsonl"
        if begin < run.total_steps and log.exists() and ("eval", begin) in ((k, at) for _, at, k in rows_of(log)):
            evaluated = begin
        for later in (step for step in list_steps(storage) if step > begin):  # or it would count as the newest
            name = f"step_{later}.pt"
            for part in {name, shards_of(name)} & {*storage.names()}:
                storage.rename(part, SUPERSEDED + part)
            what = f"is later than step {begin}, from which the run resumes: now {SUPERSEDED}{name}"
            outputs.log.say(f"{storage.path(name)} {what}")
        for name in storage.sweep():
            outputs.log.say(f"removed {storage.path(name)}: an incomplete checkpoint of a killed run")
    if world.is_first or settings.fsdp:
        outputs.saver = CheckpointWriter(
            storage,
            keep=settings.keep_checkpoints,
            keep_every=settings.keep_every_steps,
            say=outputs.log.say,
            saved=lambda address, step: run_dir.write_status(outputs.folder, "running", step=step, checkpoint=address),
            group=dist.new_group(backend="gloo", timeout=ranks.PATIENCE) if settings.fsdp else None,  # for its thread
        )
    run.evals.step = ranks.share_object(evaluated, world)
    again = "eval" if begin == run.total_steps else None
    outputs.log.open(begin if settings.resume else None, again, settings.wandb_project)
    if settings.ledger:
        if world.is_first:  # also of ranks that no longer exist
            for path in (outputs.folder / "ledger").glob("rank_*.jsonl"):
                run_dir.truncate_log(path, begin)
        ranks.wait_for_all(world)
        outputs.ledger = run_dir.Ledger(outputs.folder, world.rank)
    if world.is_first and settings.profile:
        run.health.profiler = StepProfiler(outputs.folder, settings.profile, outputs.log.say)
