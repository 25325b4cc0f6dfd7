"""Run the tests of arithmetic with the kernels of other CPUs: `make test-numerics`.

    python scripts/dev/numerics.py               every setting that this CPU has, one after the other
    python scripts/dev/numerics.py --list        only list these settings, and the unsupported ones

MKL, oneDNN and PyTorch choose their kernels by the CPU, and each kernel sums in an order of its own, so a tolerance can
hold on one machine and fail on another. The script limits them to the kernels of older CPUs. It prints pytest's last
line for each setting, and the full output of failures. Exit code 0 if all passed.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TESTS = [
    "tests/prolip/measures",
    "tests/prolip/losses",
    "tests/prolip/core/test_gaussian.py",
    "tests/prolip/models/test_towers.py",
    "tests/prolip/models/test_model.py",
    "tests/prolip/models/test_released.py",
    "tests/prolip/methods/test_base.py",
    "tests/prolip/evaluation/metrics/test_ranking.py",
    "tests/prolip/evaluation/metrics/test_streaming.py",
]


class Kernels(NamedTuple):
    """A kind of CPU: the flags it needs in /proc/cpuinfo, and the variables that limit each library to it."""

    needs: frozenset[str]
    variables: dict[str, str]
    capability: str


def held(mkl: str, onednn: str, openblas: str) -> dict[str, str]:
    """Return the variables of the libraries under PyTorch, and under NumPy, which computes the expected values."""
    return {"MKL_CBWR": mkl, "ONEDNN_MAX_CPU_ISA": onednn, "OPENBLAS_CORETYPE": openblas}


KERNELS = {
    "SSE": Kernels(frozenset(), held("COMPATIBLE", "SSE41", "Nehalem"), "default"),
    "AVX2": Kernels(frozenset({"avx2", "fma"}), held("AVX2", "AVX2", "Haswell"), "avx2"),
    "AVX-512": Kernels(
        frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}), held("AVX512", "AVX512_CORE", "SkylakeX"), "avx512"
    ),
}


def cpu_flags(cpuinfo: str) -> set[str]:
    """Return the flags of the first processor in /proc/cpuinfo; none if they are not listed (ARM)."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return next((set(value.split()) for key, _, value in lines if key.strip() == "flags"), set())


def settings(flags: set[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield name and environment of every setting: one thread without PyTorch's vector kernels, two threads with."""
    for name, kernels in KERNELS.items():
        if kernels.needs <= flags:
            for threads, capability in (("1", "default"), ("2", kernels.capability)):
                plural = "" if threads == "1" else "s"
                counts = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
                variables = {**kernels.variables, **counts, "ATEN_CPU_CAPABILITY": capability}
                yield f"{name}, {threads} thread{plural}, ATen {capability}", variables


def run(name: str, variables: dict[str, str], tests: list[str]) -> bool:
    """Run the tests under one setting. Print its line, and pytest's full output if a test failed."""
    command = [sys.executable, "-m", "pytest", *tests]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        print(done.stdout, flush=True)
    closing = (done.stdout.strip().splitlines() or ["pytest wrote nothing"])[-1]
    print(f"{name}: {closing}", flush=True)
    return done.returncode == 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--list", action="store_true", help="list the settings and run nothing")
    parser.add_argument("tests", nargs="*", help="files or tests for pytest (default: those of arithmetic)")
    options = parser.parse_args(arguments)
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpu_flags(cpuinfo.read_text(encoding="utf-8")) if cpuinfo.exists() else set()
    for name, kernels in KERNELS.items():
        if missing := sorted(kernels.needs - flags):
            print(f"{name}: skipped, this CPU ({platform.machine()}) has no {', '.join(missing)}", flush=True)
    passed = True
    for name, variables in settings(flags):
        if options.list:
            print(name, *(f"{key}={value}" for key, value in variables.items()))
        else:
            passed = run(name, variables, options.tests or TESTS) and passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
