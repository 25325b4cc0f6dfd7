"""python -m prolip.report runs/demo: write the run's report page."""
from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from prolip.report.page import make_report
from prolip.utils import console


def main(arguments: Sequence[str] | None = None) -> Path:
    """Write the page and say where it is."""
    parser = argparse.ArgumentParser("python -m prolip.report", description="One self-contained page about a run.")
    parser.add_argument("folder", help="a run folder, e.g. runs/demo")
    parser.add_argument("--eval", metavar="NAME", help="the evaluation's folder in it (default: eval)")
    parser.add_argument("--out", help="path of the page (default: report.html in the run folder)")
    parser.add_argument("--seed", type=int, default=0, help="of the random choice of examples (default: 0)")
    parser.add_argument("--title", help="title of the page")
    args = parser.parse_args(arguments)
    if args.eval and not (Path(args.folder) / args.eval / "metrics.json").is_file():
        parser.error(f"no evaluation {args.eval} in {args.folder}: python -m prolip.evaluation.corpus ... --out "
                     f"{Path(args.folder) / args.eval} writes one")  # fmt: skip
    try:
        page = make_report(args.folder, args.eval or "eval", args.out, args.seed, args.title)
    except (OSError, ValueError) as error:
        parser.error(console.one_line(error))
    print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)")
    return page


if __name__ == "__main__":
    console.command(main)
