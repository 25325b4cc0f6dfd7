"""GPUs by name, and a cluster of them as the formulas need it."""

from __future__ import annotations

import math
from typing import NamedTuple

from prolip.flops import PEAK_TFLOPS
from prolip.plan.config import PlanConfig
from prolip.utils.flags import FlagError

GB = 1e9
# Achievable share of a link's rate: assumed. docs/scaling.md gives the sources of the table.
LINK_SHARE = 0.8
# Seconds before a message moves within a node and between nodes: assumed.
INTRA_DELAY, INTER_DELAY = 10e-6, 20e-6
# Seconds per hop of an all-gather within a node and between nodes: NCCL's own figures, of its slowest protocol.
INTRA_HOP, INTER_HOP = 3.4e-6, 14e-6


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
    """W GPUs in nodes. Rates in FLOP/s and bytes/s, times in seconds."""

    sheet: GPU  # with given figures in place of the data sheet's
    gpus: int
    per_node: int
    nodes: int
    peak: float
    link_rate: float  # of the slowest link of a ring over all GPUs
    delay: float  # of that link
    collective_rate: float  # of that ring, NCCL's bus bandwidth
    hops: float  # one way round it
    tree: float  # before a tree over all GPUs moves
    store_rate: float  # of each node while all of them read
    shards: int  # parts that parameters, gradients and optimiser state are split into


def build_cluster(config: PlanConfig, gpus: int) -> Cluster:
    """Build a cluster of so many GPUs; fewer than a node has are one node. FlagError for what fills no whole nodes."""
    per_node = min(gpus, config.gpus_per_node)
    nodes, rest = divmod(gpus, per_node)
    if rest:
        raise FlagError(f"--gpus {gpus} fills no whole number of nodes of {per_node}: give {gpus - rest + per_node}")
    given = {name: value for name in GPU._fields if (value := getattr(config, name, None)) is not None}
    sheet = GPUS[config.gpu]._replace(**given)
    link, delay = (sheet.intra_gbs, INTRA_DELAY) if nodes == 1 else (sheet.inter_gbs, INTER_DELAY)
    return Cluster(
        sheet,
        gpus,
        per_node,
        nodes,
        # products of fp32 towers go in TF32, at half of bf16's peak on every kind of GPU here
        peak=sheet.peak_tflops * 1e12 / (2 if config.precision == "fp32" else 1),
        link_rate=link * GB,
        delay=delay,
        collective_rate=min(sheet.intra_gbs, per_node * link) * GB,  # all links of a node carry it
        hops=(gpus - nodes) * INTRA_HOP + (nodes - 1) * INTER_HOP,
        tree=math.log2(nodes) * INTER_DELAY + math.log2(per_node) * INTRA_DELAY,
        store_rate=min(config.store_gbs, config.store_total_gbs / nodes) * GB,
        shards=gpus if config.fsdp else 1,
    )
