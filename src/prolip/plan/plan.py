"""The plan for one number of GPUs: every formula once, and a verdict."""

from __future__ import annotations

import math
from typing import NamedTuple

from prolip.flops import FORWARD_AND_BACKWARD
from prolip.plan.config import PlanConfig
from prolip.plan.models import GB, Cluster, build_cluster, count_of_run, memory
from prolip.plan.phases import Step, failures, feed, phases, step_times, traffic
from prolip.plan.tables import HOUR, Rows, Value, number, span

ASSUMED_MFU = 0.3
GIVES = "decoding gives", "the object store gives", "reading shards gives"  # rows of the input that are limits
SMALL_BATCH = 64  # below so many samples per GPU launching kernels takes over, and the MFU is not reached
NOTABLE = 0.05  # what a part of the step, or of the run, may take before the verdict names it


class RunPlan(NamedTuple):
    """One column of the tables."""

    gpus: int
    heading: str  # the model, and where the speed comes from
    cluster: Cluster
    step: Step
    seconds: float  # of a step, the loader's pace included
    tables: dict[str, Rows]  # by their titles


def make_plan(config: PlanConfig, gpus: int) -> RunPlan:
    """Make the plan for this number of GPUs."""
    local = config.global_batch_size // gpus
    model, cluster = count_of_run(config.model, "prolip", local), build_cluster(config, gpus)
    mfu, origin = (ASSUMED_MFU, "assumed") if config.mfu is None else (config.mfu, "given")
    # of one GPU while it computes: repeated FLOPs count twice
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
    heading = (
        f"{config.model}: {model.parameters:,} parameters, {model.flops / 1e9:.1f} GFLOPs a sample "
        f"(forward: {forward})\n{config.gpu}, {cluster.per_node} to a node: {source}"
    )
    return RunPlan(gpus, heading, cluster, step, seconds, tables)


def judge(plan: RunPlan, config: PlanConfig) -> str:
    """Say what limits this run, the worst first; "computation" if nothing does."""
    step, fed, local = plan.step, plan.tables["input"], plan.tables["time"]["samples per GPU"]
    used, most = plan.tables["memory"]["sum"] / GB, plan.cluster.sheet.memory_gb
    missing = fed["shards open"] - (config.dataset_samples or math.inf) // config.shard_samples
    slowest = min(GIVES, key=lambda name: fed[name])
    why = "messages" if 2 * step.pairs.exposed > step.pairs.seconds else "pairs to score, or kernels to start"
    found = [  # a share of the step or the run; what cannot be has a weight that puts it first
        (3.0 * (used > most), f"memory: {used:.0f} GB of {most:.0f}: --accum-freq, --grad-checkpointing, --fsdp"),
        (2.0 * (missing > 0), f"shards: {missing:,.0f} too few for {fed['shards open']} streams: fewer --workers"),
        (
            float(step.seconds < plan.seconds),
            f"input: {slowest} {fed[slowest]} of {fed['wanted samples/s/GPU']} samples/s/GPU",
        ),
        (step.pairs.seconds / plan.seconds, f"of the step is PPCL by {step.pairs.exchange}: {why}"),
        (step.reduce_exposed / plan.seconds, "of the step is the gradient exchange, which nothing hides"),
        (step.optimiser / plan.seconds, "of the step is the optimiser's, the same for any batch"),
        (plan.tables["failures"]["time lost in the run"], "of the run are starts, checkpoints and failures"),
    ]
    texts = [
        f"{share:.0%} {text}" if share < 1 else text for share, text in sorted(found, reverse=True) if share > NOTABLE
    ]
    if local < SMALL_BATCH:
        texts.append(f"{local} samples per GPU: the towers will be slower than the MFU says")
    return "; ".join(texts) or "computation"
