"""`prolip plan`, `prolip demo`, `prolip report`: the estimate of a run, a demo run, and the page of a run."""

from __future__ import annotations

import argparse
import json
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location

from prolip.cli.command import Compute, Output, command, file_of_clone, flag, output, shared
from prolip.plan.config import TABLES, PlanConfig, read_flags
from prolip.utils.flags import add_flags

VERDICT = "verdict"
SHOWN = [*TABLES, VERDICT]


@command(
    "plan",
    "--model ProLIP-ViT-B-16 --gpu H100 --gpus 8 32 --show time memory verdict",
    flag("--show", f"tables to show: {', '.join(SHOWN)}", nargs="+", choices=SHOWN, metavar="TABLE"),
    shared(Output, "json", help={"json": "print the tables as JSON (seconds, bytes, dollars)"}),
    partial(add_flags, section="plan", config=PlanConfig),
    more="docs/benchmarks/planner.md explains the tables and the assumptions.",
)
def plan(args: argparse.Namespace) -> None:
    """Estimate time, cost, memory, traffic, input, phases and failures of a training run."""
    from prolip.plan.plan import judge, make_plan
    from prolip.plan.tables import column, table

    config = read_flags(vars(args))
    plans = {column(gpus): make_plan(config, gpus) for gpus in config.gpus}
    if args.json:
        values = [each.tables | {VERDICT: judge(each, config), "gpus": each.gpus} for each in plans.values()]
        print(json.dumps(values, indent=2))
        return
    shown = {name: table(name, {title: each.tables[name] for title, each in plans.items()}) for name in TABLES}
    shown[VERDICT] = "\n".join(f"{title}: {judge(each, config)}" for title, each in plans.items())
    largest = max(plans.values(), key=lambda each: each.cluster.per_node)
    print(largest.heading, *(shown[name] for name in args.show or shown), sep="\n\n")


@command(
    "demo",
    "--recipe paper",
    flag(
        "--recipe",
        "demo (ten minutes on two cores), paper (its loss) or full",
        choices=("demo", "paper", "full"),
        default="demo",
    ),
    output("folder of all runs", "overwrite", required=False, output="runs"),
    flag("more", "flags of prolip train: -- --max-steps 200", nargs="*", metavar="-- FLAGS"),
    more="The same command resumes an interrupted run, and redraws the page of a finished one.",
)
def demo(args: argparse.Namespace) -> int:
    """Train on the bundled drawings, evaluate on an unseen designer, and write the page of the run."""
    remedy = "the demo needs the bundled drawings: run prolip demo in a clone of the repository"
    spec = spec_from_file_location("demo", file_of_clone("scripts/demo.py", remedy))
    assert spec and spec.loader
    spec.loader.exec_module(module := module_from_spec(spec))
    return module.run(args.recipe, args.output, args.overwrite, args.more)


@command(
    "report",
    "runs/demo",
    flag("run", "folder of a run", metavar="RUN"),
    flag("--eval", "folder of the evaluation in the run (default: eval)", metavar="NAME"),
    flag("--title", "title of the page"),
    shared(Compute, "seed", help={"seed": "seed of the selection of examples"}),
    output("path of the page; default: report.html in the run's folder", required=False),
)
def write_report(args: argparse.Namespace) -> None:
    """Write one self-contained page about a run."""
    from prolip.corpora.emoji.report.page import make_report

    page = make_report(args.run, args.eval, args.output, args.seed, args.title)
    print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)")
