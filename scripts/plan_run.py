"""What a training run will take: time, cost, memory, traffic, input and failures, for several numbers of GPUs.

    python scripts/plan_run.py --model ProLIP-ViT-B-16 --gpu H100 --gpus 8 32 --global-batch 16384 --samples 1.28e9
    python scripts/plan_run.py --measured runs/first --gpu H100

docs/scaling.md explains the tables and what is assumed. scripts/simulate_steps.py plays the steps of a plan through.
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
from prolip.utils.flags import Parser, add_flags, build  # noqa: E402
from prolip.utils.outputs import check_output, replacing  # noqa: E402

VERDICT = "verdict"
MOVED = dict.fromkeys(
    ("simulate", "sim-steps", "rank-sigma", "step-sigma", "block-sigma", "image-sigma", "open-sigma", "stall-chance",
     "stall-seconds", "seed"),
    "python scripts/simulate_steps.py simulates, with the flags of a plan and its own; its --help lists them",
)  # fmt: skip


def build_parser() -> Parser:
    """Every question as a flag."""
    about = "Plan a training run before it is started; see docs/scaling.md."
    parser = Parser(MOVED, prog="plan_run.py", description=about)
    parser.add_argument("--show", nargs="+", choices=[*tables.SECTIONS, VERDICT], metavar="TABLE",
                        help="only these: " + ", ".join([*tables.SECTIONS, VERDICT]))
    parser.add_argument("--json", metavar="FILE", help="write all figures there as well: seconds, bytes, dollars")
    for section, config in question.SECTIONS.items():
        add_flags(parser, section, config)
    return parser


def ask(given: dict[str, Any]) -> question.Question:
    """The question that the flags make."""
    return question.Question(**{n: build(kind, n, settings(given, n)) for n, kind in question.SECTIONS.items()})


def settings(given: dict[str, Any], section: str) -> dict[str, Any]:
    """Field -> value of the flags of one section."""
    prefix = f"{section}."
    return {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}


def plan(given: dict[str, Any]) -> None:
    """Print the tables."""
    if given["json"]:
        check_output(given["json"])
    plans = make_plans(ask(given))
    print(tables.heading(plans))
    for name in given["show"] or [*tables.SECTIONS, VERDICT]:
        text = tables.verdicts(plans) if name == VERDICT else tables.table(name, plans)
        print("\n" + text)
    if given["json"]:
        values = json.dumps([tables.as_values(p) for p in plans], indent=2)
        with replacing(Path(given["json"])) as temporary:
            temporary.write_text(values + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """0, or 2 after `error: ...`."""
    try:
        plan(vars(build_parser().parse_strictly(sys.argv[1:] if arguments is None else arguments)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    console.command(main)
