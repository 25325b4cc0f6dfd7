"""The plan for one number of GPUs: every formula once, and a verdict."""
from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import NamedTuple

from planner.config import PlanConfig
from planner.failures import failures
from planner.hardware import GB, Cluster, build_cluster
from planner.memory import memory
from planner.models import Model, count_of_run
from planner.tables import HOUR, Rows, Value, number, size, span
from planner.traffic import LAUNCH, Pairs, Step, feed, step_times, traffic
from prolip.flops import FORWARD_AND_BACKWARD
from prolip.report.runs import read
from prolip.utils.flags import FlagError

ASSUMED_MFU = 0.3
# The first lines of a measured run hold compilation, caches that fill, and autotuning.
WARM_UP = 0.2
#: Rows of the input that are limits.
GIVES = "decoding gives", "the object store gives", "reading shards gives"
# Below so many samples per GPU a GPU computes less efficiently than the MFU says: launching kernels takes over.
SMALL_BATCH = 64
# What a part of the step may take before the verdict names it.
NOTABLE = 0.05


class Plan(NamedTuple):
    """One column. heading: the model, and where the speed comes from; seconds: of a step, the loader's pace included;
    tables: rows by title."""

    gpus: int
    heading: str
    cluster: Cluster
    step: Step
    seconds: float
    tables: dict[str, Rows]


def make_plan(config: PlanConfig, gpus: int) -> Plan:
    """Make the plan for this number of GPUs."""
    local = config.global_batch_size // gpus
    model, cluster = count_of_run(config.model, "prolip", local), build_cluster(config, gpus)
    rate, source = flops_per_second(config, model, cluster)
    step = step_times(model, config, cluster, rate)
    fed = feed(local, step.seconds, cluster, config)
    seconds = max(step.seconds, local / min(fed[name] for name in GIVES))
    speed, price = local / seconds, cluster.sheet.price
    wall, failed = failures(model, config, cluster, seconds)
    space = {name: Value(value, size) for name, value in memory(model, config, cluster).items()}
    used = sum(space.values())
    share = Value(used / (cluster.sheet.memory_gb * GB), "{:.0%}".format)
    parts = ", ".join(f"{part.name} {part.flops * part.share / 1e9:.1f}" for part in model.passes)
    tables: dict[str, Rows] = {
        "time": {
            "samples per GPU": Value(local, "{:.0f}".format),
            "step": Value(seconds, span),
            "samples/s": Value(speed * gpus, number),
            "samples/s/GPU": Value(speed, number),
            "MFU with waits": Value(speed * model.flops / cluster.peak, "{:.1%}".format),
            "run, with failures": Value(wall, span),
            "GPU-hours": Value(wall / HOUR * gpus, number),
            "cost": "give --price" if price is None else Value(price * gpus * wall / HOUR, lambda x: f"${number(x)}"),
        },
        "memory": space | {"sum": Value(used, size), "share of the GPU's": share},
        "traffic": traffic(step, local, model.dim, cluster),
        "input": fed,
        "failures": failed,
    }
    heading = (f"{model.name}: {model.parameters:,} parameters, {model.flops / 1e9:.1f} GFLOPs a sample "
               f"(forward: {parts})\n{config.gpu}, {cluster.per_node} to a node: {source}")
    return Plan(gpus, heading, cluster, step, seconds, tables)


def flops_per_second(config: PlanConfig, model: Model, cluster: Cluster) -> tuple[float, str]:
    """Return (FLOP/s of one GPU while it computes, where that comes from). Repeated FLOPs count twice."""
    if config.rate is not None:
        twice = 1 + config.repeats / FORWARD_AND_BACKWARD
        return config.rate * model.flops * twice, f"{config.rate:g} samples/s of one GPU, given"
    if config.measured is not None:
        return measured_flops(config.measured, config.measured_gpus, model)
    mfu, origin = (ASSUMED_MFU, "assumed") if config.mfu is None else (config.mfu, "given")
    return mfu * cluster.peak, f"MFU {mfu:.0%} of {cluster.peak / 1e12:g} TFLOP/s, {origin}"


def measured_flops(place: str, ranks: int, model: Model) -> tuple[float, str]:
    """Return (FLOP/s, source) of one rank of a run: the median after the first fifth, without the wait for data."""
    try:
        run = read(Path(place).parent if Path(place).name == "metrics.jsonl" else place)
        lines = [line for line in run.train if line.get("samples_per_second")]
        kept = lines[int(len(lines) * WARM_UP):]
        speed = statistics.median(line["samples_per_second"] / max(1e-9, 1 - float(line.get("data_wait") or 0.0))
                                  for line in kept) / ranks
        name, flops = model.name, model.flops
        if run.config is not None:
            name, data = run.config["model"]["model"], run.config["data"]
            local = data.get("batch_size") or (run.config["run"].get("global_batch_size") or ranks) // ranks
            flops = count_of_run(name, run.config["method"], max(1, local)).flops
    except statistics.StatisticsError:
        raise FlagError(f"--measured {place}: got no line with samples_per_second, wanted at least one: train longer, "
                        "or log more often with --log-every-n-steps") from None
    except (OSError, ValueError, KeyError) as error:
        raise FlagError(f"--measured {place}: {error}: give the folder that training wrote") from error
    source = f"{speed:.4g} samples/s of one rank, measured over {len(kept)} lines of {place}"
    if name != model.name:
        source += f" with {name}, {flops / 1e9:.3g} GFLOPs a sample; this model takes {model.flops / 1e9:.3g}"
    return speed * flops, source


def judge(plan: Plan, config: PlanConfig) -> str:
    """Say what limits this run, the worst first; "computation" if nothing does."""
    step, fed, found = plan.step, plan.tables["input"], list[tuple[float, str]]()
    used, lost = plan.tables["memory"]["sum"] / GB, plan.tables["failures"]["time lost in the run"]
    if used > plan.cluster.sheet.memory_gb:  # what cannot be has a weight that puts it first
        found.append((3.0, f"memory: {used:.0f} GB of {plan.cluster.sheet.memory_gb:.0f}: --accum-freq, "
                      "--grad-checkpointing, --fsdp, or more GPUs"))
    missing = fed["shards open"] - (config.dataset_samples or math.inf) // config.shard_samples
    if missing > 0:
        found.append((2.0, f"shards: {missing:,.0f} too few for {fed['shards open']} streams: fewer --workers, or "
                      "smaller shards"))
    slowest = min(GIVES, key=lambda name: fed[name])
    if fed[slowest] < fed["wanted samples/s/GPU"]:
        found.append((1 - step.seconds / plan.seconds, f"input: {slowest} {fed[slowest]} of "
                      f"{fed['wanted samples/s/GPU']} samples/s/GPU"))
    exchange = "ring" if step.pairs.exchange == "ring" else "PPCL with texts gathered"
    for name, seconds, why in (
        (exchange, step.pairs.seconds, why_pairs(step.pairs)),
        ("gradient exchange", step.reduce_exposed, "not hidden behind the backward pass"),
        ("optimiser", step.optimiser, "the same for any batch"),
    ):
        share = seconds / plan.seconds
        found += [(share, f"{name}: {share:.0%} of the step, {why}")] if share > NOTABLE else []
    found += [(lost, f"failures: {lost:.0%} of the time")] if lost > NOTABLE else []
    texts = [text for _, text in sorted(found, key=lambda item: -item[0])] or ["computation"]
    local = plan.tables["time"]["samples per GPU"]
    if local < SMALL_BATCH:
        texts.append(f"{local} samples per GPU: the towers will be slower than the MFU says")
    return "; ".join(texts)


def why_pairs(parts: Pairs) -> str:
    """Say what takes the time of PPCL."""
    if 2 * parts.exposed > parts.seconds:
        return "messages" if parts.exchange == "ring" else "an all-gather and a reduce-scatter that nothing hides"
    starting = parts.kernels * LAUNCH > (1 - NOTABLE) * parts.scoring
    return "kernels started for each of its blocks" if starting else "pairs to score"
