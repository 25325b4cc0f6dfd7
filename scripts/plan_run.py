"""What a training run will take: time, cost, memory, traffic, input and failures, for several numbers of GPUs.

    python scripts/plan_run.py --model ProLIP-ViT-B-16 --gpu H100 --gpus 8 32 --global-batch 16384 --samples 1.28e9
    python scripts/plan_run.py --gpus 4096 --global-batch 65536 --simulate
    python scripts/plan_run.py --measured runs/first --gpu H100

docs/scaling.md explains the tables: which are formulas, which a simulation, and what is assumed.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT / "src") not in sys.path:
    sys.path.insert(0, str(ROOT / "src"))

from planner import question, tables  # noqa: E402
from planner.plan import make_plans  # noqa: E402
from prolip.utils import console  # noqa: E402
from prolip.utils.outputs import check_output, replacing  # noqa: E402
from prolip.utils.flags import Parser, add_flags, build  # noqa: E402

VERDICT = "verdict"


def build_parser() -> Parser:
    """Every question as a flag."""
    parser = Parser(prog="plan_run.py", description="Plan a training run before it is started; see docs/scaling.md.")
    parser.add_argument("--show", nargs="+", choices=[*tables.SECTIONS, VERDICT], metavar="TABLE",
                        help="only these: " + ", ".join([*tables.SECTIONS, VERDICT]))
    parser.add_argument("--simulate", action="store_true", help="play steps through, PPCL and loader event by event")
    parser.add_argument("--json", metavar="FILE", help="write all figures there as well: seconds, bytes, dollars")
    for section, config in question.SECTIONS.items():
        add_flags(parser, section, config)
    return parser


def ask(given: dict[str, Any]) -> question.Question:
    """The question that the flags make."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in question.SECTIONS}
    for destination, value in given.items():
        section, dot, name = destination.partition(".")
        if dot:
            sections[section][name] = value
    return question.Question(**{n: build(kind, n, sections[n]) for n, kind in question.SECTIONS.items()})


def plan(given: dict[str, Any]) -> None:
    """Print the tables."""
    simulate = given["simulate"] or "simulation" in (given["show"] or ())
    every = [name for name in (*tables.SECTIONS, VERDICT) if simulate or name != "simulation"]
    if given["json"]:
        check_output(given["json"])
    plans = make_plans(ask(given), simulate)
    print(tables.heading(plans))
    for name in given["show"] or every:
        text = tables.verdicts(plans) if name == VERDICT else tables.table(name, plans)
        print("\n" + text)
    if given["json"]:
        values = json.dumps([tables.as_values(p) for p in plans], indent=2)
        with replacing(Path(given["json"])) as temporary:
            temporary.write_text(values + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """0, or 2 after `error: ...`."""
    try:
        plan(build_parser().parse_strictly(sys.argv[1:] if arguments is None else arguments))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    console.command(main)
