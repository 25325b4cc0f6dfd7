"""GPUs by name, and a cluster of them as the formulas need it."""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from planner.question import Machines
from prolip.flops import PEAK_TFLOPS
from prolip.utils.flags import FlagError, did_you_mean

GB = 1e9
# Achievable share of a link's rate: assumed. docs/scaling.md gives the sources of the table.
LINK_SHARE = 0.8


class GPU(NamedTuple):
    """Data sheet, SXM form: dense peaks in TFLOP/s, GB, GB/s (links one way), dollars per hour or None if not known."""

    bf16: float
    fp32: float
    memory: float
    memory_gbs: float
    nvlink: float
    network: float
    price: float | None


GPUS = {
    "A100-40GB": GPU(PEAK_TFLOPS["A100"], 19.5, 40.0, 1555.0, 300.0, 25.0, 1.844),
    "A100-80GB": GPU(PEAK_TFLOPS["A100"], 19.5, 80.0, 2039.0, 300.0, 25.0, None),
    "H100": GPU(PEAK_TFLOPS["H100"], 67.0, 80.0, 3350.0, 450.0, 50.0, 4.916),
    "H200": GPU(PEAK_TFLOPS["H200"], 67.0, 141.0, 4800.0, 450.0, 50.0, 5.408),
    "B200": GPU(PEAK_TFLOPS["B200"], 75.0, 180.0, 8000.0, 900.0, 50.0, None),
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """W GPUs in nodes. Rates in FLOP/s and bytes/s, times in seconds."""

    gpu: str
    gpus: int
    per_node: int
    peak: float
    fp32: float
    memory: float
    memory_rate: float
    intra_rate: float
    inter_rate: float
    intra_delay: float
    inter_delay: float
    intra_hop: float
    inter_hop: float
    launch: float
    block_kernels: int
    price: float | None

    @property
    def nodes(self) -> int:
        """Nodes in use."""
        return self.gpus // self.per_node

    @property
    def collective_rate(self) -> float:
        """Bytes/s of a ring over all GPUs, NCCL's bus bandwidth: between nodes all links of a node carry it."""
        return self.intra_rate if self.nodes == 1 else min(self.intra_rate, self.per_node * self.inter_rate)


def build_cluster(machines: Machines, gpus: int) -> Cluster:
    """The data sheet's figures with what was given in their place; fewer GPUs than a node has are one node."""
    if machines.gpu not in GPUS:
        hint = f"{did_you_mean(machines.gpu, GPUS, '')} There are {', '.join(GPUS)}".strip()
        raise FlagError(f"--gpu {machines.gpu!r} is unknown: {hint}; another one is the nearest of these with "
                        "--peak-tflops, --memory-gb, --price, --intra-gbs and --inter-gbs")  # fmt: skip
    per_node = min(gpus, machines.gpus_per_node)
    if gpus % per_node:
        low = gpus // per_node * per_node
        raise FlagError(f"--gpus {gpus} fills no whole number of nodes of {per_node}: give {low} or {low + per_node}")
    sheet = GPUS[machines.gpu]
    peak = sheet.bf16 if machines.peak_tflops is None else machines.peak_tflops
    intra = LINK_SHARE * sheet.nvlink if machines.intra_gbs is None else machines.intra_gbs
    inter = LINK_SHARE * sheet.network if machines.inter_gbs is None else machines.inter_gbs
    return Cluster(
        gpu=machines.gpu,
        gpus=gpus,
        per_node=per_node,
        peak=peak * 1e12,
        fp32=sheet.fp32 * 1e12 * peak / sheet.bf16,
        memory=(sheet.memory if machines.memory_gb is None else machines.memory_gb) * GB,
        memory_rate=sheet.memory_gbs * GB,
        intra_rate=intra * GB,
        inter_rate=inter * GB,
        intra_delay=machines.intra_us * 1e-6,
        inter_delay=machines.inter_us * 1e-6,
        intra_hop=machines.intra_hop_us * 1e-6,
        inter_hop=machines.inter_hop_us * 1e-6,
        launch=machines.launch_us * 1e-6,
        block_kernels=machines.block_kernels,
        price=sheet.price if machines.price is None else machines.price,
    )
