"""Compile the Triton kernel of PPCL for GPUs that are not there, and print what each binary takes, a line of JSON each.

Run by itself, as tests interpret Triton's kernels: `python tests/rehearsal/kernel_binaries.py`. Arguments are those
that `sum_block` gives the kernel for the shapes of training, so the binaries are those that a GPU would be given.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from prolip.losses import fused
from prolip.losses.positives import Positives

#: A100, H100 and H200, B200.
ARCHITECTURES = (80, 90, 100)
#: Rows, columns, diagonal, ids of a row, and a flag for gradients.
SHAPES: dict[str, tuple[int, int, int | None, int, bool]] = {
    "gathered, known matches": (512, 16_384, 1_024, 5, True),
    "ring, others' texts": (512, 512, None, 0, True),
    "odd": (509, 4_093, 7, 3, True),
    "without gradients": (512, 16_384, 0, 0, False),
}
#: Where not all are compiled: less of the kernel is in these.
FEWER = {"without gradients": (90,), "ring, others' texts": (80, 90)}
DUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


class Target:
    """Replacement of Triton's GPU driver: it only names the target to compile for."""

    def __init__(self, architecture: int):
        self.architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture  # the key that Triton keeps compiled kernels under

    def get_current_stream(self, device: int) -> int:
        return 0


class Noting:
    """Replacement of the kernel: records the arguments of its starts."""

    def __init__(self) -> None:
        self.starts: list[tuple[tuple[int, ...], tuple, dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.starts.append((grid, arguments, options))


def starts() -> dict[str, tuple[tuple[int, ...], tuple, dict[str, Any]]]:
    """Return the arguments with which `sum_block` starts the kernel, by the name of the shape."""
    noting, width = Noting(), 8
    with patch.object(fused, "_pairs_kernel", noting), patch.object(torch.cuda, "device_of", lambda x: nullcontext()):
        for rows, columns, diagonal, ids, wanted in SHAPES.values():
            known = (torch.zeros(rows, ids, dtype=torch.int64), torch.zeros(columns, dtype=torch.int64)) if ids else ()
            sides = torch.zeros(rows, width), torch.zeros(columns, width), torch.zeros(rows), torch.zeros(columns)
            fused.sum_block(*sides, Positives(diagonal, *known), 1 / rows, wanted)
    return dict(zip(SHAPES, noting.starts))


def usage(grid: tuple[int, ...], arguments: tuple, options: dict[str, Any]) -> dict[str, int]:
    """Registers and local bytes (spills, arrays) of a thread, shared bytes of a program, threads of a program."""
    kernel: Any = fused._pairs_kernel
    compiled = kernel.warmup(*arguments, grid=grid, **options)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        words = [str(DUMP), "--dump-resource-usage", str(binary)]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    registers, stack, fixed, local = map(int, USAGE.search(said).groups())  # type: ignore[union-attr]
    return {
        "registers": registers,
        "local": stack + local,
        "shared": fixed + compiled.metadata.shared,
        "threads": 32 * compiled.metadata.num_warps,
        "bytes": len(compiled.asm["cubin"]),
    }


def main() -> int:
    started = starts()
    for architecture in ARCHITECTURES:
        driver.set_active(Target(architecture))
        for name, start in started.items():
            if architecture not in FEWER.get(name, ARCHITECTURES):
                continue
            print(json.dumps({"architecture": architecture, "shape": name} | usage(*start)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
