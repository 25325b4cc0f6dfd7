"""`prolip report`: a run's page."""

from __future__ import annotations

import argparse

from prolip.cli.command import Compute, Output, command, flag, shared


@command(
    "prolip report runs/demo",
    flag("run", metavar="RUN", help="folder of a run"),
    flag("--eval", metavar="NAME", help="folder of the evaluation in the run (default: eval)"),
    flag("--title", help="title of the page"),
    shared(Compute, "seed", help={"seed": "seed of the choice of examples"}),
    shared(Output, "output", help={"output": "path of the page; report.html in the run's folder if left out"}),
)
def write_report(args: argparse.Namespace) -> None:
    """Write one self-contained page about a run."""
    from prolip.corpora.emoji.report.page import make_report

    page = make_report(args.run, args.eval, args.output, args.seed, args.title)
    print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)")


COMMANDS = {"report": {"": write_report}}
