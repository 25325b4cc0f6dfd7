"""Time and peak memory of our PPCL against direct B x B x D computations and OpenCLIP's SigLIP loss.

    PYTHONPATH=src OMP_NUM_THREADS=1 python scripts/bench/train/loss.py --batches 128 256 512 --large 4096 8192

Each measurement is one forward and backward pass in float32, from leaves (means and, if the loss has them, log
variances) to their gradients.

The ratio depends on the direct computation, so there are two. "differences" forms all differences of means and all sums
of variances, B x B x D each, as in the equation of the distance. "variances" has a matrix product for the means and
B x B x D sums for the variances only; claims refer to it.

Time: the losses take turns within one process (A B A B...), so that other load affects all of them alike. Times are
medians, and ratios are medians of the ratios within a turn.

Memory: a new process for each number, which counts everything above the inputs, with the gradients. "allocated" is the
peak of torch's CPU allocator, from the memory events of torch.profiler. It is exact and repeatable, but omits the
workspace of the BLAS. "resident" is the growth of the process (VmHWM after the pass, reset before it), with the BLAS,
in a pass without profiler. On CUDA both are the caching allocator's peak.

Last comes the tiled loss, which accepts any score, here with the sigmoid loss of all similarities: elk, which does not
factor, over csd, at the same tile. It holds some matrices of all pairs; ours, printed next to it, does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import torch
import torch.nn.functional as F
from open_clip.loss import SigLipLoss
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.common import forget_peak, held
from prolip.gaussian import Gaussian
from prolip.losses import pairs, ppcl, tiled_loss_over_ranks
from prolip.measures import pairwise_csd_similarity, pairwise_elk

SCALE, BIAS, LOG_VAR = 10.0, -10.0, -7.0
MIB = 2**20


class Inputs:
    """A batch of images and texts, scale and bias: leaves that require gradients."""

    def __init__(self, batch: int, dim: int, device: str):
        generator = torch.Generator().manual_seed(0)

        def gaussian() -> Gaussian:
            mean = F.normalize(torch.randn(batch, dim, generator=generator), dim=-1)
            log_var = torch.randn(batch, dim, generator=generator) * 0.1 + LOG_VAR
            return Gaussian(mean.to(device).requires_grad_(), log_var.to(device).requires_grad_())

        self.image, self.text = gaussian(), gaussian()
        self.scale = torch.tensor(SCALE, device=device, requires_grad=True)
        self.bias = torch.tensor(BIAS, device=device, requires_grad=True)

    def clear(self) -> None:
        """Drop the gradients."""
        for x in (*self.image, *self.text, self.scale, self.bias):
            x.grad = None


def ours(x: Inputs) -> Tensor:
    """Compute our loss in row blocks, with gradients in the forward pass."""
    return ppcl(x.image, x.text, x.scale, x.bias)


def plain(x: Inputs) -> Tensor:
    """Compute our loss without the Triton kernel."""
    devices, pairs.FUSED_DEVICES = pairs.FUSED_DEVICES, frozenset()
    try:
        return ours(x)
    finally:
        pairs.FUSED_DEVICES = devices


def differences(x: Inputs) -> Tensor:
    """Compute the distance from B x B x D differences of means and B x B x D sums of variances."""
    distance = (x.image.mean[:, None] - x.text.mean[None]).square().sum(-1) + summed_variances(x)
    return sigmoid_loss(x.scale * (1 - distance / 2) + x.bias)


def variances(x: Inputs) -> Tensor:
    """Compute the similarity from a matrix product of means and B x B x D sums of variances."""
    return sigmoid_loss(x.scale * (x.image.mean @ x.text.mean.T - summed_variances(x) / 2) + x.bias)


def summed_variances(x: Inputs) -> Tensor:
    return (x.image.log_var.exp()[:, None] + x.text.log_var.exp()[None]).sum(-1)


def sigmoid_loss(logits: Tensor) -> Tensor:
    labels = 2 * torch.eye(len(logits), device=logits.device) - 1
    return -F.logsigmoid(labels * logits).sum() / len(logits)


def siglip(x: Inputs) -> Tensor:
    """Compute OpenCLIP's sigmoid loss on the means; it has no variances."""
    return SigLipLoss()(x.image.mean, x.text.mean, x.scale, x.bias)


def tiled(score: Callable[[Gaussian, Gaussian], Tensor], x: Inputs) -> Tensor:
    """Compute the sigmoid loss of a score, tile by tile."""
    return tiled_loss_over_ranks(
        score, x.image, x.text, lambda similarity, _: sigmoid_loss(x.scale * similarity + x.bias), (x.scale, x.bias)
    )


LOSSES: dict[str, Callable[[Inputs], Tensor]] = {
    "ours": ours,
    "plain": plain,
    "siglip": siglip,
    "variances": variances,
    "differences": differences,
    "tiled csd": partial(tiled, pairwise_csd_similarity),
    "tiled elk": partial(tiled, lambda p, q: -pairwise_elk(p, q)),
}
DIRECT = ("variances", "differences")


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(name: str, inputs: Inputs, device: str) -> float:
    """Return the wall-clock seconds of one forward and backward pass."""
    inputs.clear()
    synchronise(device)
    start = time.perf_counter()
    LOSSES[name](inputs).backward()
    synchronise(device)
    return time.perf_counter() - start


def take_turns(names: list[str], turns: int, inputs: Inputs, device: str) -> dict[str, list[float]]:
    """Return `turns` times of every loss, after one uncounted turn; the order is reversed every other turn."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-1, turns):
        for name in names if turn % 2 else reversed(names):
            taken = seconds(name, inputs, device)
            if turn >= 0:
                times[name].append(taken)
    return times


def median_ratio(numerator: list[float], denominator: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerator, denominator))


def allocated(name: str, inputs: Inputs) -> int:
    """Return the peak bytes of torch's CPU allocator during a pass, above the inputs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        LOSSES[name](inputs).backward()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((e["args"]["Ev Idx"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    if not peak:
        raise RuntimeError("torch.profiler reported no memory events. Try another torch version")
    return peak


def resident(name: str, inputs: Inputs) -> int | None:
    """Return the growth of the peak resident set during a pass; None if the system does not report it (not Linux)."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    before = forget_peak()
    LOSSES[name](inputs).backward()
    return held() - before


def peak_memory(how: str, name: str, batch: int, dim: int, device: str) -> int | None:
    """Measure a pass in this new process, after one small pass that loads the libraries."""
    LOSSES[name](Inputs(8, dim, device)).backward()
    inputs = Inputs(batch, dim, device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        LOSSES[name](inputs).backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    return {"allocated": allocated, "resident": resident}[how](name, inputs)


def in_child(how: str, name: str, batch: int, dim: int, args: argparse.Namespace) -> int | None:
    """Call `peak_memory` in a new process."""
    command = [sys.executable, __file__, "--measure", how, name, str(batch)]
    command += ["--dim", str(dim), "--device", args.device, "--threads", str(args.threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"memory of {name} at B={batch} was not measured:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def in_mib(value: int | None) -> str:
    return f"{value / MIB:.1f}" if value is not None else "n/a"


def ratio(a: int | None, b: int | None) -> str:
    return f"{a / b:.2f}" if a is not None and b else "n/a"


def header(title: str, columns: list[str]) -> None:
    print(f"\n{title}\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def time_table(args: argparse.Namespace) -> None:
    """Print milliseconds of each loss: many turns of ours against SigLIP's, few of the slow direct ones."""
    header("Time, ms", ["B", "ours", "SigLIP", *DIRECT, "ours / SigLIP", *(f"{name} / ours" for name in DIRECT)])
    for batch in args.batches:
        inputs = Inputs(batch, args.dim, args.device)
        fast = take_turns(["ours", "siglip"], args.turns, inputs, args.device)
        slow = take_turns(["ours", *DIRECT], args.direct_turns, inputs, args.device)
        medians = [1e3 * statistics.median(x) for x in (*fast.values(), *(slow[name] for name in DIRECT))]
        ratios = [median_ratio(slow[name], slow["ours"]) for name in DIRECT]
        row(
            batch,
            *(f"{x:.2f}" for x in medians),
            f"{median_ratio(fast['ours'], fast['siglip']):.2f}",
            *(f"{x:.1f}" for x in ratios),
        )


def kernel_table(args: argparse.Namespace) -> None:
    """Print milliseconds with and without the Triton kernel, which is for devices, at all batches."""
    header("Time, ms", ["B", "ours", "without the kernel", "without / ours"])
    for batch in (*args.batches, *args.large):
        times = take_turns(["ours", "plain"], args.turns, Inputs(batch, args.dim, args.device), args.device)
        medians = [f"{1e3 * statistics.median(x):.2f}" for x in times.values()]
        row(batch, *medians, f"{median_ratio(times['plain'], times['ours']):.2f}")


def memory_tables(args: argparse.Namespace) -> None:
    """Print MiB of each loss; large batches omit the direct ones, which need too much memory."""
    columns = ["B", "ours", "SigLIP", *DIRECT, "ours / SigLIP", *(f"{name} / ours" for name in DIRECT)]
    for how in ("allocated", "resident"):
        header(f"Peak memory above the inputs, MiB, {how}", [*columns, "ours / ours in the row above"])
        last = None
        for batch in (*args.batches, *args.large):
            mine, peer = (in_child(how, name, batch, args.dim, args) for name in ("ours", "siglip"))
            slow = [in_child(how, name, batch, args.dim, args) if batch in args.batches else None for name in DIRECT]
            row(
                batch,
                *(in_mib(x) for x in (mine, peer, *slow)),
                ratio(mine, peer),
                *(ratio(x, mine) for x in slow),
                ratio(mine, last),
            )
            last = mine


def tiled_table(args: argparse.Namespace) -> None:
    """Print MiB and seconds of the tiled loss by score, next to PPCL."""
    batch, dim = args.tiled
    names = ("tiled csd", "tiled elk", "ours")
    header(f"Tiled loss, B={batch}, D={dim}", ["", *names, "tiled elk / tiled csd"])
    # A trace of elk's million operations would itself take the memory that "allocated" measures.
    peaks = [in_child("resident", name, batch, dim, args) for name in names]
    row("peak memory above the inputs, MiB, resident", *(in_mib(x) for x in peaks), ratio(peaks[1], peaks[0]))
    times = take_turns(list(names), 1, Inputs(batch, dim, args.device), args.device)
    row("s", *(f"{times[name][0]:.2f}" for name in names), f"{median_ratio(times[names[1]], times[names[0]]):.1f}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="*", default=[128, 256, 512], help="time and memory of all")
    parser.add_argument("--large", type=int, nargs="*", default=[4096, 8192], help="memory of ours and SigLIP only")
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--tiled", type=int, nargs=2, default=(2048, 512), metavar=("B", "D"), help="tiled loss: size")
    parser.add_argument("--turns", type=int, default=30, help="turns of ours and SigLIP")
    parser.add_argument("--direct-turns", type=int, default=5, help="turns of ours and the direct losses")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--measure", nargs=3, metavar=("HOW", "LOSS", "B"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    if args.measure:
        how, name, batch = args.measure
        print(json.dumps(peak_memory(how, name, int(batch), args.dim, args.device)))
        return
    print(
        f"PPCL, forward and backward, D={args.dim}, float32, {args.device}, "
        f"{args.threads} threads, torch {torch.__version__}"
    )
    time_table(args)
    if args.device in pairs.FUSED_DEVICES:
        kernel_table(args)
    memory_tables(args)
    tiled_table(args)


if __name__ == "__main__":
    main()
