"""GPUs by name, and a cluster of them as the formulas need it."""
from __future__ import annotations

from typing import NamedTuple

from planner.config import PlanConfig
from prolip.flops import PEAK_TFLOPS
from prolip.utils.flags import FlagError, did_you_mean

GB = 1e9
# Achievable share of a link's rate: assumed. docs/scaling.md gives the sources of the table.
LINK_SHARE = 0.8
# Seconds before a message moves within a node and between nodes: assumed.
INTRA_DELAY, INTER_DELAY = 10e-6, 20e-6


class GPU(NamedTuple):
    """Data sheet, SXM form: dense peaks in TFLOP/s, GB, GB/s (links one way), dollars per hour or None if not known."""

    peak_tflops: float
    fp32_tflops: float
    memory_gb: float
    memory_gbs: float
    intra_gbs: float
    inter_gbs: float
    price: float | None


GPUS = {
    "A100-40GB": GPU(PEAK_TFLOPS["A100"], 19.5, 40.0, 1555.0, LINK_SHARE * 300.0, LINK_SHARE * 25.0, 1.844),
    "A100-80GB": GPU(PEAK_TFLOPS["A100"], 19.5, 80.0, 2039.0, LINK_SHARE * 300.0, LINK_SHARE * 25.0, None),
    "H100": GPU(PEAK_TFLOPS["H100"], 67.0, 80.0, 3350.0, LINK_SHARE * 450.0, LINK_SHARE * 50.0, 4.916),
    "H200": GPU(PEAK_TFLOPS["H200"], 67.0, 141.0, 4800.0, LINK_SHARE * 450.0, LINK_SHARE * 50.0, 5.408),
    "B200": GPU(PEAK_TFLOPS["B200"], 75.0, 180.0, 8000.0, LINK_SHARE * 900.0, LINK_SHARE * 50.0, None),
}


class Cluster(NamedTuple):
    """W GPUs in nodes. Rates in FLOP/s and bytes/s, times in seconds.

    sheet: figures of a GPU, given ones in place of the data sheet's; link_rate, delay: of the slowest link of a ring
    over all GPUs; collective_rate: of that ring, NCCL's bus bandwidth; hops: seconds of one way round it; shards:
    parts that parameters, gradients and optimiser state are split into.
    """

    sheet: GPU
    gpus: int
    per_node: int
    nodes: int
    peak: float
    link_rate: float
    delay: float
    collective_rate: float
    hops: float
    shards: int


def build_cluster(config: PlanConfig, gpus: int) -> Cluster:
    """Build a cluster of so many GPUs; fewer than a node has are one node. FlagError for what fills no whole nodes."""
    if config.gpu not in GPUS:
        hint = f"{did_you_mean(config.gpu, GPUS, '')} There are {', '.join(GPUS)}".strip()
        raise FlagError(f"--gpu {config.gpu!r} is unknown: {hint}; another one is the nearest of these with "
                        "--peak-tflops, --memory-gb, --price, --intra-gbs and --inter-gbs")
    per_node = min(gpus, config.gpus_per_node)
    nodes, rest = divmod(gpus, per_node)
    if rest:
        near = f"{gpus - rest} or {gpus - rest + per_node}"
        raise FlagError(f"--gpus {gpus} fills no whole number of nodes of {per_node}: give {near}")
    given = {name: value for name in GPU._fields if (value := getattr(config, name, None)) is not None}
    sheet = GPUS[config.gpu]._replace(**given)
    faster = sheet.peak_tflops / GPUS[config.gpu].peak_tflops
    sheet = sheet._replace(inter_gbs=min(sheet.intra_gbs, sheet.inter_gbs), fp32_tflops=sheet.fp32_tflops * faster)
    link, delay = (sheet.intra_gbs, INTRA_DELAY) if nodes == 1 else (sheet.inter_gbs, INTER_DELAY)
    return Cluster(
        sheet, gpus, per_node, nodes,
        # products of fp32 towers go in TF32, at half of bf16's peak on every kind of GPU here
        peak=sheet.peak_tflops * 1e12 / (2 if config.precision == "fp32" else 1),
        link_rate=link * GB,
        delay=delay,
        collective_rate=min(sheet.intra_gbs, per_node * link) * GB,  # all links of a node carry it
        hops=((gpus - nodes) * config.intra_hop_us + (nodes - 1) * config.inter_hop_us) * 1e-6,
        shards=gpus if config.fsdp else 1,
    )
