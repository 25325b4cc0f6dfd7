"""The plan for one number of GPUs: every formula once, and a verdict."""
from __future__ import annotations

import dataclasses
from typing import NamedTuple

from planner.failures import Risk, risk
from planner.hardware import Cluster, build_cluster
from planner.memory import gathered_bytes, memory
from planner.models import Model, count_of_run
from planner.question import HOUR, Question
from planner.runs import Measurement, read_measurement
from planner.traffic import Feed, Pairs, Step, feed, missing_shards, pairs, step_times
from prolip.flops import FORWARD_AND_BACKWARD
from prolip.losses.contrastive import GATHERED_BYTES, Exchange
from prolip.models.registry import list_models

ASSUMED_MFU = 0.3
# Below so many samples per GPU a GPU computes less efficiently than the MFU says: launching kernels takes over.
SMALL_BATCH = 64
EXCHANGES: dict[Exchange, str] = {"ring": "ring", "gather": "PPCL with texts gathered"}
# The gathered texts are worth naming where they save so much of the time and take less than so much of the memory.
SAVING, ROOM = 0.5, 0.1
# What a part of the step may take before the verdict names it; and how much longer than usual a shard may open.
NOTABLE, PAUSE = 0.05, 3


class Plan(NamedTuple):
    """All of one column. seconds: of a step, the loader's pace included; cost: dollars, failures included; exchanges:
    PPCL by the ring and with all texts gathered, whichever of them the step has."""

    gpus: int
    local: int
    model: Model
    cluster: Cluster
    speed_from: str
    memory: dict[str, float]
    step: Step
    seconds: float
    feed: Feed
    risk: Risk
    exchanges: dict[str, Pairs]
    verdict: list[str]

    @property
    def gathered(self) -> int:
        """Bytes of all texts and the sums of their gradients."""
        return gathered_bytes(self.local, self.model.dim, self.gpus)

    @property
    def per_gpu(self) -> float:
        """Samples/s of one GPU."""
        return self.local / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak, waits included."""
        return self.per_gpu * self.model.flops / self.cluster.peak

    @property
    def cost(self) -> float | None:
        """Dollars."""
        return None if self.cluster.price is None else self.cluster.price * self.gpus * self.risk.wall / HOUR


def make_plans(question: Question) -> list[Plan]:
    """One plan per number of GPUs."""
    speed, training = question.speed, question.training
    if training.model not in list_models():  # OpenCLIP's are trained as SigLIP is
        question = dataclasses.replace(question, training=dataclasses.replace(training, method="siglip"))
    run = None if speed.measured is None else read_measurement(speed.measured, speed.measured_gpus)
    return [make_plan(question, gpus, run) for gpus in training.gpus]


def make_plan(question: Question, gpus: int, run: Measurement | None) -> Plan:
    """The plan for this number of GPUs."""
    training = question.training
    local = training.global_batch_size // gpus
    model = count_of_run(training.model, training.method, local)
    cluster = build_cluster(question.machines, gpus)
    if training.precision == "fp32":  # products go in TF32, at half of bf16's peak on every kind of GPU here
        cluster = dataclasses.replace(cluster, peak=cluster.peak / 2)
    flops_rate, source = flops_per_second(question, model, cluster, run)
    step = step_times(model, training, cluster, flops_rate)
    fed = feed(local, step.seconds, cluster, question.supply)
    seconds = max(step.seconds, local / fed.limit)
    danger = risk(model, training, cluster, question.safety, seconds)
    plan = Plan(
        gpus, local, model, cluster, source, memory(model, training, gpus), step, seconds, fed, danger,
        {name: pairs(name, local, model.dim, cluster, training.block) for name in EXCHANGES}, [],
    )
    return plan._replace(verdict=judge(plan, question))


def flops_per_second(question: Question, model: Model, cluster: Cluster, run: Measurement | None) -> tuple[float, str]:
    """(FLOP/s of one GPU while it computes, where that comes from). FLOPs that are done twice are counted twice."""
    speed = question.speed
    twice = 1 + question.training.repeats / FORWARD_AND_BACKWARD
    if speed.rate is not None:
        return speed.rate * model.flops * twice, f"{speed.rate:g} samples/s of one GPU, given"
    if run is not None:
        flops = model.flops if run.flops is None else run.flops
        source = f"{run.samples_per_second:.4g} samples/s of one rank, measured over {run.lines} lines of {run.path}"
        if run.model not in (None, model.name):
            source += f" with {run.model}, {flops / 1e9:.3g} GFLOPs a sample; this model takes {model.flops / 1e9:.3g}"
        return run.samples_per_second * flops, source
    mfu = ASSUMED_MFU if speed.mfu is None else speed.mfu
    return mfu * cluster.peak, f"MFU {mfu:.0%} of {cluster.peak / 1e12:g} TFLOP/s" + (
        ", assumed" if speed.mfu is None else ", given"
    )


def judge(plan: Plan, question: Question) -> list[str]:
    """What limits this run, the worst first, then what to look out for; "computation" if nothing limits it."""
    supply, limits = question.supply, delays(plan)
    used, missing = sum(plan.memory.values()), missing_shards(plan.cluster, supply)
    if used > plan.cluster.memory:  # what cannot be has a weight that puts it first
        limits.append((3.0, f"memory: {used / 1e9:.0f} GB of {plan.cluster.memory / 1e9:.0f}: --accum-freq, "
                       "--grad-checkpointing, --fsdp, or more GPUs"))
    if missing:
        limits.append((2.0, f"shards: {missing:,} too few for {plan.feed.open_streams:,} streams: fewer "
                       "--workers, or smaller shards"))
    found = [text for _, text in sorted(limits, key=lambda item: -item[0])] or ["computation"]
    if plan.feed.keeps_up and plan.feed.bridged < PAUSE * supply.open_ms * 1e-3:
        found.append(f"a shard that takes {plan.feed.bridged * 1e3:.0f} ms to open stops the step: raise --prefetch")
    if question.training.method == "prolip":
        found += suggestions(plan)
    if plan.local % supply.workers:
        found.append(f"{plan.local} samples per GPU do not divide among {supply.workers} loader processes")
    if plan.local < SMALL_BATCH:
        found.append(f"{plan.local} samples per GPU: the towers will be slower than the MFU says")
    return found


def delays(plan: Plan) -> list[tuple[float, str]]:
    """What takes a notable share of the time, with that share."""
    step, seconds, found = plan.step, plan.seconds, []
    if not plan.feed.keeps_up:
        fed = plan.feed
        limits = {"decoding": fed.decoding, "the object store": fed.store, "reading shards": fed.streams}
        slowest = min(limits, key=lambda name: limits[name])
        found.append((1 - step.seconds / seconds, f"input: {slowest} gives {fed.limit:,.0f} of "
                      f"{fed.wanted:,.0f} samples/s/GPU"))
    parts = {
        EXCHANGES[step.pairs.exchange]: (step.pairs.seconds, why_pairs(plan)),
        "gradient exchange": (step.reduce_exposed, "not hidden behind the backward pass"),
        "optimiser": (step.optimiser, "the same for any batch"),
    }
    for name, (taken, why) in parts.items():
        if taken > NOTABLE * seconds:
            found.append((taken / seconds, f"{name}: {taken / seconds:.0%} of the step, {why}"))
    if plan.risk.share_lost > NOTABLE:
        found.append((plan.risk.share_lost, f"failures: {plan.risk.share_lost:.0%} of the time"))
    return found


def why_pairs(plan: Plan) -> str:
    """What takes the time of PPCL."""
    parts = plan.step.pairs
    if 2 * parts.exposed > parts.seconds:
        return "messages" if parts.exchange == "ring" else "an all-gather and a reduce-scatter that nothing hides"
    if parts.kernels * plan.cluster.launch > (1 - NOTABLE) * parts.scoring:
        return "kernels started for each of its blocks"
    return "pairs to score"


def suggestions(plan: Plan) -> list[str]:
    """That gathering texts would be worth its memory, where the ring takes a notable share of the step."""
    ring, gathered = plan.exchanges["ring"], plan.exchanges["gather"]
    if plan.step.pairs.exchange == "gather" or ring.seconds < NOTABLE * plan.seconds:
        return []
    if gathered.seconds > SAVING * ring.seconds or plan.gathered > ROOM * plan.cluster.memory:
        return []
    fits = plan.gathered <= GATHERED_BYTES
    remedy = "leave --exchange out" if fits else "raise prolip.losses.contrastive.GATHERED_BYTES"
    return [f"texts gathered would save {(ring.seconds - gathered.seconds) * 1e3:.0f} ms of the step and hold "
            f"{plan.gathered / 1e9:.2g} GB: {remedy}"]
