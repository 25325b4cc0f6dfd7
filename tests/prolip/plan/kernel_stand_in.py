"""PPCL by a GPU's path without a GPU, for tests that count what it starts and holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch

from prolip.losses import pairs

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="the module of the kernel imports Triton")


class StandIn:
    """In place of the Triton kernel: notes the shapes of what it gets and writes nothing, so results are worthless.

    starts: of each start the shapes of the arguments in their order, None for those that are no tensors.
    """

    def __init__(self) -> None:
        self.starts: list[list[torch.Size | None]] = []

    def __getitem__(self, tiles: tuple[int, ...]) -> StandIn:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self.starts.append([getattr(x, "shape", None) for x in arguments])


@contextmanager
def blocks_as_on_cuda() -> Iterator[StandIn]:
    """While entered, float32 blocks on the CPU go the way of those on CUDA, to a kernel that is only counted.

    Triton's interpreter would copy every tensor that a kernel gets, with operations of its own.
    """
    from prolip.losses import fused

    with patch.object(pairs, "FUSED_DEVICES", {"cpu"}), patch.object(fused, "_pairs_kernel", StandIn()) as kernel:
        yield kernel
