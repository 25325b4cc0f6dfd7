"""docs/benchmarks/planner.md and docs/guides/scaling.md show what the planner and the simulation print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from prolip.cli.main import main
from studies.scaling import simulate_steps

ROOT = Path(__file__).parents[3]

PAGE = (ROOT / "docs" / "benchmarks" / "planner.md").read_text()
BLOCK = re.compile(
    r"```bash\n((?:prolip plan|python scripts/studies/scaling/simulate_steps\.py) (?:[^\n]*\\\n)*[^\n]+)\n```"
    r"\n\n```text\n(.*?)```",
    re.DOTALL,
)
EXAMPLES = [(re.sub(r"\\\n +", "", command), shown) for command, shown in BLOCK.findall(PAGE)]
GUIDE = BLOCK.findall((ROOT / "docs" / "guides" / "scaling.md").read_text())
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
# Random numbers and exp differ in the last places between processors; formulas may differ by a rounding.
TOLERANCE = {True: 0.03, False: 0.006}
POINTS = 0.25


def plan(words):
    return main(["plan", *words])


def differences(shown, printed, tolerance):
    """Lines that differ in words, or in a number by more than the tolerance (percentages: by points as well)."""
    found = []
    for old, new in zip(shown.splitlines(), printed.splitlines()):
        same = re.sub(r"[ -]+", " ", NUMBER.sub("#", old)) == re.sub(r"[ -]+", " ", NUMBER.sub("#", new))
        numbers = [[float(word.replace(",", "")) for word in NUMBER.findall(line)] for line in (old, new)]
        slack = POINTS if "%" in old else 0.0
        if not same or any(abs(a - b) > tolerance * abs(a) + slack for a, b in zip(*numbers)):
            found.append(f"- {old}\n+ {new}")
    return found


def test_every_command_on_the_page_has_its_output():
    for name in ("prolip plan ", "python scripts/studies/scaling/simulate_steps.py "):
        shown = PAGE.count(name) - PAGE.count(f"`{name}")
        assert sum(name in command for command, _ in EXAMPLES) == shown > 3, name
    for count in ("8 GPUs", "32 GPUs", "256 GPUs", "1,024 GPUs"):
        for table in ("time", "memory", "traffic", "input", "simulation", "failures"):
            assert any(re.search(rf"\| {table} .*{count}", output) for _, output in EXAMPLES), (table, count)
    assert sum("| phases " in output and " 32 GPUs | 4,096 GPUs" in output for _, output in EXAMPLES) == 2


def example(command, shown):
    """Return a test parameter; thousands of ranks, event by event, take seconds."""
    words = re.split(r"plan |\.py ", command)[1]
    return pytest.param(command, shown, id=words, marks=[pytest.mark.slow] if "--gpus 4096 --global" in words else [])


@pytest.mark.parametrize("command, shown", [example(*found) for found in EXAMPLES])
def test_the_page_shows_what_the_command_prints(capsys, command, shown):
    words = shlex.split(command)[1:]
    run = simulate_steps.main if words.pop(0) == "scripts/studies/scaling/simulate_steps.py" else plan
    assert run(words) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == len(shown.splitlines())
    assert not differences(shown, printed, TOLERANCE["simulate_steps" in command]), (
        "the page is stale: run its commands again and paste what they print"
    )


@pytest.mark.parametrize("command, shown", GUIDE)
def test_the_guide_shows_the_last_lines_that_the_command_prints(capsys, command, shown):
    assert plan(shlex.split(command)[2:]) == 0
    last = shown.removeprefix("...\n")
    printed = "\n".join(capsys.readouterr().out.splitlines()[-len(last.splitlines()) :])
    assert last != shown and not differences(last, printed, TOLERANCE[False])
