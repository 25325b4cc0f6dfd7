"""The parts of `gpu.py`, each in a process of its own.

    python scripts/bench/gpu/gpu_parts.py PART --file F --work FOLDER --seconds S

A part writes each row to F at once, one JSON object per line, so a killed part leaves its rows. A missed speed target
is no failure. A wrong result fails the part after all its measurements.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import traceback
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_kit import ROOT, Kit
from gpu_loss import kernel, pairs
from gpu_runs import fsdp, run, waits
from gpu_speed import loader, step

REHEARSED = "keeps_the_digits"  # the one test of the kernel that a rehearsal runs, interpreted


def cuda_tests(folder: Path) -> list[str]:
    """Return the ids of tests that are skipped without CUDA, and the files whose tests all use CUDA if present."""
    found = []
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "torch.cuda" not in text:
            continue
        name, body = path.relative_to(ROOT).as_posix(), ast.parse(text).body
        if any(isinstance(node, ast.Assign) and "torch.cuda.is_available()" in ast.unparse(node) for node in body):
            found.append(name)
            continue
        for node in body:
            marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", [])]
            if any("skipif" in mark and "torch.cuda" in mark for mark in marks):
                found.append(f"{name}::{node.name}")  # type: ignore[attr-defined]
    return found


def tests(kit: Kit) -> None:
    """Run the tests that need or use CUDA with pytest."""
    chosen, report = cuda_tests(ROOT / "tests"), kit.folder / "junit.xml"
    kit.begin(f"pytest {' '.join(chosen)}")
    words = ["-p", "no:cacheprovider", "--timeout", "120", f"--junitxml={report}", *chosen]
    words += ["-k", REHEARSED] if kit.rehearse else []
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, timeout=max(1.0, kit.seconds - 5))
    if not report.exists():
        raise RuntimeError(f"pytest left no report, its exit status is {done.returncode}")
    cases = list(ET.parse(report).getroot().iter("testcase"))
    bad = [
        case.get("name", "?") for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = [
        (case.get("name", "?"), mark.get("message", "")) for case in cases if (mark := case.find("skipped")) is not None
    ]
    passed = len(cases) - len(bad) - len(skipped)
    kit.check("tests that failed", ", ".join(bad) or "none", f"none of {len(cases)}", done.returncode == 0 and not bad)
    kit.row("tests that passed", passed)
    for name, why in skipped:
        kit.row(f"skipped: {name}", why)
    if not passed:
        kit.wrong.append("no test ran")
    kit.settle()


PARTS: dict[str, Callable[[Kit], None]] = {
    "tests": tests,
    "kernel": kernel,
    "pairs": pairs,
    "step": step,
    "loader": loader,
    "run": run,
    "fsdp": fsdp,
    "waits": waits,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one part. Return 1 if it failed, with the first line of its error in the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--file", type=Path, required=True, help="file for the rows")
    parser.add_argument("--work", type=Path, required=True, help="folder for the files of the part")
    parser.add_argument("--seconds", type=float, required=True, help="time limit, seconds")
    parser.add_argument("--step-rate", type=float, help="speed of the training step, samples/s")
    parser.add_argument("--rehearse", action="store_true", help="run at a small size on the CPU")
    kit = Kit(parser.parse_args(arguments))
    try:
        PARTS[parser.parse_args(arguments).part](kit)
    except Exception as error:
        traceback.print_exc()
        kit.write({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
