"""Plans as tables that can be read on a terminal and pasted into a page, and as plain values for JSON."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from planner.question import HOUR, MINUTE

if TYPE_CHECKING:
    from planner.plan import Plan

#: What stands in the first column, and how a plan's cell is shown.
Row = tuple[str, Callable[[Any], str]]


def size(value: float) -> str:
    """Bytes with three digits and a unit."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}" if value < 999.5 * factor else f"{value / factor:.0f} {unit}"
    return f"{value:.0f} B"


def span(seconds: float) -> str:
    """A duration with three digits and a unit."""
    if not seconds:
        return "0 s"
    for unit, factor in (("d", 24 * HOUR), ("h", HOUR), ("min", MINUTE), ("s", 1.0)):
        if seconds >= 2 * factor or (unit == "s" and seconds >= 1):
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def number(value: float) -> str:
    """Whole from 100 on, three digits below, millions and billions in words."""
    for unit, factor in (("billion", 1e9), ("million", 1e6)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


#: The rows of each table; above those of `memory` stands one for each kind of bytes.
SECTIONS: dict[str, list[Row]] = {
    "time": [
        ("samples per GPU", lambda p: f"{p.local}"),
        ("step", lambda p: span(p.seconds)),
        ("samples/s", lambda p: number(p.per_gpu * p.gpus)),
        ("samples/s/GPU", lambda p: number(p.per_gpu)),
        ("MFU with waits", lambda p: f"{p.mfu:.1%}"),
        ("run, with failures", lambda p: span(p.risk.wall)),
        ("GPU-hours", lambda p: number(p.risk.wall / HOUR * p.gpus)),
        ("cost", lambda p: "give --price" if p.cost is None else f"${number(p.cost)}"),
    ],
    "memory": [
        ("sum", lambda p: size(sum(p.memory.values()))),
        ("share of the GPU's", lambda p: f"{sum(p.memory.values()) / p.cluster.memory:.0%}"),
    ],
    "traffic": [
        ("texts come by", lambda p: p.step.pairs.exchange if p.gpus > 1 else "-"),
        ("messages or collectives", lambda p: f"{p.step.pairs.messages:,}"),
        ("bytes sent in one", lambda p: size(p.step.pairs.text_bytes)),
        ("bytes sent in all", lambda p: size(p.step.pairs.sent)),
        ("one message or collective", lambda p: span(p.step.pairs.message_seconds)),
        ("kernels started", lambda p: f"{p.step.pairs.kernels:,}"),
        ("scoring pairs", lambda p: span(p.step.pairs.scoring)),
        ("PPCL", lambda p: span(p.step.pairs.seconds)),
        ("of it waiting for messages", lambda p: span(p.step.pairs.exposed)),
        ("PPCL by the ring", lambda p: span(p.exchanges["ring"].seconds)),
        ("PPCL with texts gathered", lambda p: span(p.exchanges["gather"].seconds)),
        ("gathered texts and sums", lambda p: size(p.gathered)),
        ("gradients sent", lambda p: size(p.step.reduce_bytes)),
        ("gradient exchange", lambda p: span(p.step.reduce)),
        ("of it not hidden", lambda p: span(p.step.reduce_exposed)),
    ],
    "input": [
        ("wanted samples/s/GPU", lambda p: number(p.feed.wanted)),
        ("decoding gives", lambda p: f"{p.feed.decoding:,.0f}"),
        ("the object store gives", lambda p: f"{p.feed.store:,.0f}"),
        ("reading shards gives", lambda p: f"{p.feed.streams:,.0f}"),
        ("cores needed per GPU", lambda p: f"{p.feed.cores_needed:.1f}"),
        ("shards opened per second", lambda p: f"{p.feed.shards_per_second:.3g}"),
        ("read per second", lambda p: size(p.feed.bytes_per_second)),
        ("shards open", lambda p: f"{p.feed.open_streams:,}"),
        ("pause that prefetch bridges", lambda p: span(p.feed.bridged)),
        ("keeps up", lambda p: "yes" if p.feed.keeps_up else "no"),
    ],
    "failures": [
        ("between failures", lambda p: span(p.risk.between_failures)),
        ("failures in the run", lambda p: f"{p.risk.failures:.2g}"),
        ("checkpoint", lambda p: size(p.risk.checkpoint)),
        ("step stands still for", lambda p: span(p.risk.stop)),
        ("written in", lambda p: span(p.risk.write)),
        ("best interval (Daly)", lambda p: span(p.risk.best)),
        ("interval taken", lambda p: span(p.risk.every)),
        ("in samples", lambda p: number(p.risk.every * p.per_gpu * p.gpus)),
        ("work lost per failure", lambda p: span(p.risk.lost)),
        ("time lost in the run", lambda p: f"{p.risk.share_lost:.2%}"),
    ],
}


def column(plan: Plan) -> str:
    """What stands above the column of a plan."""
    return f"{plan.gpus:,} GPU{'s' * (plan.gpus > 1)}"


def table(title: str, plans: Sequence[Plan]) -> str:
    """The table of this title, one column per plan."""
    cells = [[title, *map(column, plans)]]
    if title == "memory":  # One GPU alone has no shards, so its kinds of bytes are others than those of several.
        kinds = dict.fromkeys(kind for p in plans for kind, value in p.memory.items() if value)
        cells += [[kind, *(size(p.memory[kind]) if p.memory.get(kind) else "-" for p in plans)] for kind in kinds]
    cells += [[name, *(show(p) for p in plans)] for name, show in SECTIONS[title]]
    return align(cells)


def align(cells: Sequence[Sequence[str]]) -> str:
    """A pipe table; the first column to the left, the others to the right."""
    first, *others = (max(map(len, column)) for column in zip(*cells))
    rows = [[row[0].ljust(first), *(text.rjust(width) for text, width in zip(row[1:], others))] for row in cells]
    rows.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in others)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def heading(plans: Sequence[Plan]) -> str:
    """What the tables are about, in one line, and where the speed comes from in another."""
    plan = max(plans, key=lambda p: p.cluster.per_node)
    model = plan.model
    parts = ", ".join(f"{part.name} {part.flops * part.share / 1e9:.1f}" for part in model.passes)
    return (
        f"{model.name}: {model.parameters:,} parameters, {model.flops / 1e9:.1f} GFLOPs a sample "
        f"(forward: {parts})\n{plan.cluster.gpu}, {plan.cluster.per_node} to a node: {plan.speed_from}"
    )


def verdicts(plans: Sequence[Plan]) -> str:
    """One line per plan: what limits it."""
    return "\n".join(f"{column(p)}: {'; '.join(p.verdict)}" for p in plans)


def as_values(plan: Plan) -> dict[str, Any]:
    """Plain types: seconds, bytes, dollars."""
    return {
        "gpus": plan.gpus,
        "samples_per_gpu": plan.local,
        "model": plan.model.name,
        "parameters": plan.model.parameters,
        "flops_per_sample": plan.model.flops,
        "speed_from": plan.speed_from,
        "step_seconds": plan.seconds,
        "samples_per_second": plan.per_gpu * plan.gpus,
        "mfu": plan.mfu,
        "cost": plan.cost,
        "memory": plan.memory,
        "pairs": plan.step.pairs._asdict() | {"sent": plan.step.pairs.sent},
        "gradients": {
            "bytes": plan.step.reduce_bytes,
            "seconds": plan.step.reduce,
            "exposed": plan.step.reduce_exposed,
        },
        "exchanges": {name: pairs.seconds for name, pairs in plan.exchanges.items()},
        "gathered_bytes": plan.gathered,
        "input": plan.feed._asdict() | {"keeps_up": plan.feed.keeps_up},
        "failures": plan.risk._asdict(),
        "verdict": plan.verdict,
    }
