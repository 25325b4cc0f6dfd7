"""Time of the explorer to start and to answer on a large gallery, and its memory.

    python scripts/bench/use/explorer.py --items 1000000 --dim 64

The script builds an index of random Gaussians, starts `prolip explore` on it as a new process, and sends requests. It
prints wall-clock seconds, and the processor seconds over all cores since the start. Memory is that of the process: its
own (RssAnon), and the pages read from the mapped index (RssFile), which the system may drop.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import torch
import torch.nn.functional as F

from bench.common import held
from prolip.gaussian import Gaussian
from prolip.scores import CSDScore
from prolip.search.index import Part, SearchIndex

CHUNK = 65_536


def parts(items: int, dim: int) -> Iterator[Part]:
    """Yield random Gaussians in blocks."""
    for low in range(0, items, CHUNK):
        rows = min(CHUNK, items - low)
        g = torch.Generator().manual_seed(low)
        mean = F.normalize(torch.randn(rows, dim, generator=g), dim=1)
        log_var = (torch.randn(rows, 1, generator=g) - 6).expand(-1, dim).contiguous()
        yield Part([{"key": f"{row:08}"} for row in range(low, low + rows)], Gaussian(mean, log_var), low + rows)


def memory(process: int) -> str:
    """Format the MiB of a process: all, its own, and mapped files."""
    return " | ".join(f"{held(name, process) >> 20:,}" for name in ("VmRSS", "RssAnon", "RssFile"))


def cpu(process: int) -> float:
    """Return the processor seconds of a process, over all cores."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed(work: Callable[[], object]) -> float:
    """Return the wall-clock seconds of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ask(url: str, name: str, values: dict | None = None) -> dict:
    """Send one request of the page and return its answer."""
    data = None if values is None else json.dumps(values).encode()
    request = urllib.request.Request(f"{url}api/{name}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-explorer-") as folder:
        index = SearchIndex.create(f"{folder}/index", CSDScore(10.0, -5.0), args.dim)
        print(f"index built in {timed(lambda: index.append('random', parts(args.items, args.dim), CHUNK)):.0f} s")
        start = time.perf_counter()
        words = [sys.executable, "-m", "prolip", "explore", f"{folder}/index", "--port", "0"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ)
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split(" at ")[1].split()[0]
            print(f"{args.items:,} items x {args.dim}\n\n| | seconds | of CPUs | MiB | its own | mapped |")
            print("|---|---:|---:|---:|---:|---:|")
            taken = cpu(process.pid)
            passed = time.perf_counter() - start
            print(f"| ready, torch imported | {passed:.2f} | {taken:.2f} | {memory(process.pid)} |")
            requests = {
                "first map and uncertainties of all": ("map", None),
                "the map again": ("map", None),
                "both ends of uncertainty": ("uncertain", None),
                "nearest to an item": ("search", {"row": 7}),
                "nearest to another": ("search", {"row": 4321}),
                "side by side": ("compare", {"row": 7}),
                "columns for rules": ("columns", None),
                "a rule": ("rules", {"rules": ["wide: image_uncertainty > quantile(image_uncertainty, 0.9)"]}),
            }
            for name, (path, values) in requests.items():
                before = cpu(process.pid)
                seconds = timed(partial(ask, url, path, values))
                taken = cpu(process.pid) - before
                print(f"| {name} | {seconds:.2f} | {taken:.2f} | {memory(process.pid)} |", flush=True)
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
