"""FLOPs of a model's passes, counted on the meta device without allocation; peaks of GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

FORWARD_AND_BACKWARD = 3  # the backward pass multiplies twice for each product of the forward pass
#: Dense bf16 peaks of data sheets, SXM form. docs/benchmarks/planner.md lists the sources.
PEAK_TFLOPS = {"A100": 312.0, "H100": 989.4, "H200": 989.4, "B200": 2250.0}


class EncoderPass(NamedTuple):
    """Rows through one encoder of a model. kind: image or text; keep: patches of each image, None for all."""

    kind: str
    rows: int
    keep: int | None = None


def peak_of(device_name: str) -> float | None:
    """Return the dense bf16 FLOP/s of a device by its CUDA name ("NVIDIA H100 80GB HBM3"); None if unknown."""
    known = [peak for name, peak in PEAK_TFLOPS.items() if name in device_name]
    return known[0] * 1e12 if known else None


def flops_per_sample(model: Any, passes: Iterable[EncoderPass], rows: int) -> float:
    """Return model FLOPs of one of `rows` samples in these passes, forward and backward, without recomputation."""
    with torch.device("meta"):
        twin = model.twin().requires_grad_(False)  # with the heads of its method
    return FORWARD_AND_BACKWARD * sum(forward_flops(twin, part.kind, part.keep) * (part.rows / rows) for part in passes)


@contextmanager
def without_data() -> Iterator[None]:
    """Make tensors on the meta device, and fake: transformers' towers read the values of any other mask."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"):
        yield


@contextmanager
def count_flops() -> Iterator[FlopCounterMode]:
    """Count FLOPs, multiply and add separately: `get_total_flops()` of the yielded counter."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # it counts 0 for fused kernels
        yield counter


def forward_flops(model: Any, kind: str, keep: int | None = None) -> int:
    """Return FLOPs of one row through a model's encoder on the meta device; its parameters require no gradients."""
    try:
        with without_data(), count_flops() as counter:
            if kind == "text":
                model.encode_text(torch.empty(1, model.context_length, dtype=torch.int64))
            else:
                kept = {} if keep is None else {"keep": torch.empty(1, keep, dtype=torch.int64)}
                model.encode_image(torch.empty(1, 3, *image_sides(model)), **kept)
    except DataDependentOutputException:
        which = f"cannot count the FLOPs of this {kind} tower, because its path depends on values"
        raise NotImplementedError(f"{which}: for towers of transformers, pip install 'transformers>=5'") from None
    return counter.get_total_flops()


def image_sides(model: Any) -> tuple[int, int]:
    """Return height and width of a model's images."""
    size = model.visual.image_size
    return (size, size) if isinstance(size, int) else (size[0], size[1])
