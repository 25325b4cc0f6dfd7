"""Time of a training step by the way OpenMP's threads wait for each other, alone and next to busy processes.

    python scripts/bench/use/threads.py                                     ProLIP-ViT-test, batch 32
    python scripts/bench/use/threads.py --model ProLIP-ViT-S-16 --batch-size 32 --steps 1 --busy 0 2 8

The setting must precede the import of torch, so each way is a process of its own. The processes take turns of --steps
steps (A B C D A B C D...), while `--busy` others spin; ratios are medians of the ratios within a turn. With
--real-time no other process gets a core during a turn, as on a quiet machine (as root, for some seconds).

default     the C library's default: waiting threads spin for some milliseconds before they sleep
passive     OMP_WAIT_POLICY=passive: waiting threads sleep at once
spin 1000   GOMP_SPINCOUNT=1000: they check a thousand times, some microseconds, then sleep; spin 10000 alike
one thread  OMP_NUM_THREADS=1: no thread waits
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

WAYS = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spin 1000": {"GOMP_SPINCOUNT": "1000"},
    "spin 10000": {"GOMP_SPINCOUNT": "10000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def serve(options: argparse.Namespace) -> None:
    """Run steps in this process: for each number read from a line, print a line with the seconds of that many steps."""
    import torch

    import prolip
    from bench.train.step import make_batch, make_step, seconds
    from prolip.methods.prolip import ProLIPConfig, ProLIPObjective
    from training.parallel import keep_freed_memory

    if options.real_time:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # inherited by threads started later
    keep_freed_memory()  # as training.main does
    torch.manual_seed(0)
    device = torch.device("cpu")
    objective = ProLIPObjective(prolip.create_model(options.model), ProLIPConfig())
    batch = make_batch(options, device)
    step = make_step(objective, lambda number: objective(objective.prepare(batch, number))["loss"], options, device)
    print(torch.get_num_threads(), flush=True)
    for _ in sys.stdin:
        print(sum(seconds(step, device, options.clock) for _ in range(options.steps)), flush=True)


def children(options: argparse.Namespace) -> dict[str, subprocess.Popen]:
    """Start the process of each way, ready for its first turn."""
    words = [sys.executable, __file__, "--serve", *sys.argv[1:]]
    clean = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    found = {
        name: subprocess.Popen(words, env=clean | way, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name, way in WAYS.items()
        if name in ("default", *options.ways)
    }
    threads = {name: line_of(child) for name, child in found.items()}
    print(
        f"{options.model}, batch {options.batch_size}, {options.precision}, turns of {options.steps} steps, "
        f"{os.cpu_count()} cores, threads: {threads['default']}\n"
    )
    return found


def line_of(child: subprocess.Popen, sent: str = "") -> str:
    """Send a text to a process and return the next line that it prints."""
    assert child.stdin is not None and child.stdout is not None  # both are pipes
    child.stdin.write(sent)
    child.stdin.flush()
    return child.stdout.readline().strip()


def measure(found: dict[str, subprocess.Popen], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every turn of every way, after one uncounted turn."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(rounds + 1):
        for name, child in found.items():
            taken = float(line_of(child, "\n"))
            if turn:
                times[name].append(taken)
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ProLIP-ViT-test")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="fp32")
    parser.add_argument("--steps", type=int, default=10, help="steps per turn (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="number of counted turns (default: %(default)s)")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2], help="numbers of spinning processes")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--real-time", action="store_true", help="give the steps real-time priority")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        from time import perf_counter

        options.clock = perf_counter
        serve(options)
        return
    found = children(options)
    print("| next to | way | ms a step | best turn | ratio to default |\n|---|---|---:|---:|---:|")
    for busy in options.busy:
        spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
        times = measure(found, options.rounds)
        for process in spinning:
            process.kill()
            process.wait()
        for name, values in times.items():
            low, middle, high = statistics.quantiles([a / b for a, b in zip(values, times["default"])], n=4)
            usual, best = (1e3 * x / options.steps for x in (statistics.median(values), min(values)))
            ratio = f"{middle:.3f} ({low:.3f} to {high:.3f})"
            print(f"| {busy} busy processes | {name} | {usual:.1f} | {best:.1f} | {ratio} |", flush=True)
    for child in found.values():
        child.communicate()


if __name__ == "__main__":
    main()
