"""Cost of communication: PPCL over ranks against SigLIP's exchange and no exchange, and a step on 1 and 2 ranks.

    python scripts/bench/train/ring.py                     two processes on this machine's CPU, one thread each
    python scripts/bench/train/ring.py --device cuda --ranks 2 --batch-size 4096

Loss, forward and backward in float32, from leaves to their gradients, per rank:
  ring          ours: text blocks of D + 1 numbers and their gradients circulate while pairs are scored
  gather        ours with all texts gathered at once, the choice on devices with enough memory
  bidirectional OpenCLIP's SigLipLoss, which sends texts of D numbers both ways
  no exchange   ours with the same computation, its messages replaced by buffers of this rank
Step: forward, loss, backward and AdamW of a whole model inside DDP, on all ranks at once, and on rank 0 alone while the
others wait. Scaling is the throughput of all ranks divided by that of one; N processes on N cores reach at most N.

Everything takes turns within the same processes (A B C A B C...). Times are medians, and ratios are medians of turns.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from open_clip.loss import SigLipLoss
from torch import Tensor

import prolip
from bench.common import spread
from prolip.gaussian import Gaussian
from prolip.losses import contrastive, exchanges, ppcl_over_ranks
from prolip.methods.base import Context
from prolip.methods.prolip import ProLIPConfig, ProLIPObjective
from training.parallel import keep_freed_memory

Step = Callable[[], None]


class Kept:
    """A transfer that sends nothing: this rank's own buffers arrive."""

    def __init__(self, group: object, sent: list[Tensor], *tags: int):
        self.sent = sent

    def wait(self) -> list[Tensor]:
        """Return this rank's own buffers."""
        return self.sent


@contextmanager
def no_exchange() -> Iterator[None]:
    """Run the ring without messages."""
    with patch.object(exchanges, "Transfer", Kept):
        yield


def build_losses(options: argparse.Namespace, rank: int, device: torch.device) -> dict[str, Step]:
    """Return name -> forward and backward pass of one loss on this rank's batch."""
    generator = torch.Generator().manual_seed(rank)

    def leaf() -> Gaussian:
        mean = F.normalize(torch.randn(options.batch_size, options.dim, generator=generator), dim=-1)
        log_var = torch.randn(options.batch_size, options.dim, generator=generator) * 0.1 - 7
        return Gaussian(mean.to(device).requires_grad_(), log_var.to(device).requires_grad_())

    image, text = leaf(), leaf()
    scale, bias = (torch.tensor(value, device=device, requires_grad=True) for value in (10.0, -10.0))
    peer = SigLipLoss(rank=rank, world_size=options.ranks, dist_impl="bidir")
    leaves = (*image, *text, scale, bias)

    def ours() -> None:
        ppcl_over_ranks(image, text, scale, bias, exchange="ring").backward()
        clear(leaves)

    def theirs() -> None:
        peer(image.mean, text.mean, scale, bias).backward()
        clear(leaves)

    def alone() -> None:
        with no_exchange():
            ours()

    def gathered() -> None:
        ppcl_over_ranks(image, text, scale, bias, exchange="gather").backward()
        clear(leaves)

    return {"ring": ours, "gather": gathered, "bidirectional": theirs, "no exchange": alone}


def clear(leaves: tuple[Tensor, ...]) -> None:
    """Drop the gradients."""
    for leaf in leaves:
        leaf.grad = None


def build_step(options: argparse.Namespace, rank: int, device: torch.device) -> tuple[Step, Step]:
    """Return (a step inside DDP, the same step without other ranks)."""
    torch.manual_seed(0)
    batch = {
        "image": torch.randn(options.step_batch_size, 3, 64, 64, device=device),
        "text": torch.randint(1, 1000, (options.step_batch_size, 32), device=device),
    }

    def make(ranks: int) -> Step:
        model = prolip.create_model(options.model, device=device, force_image_size=64, force_context_length=32)
        objective = ProLIPObjective(model, ProLIPConfig(), Context(rank=rank if ranks > 1 else 0, world_size=ranks)).to(
            device
        )
        network = torch.nn.parallel.DistributedDataParallel(objective, static_graph=True) if ranks > 1 else objective
        optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            context = nullcontext() if ranks > 1 else pretend_alone()
            with context, torch.autocast(device.type, dtype=torch.bfloat16):
                loss = network(objective.prepare(batch, 0))["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    return make(options.ranks), make(1)


@contextmanager
def pretend_alone() -> Iterator[None]:
    """Compute losses as on a single rank, in spite of the process group."""
    honest, contrastive.world_size = contrastive.world_size, lambda group=None: 1
    try:
        yield
    finally:
        contrastive.world_size = honest


def seconds(step: Step, device: torch.device) -> float:
    """Return the seconds of one call that all ranks begin together, until the device has finished."""
    dist.barrier()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure_losses(options: argparse.Namespace, rank: int, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of each loss in each turn, on the slowest rank."""
    steps = build_losses(options, rank, device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.rounds + 3):
        for name, step in steps.items():
            taken = torch.tensor(seconds(step, device))
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if turn >= 3:
                times[name].append(taken.item())
    return times


def measure_scaling(options: argparse.Namespace, rank: int, device: torch.device) -> list[float]:
    """Return the throughput of all ranks over that of rank 0 alone, in each turn."""
    together, alone = build_step(options, rank, device)
    ratios = []
    for turn in range(options.rounds + 2):
        all_ranks = torch.tensor(seconds(together, device))
        dist.all_reduce(all_ranks, op=dist.ReduceOp.MAX)
        one = seconds(alone if rank == 0 else lambda: None, device)
        if turn >= 2:
            ratios.append(options.ranks * one / all_ranks.item())
    return ratios


def work(rank: int, options: argparse.Namespace, port: int) -> None:
    """Measure on one rank; rank 0 prints."""
    torch.set_num_threads(options.threads)
    if options.device == "cpu":
        keep_freed_memory()  # as training.main does
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=options.ranks)
    times = measure_losses(options, rank, device)
    scaling = measure_scaling(options, rank, device)
    if rank == 0:
        report(options, times, scaling)
    dist.destroy_process_group()


def report(options: argparse.Namespace, times: dict[str, list[float]], scaling: list[float]) -> None:
    """Print the table of the losses, then the scaling of a step."""
    print(
        f"loss: {options.ranks} ranks, local batch {options.batch_size}, D={options.dim}, float32, {options.device}, "
        f"{options.threads} threads each, torch {torch.__version__}\n"
    )
    print("| loss | ms | ring / this |\n|---|---:|---:|")
    for name, values in times.items():
        ratios = [ours / other for ours, other in zip(times["ring"], values)]
        print(f"| {name} | {statistics.median(values) * 1e3:.2f} | {spread(ratios)} |")
    print(
        f"\nstep of {options.model} at 64 pixels, local batch {options.step_batch_size}: {options.ranks} ranks have "
        f"{spread(scaling)} times the throughput of one"
    )


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=512, help="local batch of the loss (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--model", default="ProLIP-ViT-S-16")
    parser.add_argument("--step-batch-size", type=int, default=64, help="batch of a step (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error(f"--ranks {options.ranks}: give 2 or more")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # forked ranks of a CPU import nothing again; CUDA cannot be forked
    start = "spawn" if options.device == "cuda" else "fork"
    mp.start_processes(work, (options, port), options.ranks, start_method=start)


if __name__ == "__main__":
    main()
