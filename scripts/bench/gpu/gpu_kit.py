"""Helpers for the parts of `gpu.py`: write rows and compare results with targets."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "scripts", "slurm")]

import torch


class WrongResultError(AssertionError):
    """A computed result is wrong."""


class Kit:
    """Arguments of a part, and the file for its rows. device: cuda, or cpu in a rehearsal; folder: the part's own."""

    def __init__(self, args: argparse.Namespace):
        self.rehearse, self.seconds, self.step_rate = args.rehearse, args.seconds, args.step_rate
        self.folder, self.file = args.work, args.file
        self.device = torch.device("cpu") if args.rehearse else torch.device("cuda", 0)
        self.wrong: list[str] = []
        self.folder.mkdir(parents=True, exist_ok=True)

    def begin(self, what: str) -> None:
        """Print the next step."""
        print(f"--- {time.strftime('%H:%M:%S')} {what}", flush=True)

    def write(self, values: dict[str, Any]) -> None:
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        print("   ", *values.values(), flush=True)

    def row(self, what: str, figure: object) -> None:
        """Record a value without a target."""
        self.write({"what": what, "figure": str(figure)})

    def speed(
        self, what: str, value: float, figure: str, least: float | None = None, most: float | None = None
    ) -> None:
        """Record a value with a speed target, which a rehearsal does not judge."""
        target = f">= {least:g}" if most is None else f"<= {most:g}"
        met = value >= least if least is not None else value <= (most or 0.0)
        self.write({"what": what, "figure": figure, "target": target, "met": None if self.rehearse else met})

    def check(self, what: str, figure: object, target: str, met: bool) -> None:
        """Record a result that is right or wrong."""
        self.write({"what": what, "figure": str(figure), "target": target, "met": met})
        if not met:
            self.wrong.append(f"{what}: {figure}, expected {target}")

    def settle(self) -> None:
        """Raise WrongResultError if any result was wrong."""
        if self.wrong:
            raise WrongResultError("; ".join(self.wrong))


def synchronise(kit: Kit) -> None:
    if kit.device.type == "cuda":
        torch.cuda.synchronize()
