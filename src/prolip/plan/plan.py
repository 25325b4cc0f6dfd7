"""The plan for one number of GPUs, and a verdict."""

from __future__ import annotations

import math
from typing import NamedTuple

from prolip.flops import FORWARD_AND_BACKWARD
from prolip.plan.config import PlanConfig
from prolip.plan.models import GB, Cluster, build_cluster, count_of_run, memory
from prolip.plan.phases import Step, failures, feed, phases, step_times, traffic
from prolip.plan.tables import HOUR, Rows, Value, number, span

ASSUMED_MFU = 0.3
GIVES = "decoding gives", "the object store gives", "reading shards gives"  # rates of the input table that limit a run
SMALL_BATCH = 64  # samples per GPU below which kernel launches dominate and the MFU is not reached
NOTABLE = 0.05  # share of the step, or of the run, above which the verdict names a part


class RunPlan(NamedTuple):
    """One column of the tables."""

    gpus: int
    heading: str  # the model, and the source of the speed
    cluster: Cluster
    step: Step
    seconds: float  # of a step, including waits for the loader
    tables: dict[str, Rows]  # by title


def make_plan(config: PlanConfig, gpus: int) -> RunPlan:
    """Make the plan for this number of GPUs."""
    local = config.global_batch_size // gpus
    model, cluster = count_of_run(config.model, "prolip", local), build_cluster(config, gpus)
    mfu, origin = (ASSUMED_MFU, "assumed") if config.mfu is None else (config.mfu, "given")
    # FLOP/s of one computing GPU: repeated FLOPs count twice
    rate, source = mfu * cluster.peak, f"MFU {mfu:.0%} of {cluster.peak / 1e12:g} TFLOP/s, {origin}"
    if config.rate is not None:
        rate = config.rate * model.flops * (1 + config.repeats / FORWARD_AND_BACKWARD)
        source = f"{config.rate:g} samples/s of one GPU, given"
    step = step_times(model, config, cluster, rate)
    fed = feed(local, step.seconds, cluster, config)
    seconds = max(step.seconds, local / min(fed[name] for name in GIVES))
    speed, price = local / seconds, cluster.sheet.price
    parts = phases(model, config, cluster, seconds)
    wall, failed = failures(config, cluster, parts)
    tables: dict[str, Rows] = {
        "time": {
            "samples per GPU": Value(local, "{:.0f}".format),
            "step": Value(seconds, span),
            "samples/s": Value(speed * gpus, number),
            "samples/s/GPU": Value(speed, number),
            "MFU with waits": Value(speed * model.flops / cluster.peak, "{:.1%}".format),
            "run, start to end": Value(wall, span),
            "GPU-hours": Value(wall / HOUR * gpus, number),
            "cost": "give --price" if price is None else Value(price * gpus * wall / HOUR, lambda x: f"${number(x)}"),
        },
        "memory": memory(model, config, cluster),
        "traffic": traffic(step, local, model.dim, cluster),
        "input": fed,
        "phases": parts,
        "failures": failed,
    }
    forward = ", ".join(f"{part.name} {part.flops * part.share / 1e9:.1f}" for part in model.passes)
    paid = "" if price is None else f"; ${price:g} per GPU-hour, {'assumed' if config.price is None else 'given'}"
    heading = (
        f"{config.model}: {model.parameters:,} parameters, {model.flops / 1e9:.1f} GFLOPs per sample "
        f"(forward: {forward})\n{config.gpu}, {cluster.per_node} per node: {source}{paid}"
    )
    return RunPlan(gpus, heading, cluster, step, seconds, tables)


def judge(plan: RunPlan, config: PlanConfig) -> str:
    """Name the limits of this run, the worst first; "computation" if there is none."""
    step, fed, local = plan.step, plan.tables["input"], plan.tables["time"]["samples per GPU"]
    used, most = plan.tables["memory"]["sum"] / GB, plan.cluster.sheet.memory_gb
    missing = fed["shards open"] - (config.dataset_samples or math.inf) // config.shard_samples
    slowest = min(GIVES, key=lambda name: fed[name])
    why = "messages" if 2 * step.pairs.exposed > step.pairs.seconds else "scoring of pairs, or kernel launches"
    found = [  # a share of the step or the run; weights above 1 put impossible plans first
        (3.0 * (used > most), f"memory: {used:.0f} GB of {most:.0f}: --accum-freq, --grad-checkpointing, --fsdp"),
        (2.0 * (missing > 0), f"shards: {missing:,.0f} too few for {fed['shards open']} streams: use fewer --workers"),
        (
            float(step.seconds < plan.seconds),
            f"input: {slowest} {fed[slowest]} of {fed['needed samples/s/GPU']} samples/s/GPU",
        ),
        (step.pairs.seconds / plan.seconds, f"of the step is PPCL ({step.pairs.exchange}): {why}"),
        (step.reduce_exposed / plan.seconds, "of the step is the gradient exchange that computation does not hide"),
        (step.optimiser / plan.seconds, "of the step is the optimiser, independent of the batch"),
        (plan.tables["failures"]["time lost in the run"], "of the run is spent on starts, checkpoints and failures"),
    ]
    texts = [
        f"{share:.0%} {text}" if share < 1 else text for share, text in sorted(found, reverse=True) if share > NOTABLE
    ]
    if local < SMALL_BATCH:
        texts.append(f"{local} samples per GPU: the towers will be slower than the MFU suggests")
    return "; ".join(texts) or "computation"
