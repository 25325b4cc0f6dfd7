"""First checks on a GPU, in at most 15 minutes: tests, kernel, speed, loader, a killed run, FSDP2, waits.

    make gpu                                                   all parts; writes docs/benchmarks/gpu.md
    .venv/bin/python scripts/bench/gpu/gpu.py --only kernel pairs --minutes 4
    .venv/bin/python scripts/bench/gpu/gpu.py --rehearse           every part, small, on the CPU: no measurement

Each part runs in a process of its own (`gpu_parts.py`) and may use its share of the remaining minutes. A part that
fails or runs out of time becomes a row with the first line of its error; the others still run. A log next to the page
holds the output of all parts, with tracebacks. --only takes the other parts' results from earlier calls on the same
device, versions and commit, if the checkout has no uncommitted changes.

Exit codes: 0 all parts ended (a speed target may be missed), 1 a part failed, 2 wrong use, 3 no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "src"))
from prolip.utils.outputs import check_output, replacing

PAGE = ROOT / "docs" / "benchmarks" / "gpu.md"
PARTS_SCRIPT = Path(__file__).with_name("gpu_parts.py")
NO_GPU, FAILED = 3, 1
REHEARSAL = "a rehearsal on a CPU: no measurement"
#: Seconds of the limit that are reserved for ending parts and writing the page.
RESERVE = 10


class Part(NamedTuple):
    """A part of the checks. title: its heading; weight: its share of the remaining time among the remaining parts."""

    title: str
    weight: int


PARTS = {
    "tests": Part("CUDA tests", 110),
    "kernel": Part("The Triton kernel against eager", 60),
    "pairs": Part("PPCL of 65,536 pairs", 80),
    "step": Part("A training step", 300),
    "loader": Part("Feeding by the loader", 60),
    "run": Part("A run that is killed and resumed", 130),
    "fsdp": Part("FSDP2 on one rank", 60),
    "waits": Part("Waits of the host in a step", 70),
}
PROBE = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
import torch
found = {"python": sys.version.split()[0], "torch": torch.__version__, "CUDA of torch": str(torch.version.cuda)}
for name in ("triton", "open_clip_torch", "timm"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        found[name] = "not installed"
if torch.cuda.is_available():
    one = torch.cuda.get_device_properties(0)
    found["device"] = f"{one.name}, {one.total_memory / 2**30:.1f} GiB, {one.multi_processor_count} SMs"
    found["devices seen"] = torch.cuda.device_count()
print(json.dumps(found))
"""


# --- where it runs ----------------------------------------------------------------------------------------------------
def output_of(*words: str) -> str | None:
    """Return the stripped output of a program, or None if it is missing, fails or takes a minute."""
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def environment(rehearse: bool) -> dict[str, str]:
    """Return the environment of the parts. A rehearsal hides the GPU and interprets the kernel."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"} if rehearse else {}
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"} | hidden


def probe(rehearse: bool, commit: str | None = None) -> dict[str, str]:
    """Return device, driver, versions and commit, or only `error` if torch cannot be imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment(rehearse), cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    found = {name: str(value) for name, value in json.loads(done.stdout.splitlines()[-1]).items()}
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if commit is None:
        changed = output_of(
            "git", "status", "--porcelain", "--untracked-files=no", "--", ".", f":!{PAGE.relative_to(ROOT)}"
        )
        commit = output_of("git", "rev-parse", "HEAD") or "unknown: git cannot find it"
        commit += ", with changes" if changed else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        **{name: found.pop(name) for name in ("device", "devices seen") if name in found},
        "driver": (driver or "unknown").splitlines()[0],
        "commit": commit,
        **found,
        "cores": str(cores),
    }


def no_gpu(found: Mapping[str, str]) -> str:
    """Return one line that says what was found and what to type."""
    if "error" in found:
        return f"no GPU: {sys.executable} cannot import torch ({found['error']}): type make gpu, which installs it"
    listed = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return (
        f"no GPU: torch {found['torch']} (built for CUDA: {found['CUDA of torch']}) finds no device, and nvidia-smi "
        f"{'finds ' + ', '.join(listed.splitlines()) if listed else 'none either'}: type make gpu on a machine with "
        "an H100 or H200, or scripts/bench/gpu/gpu.py --rehearse here"
    )


# --- one part ---------------------------------------------------------------------------------------------------------
def copy_lines(pipe: Any, log: Any) -> None:
    """Copy a part's output to this output and to the log, line by line."""
    for line in pipe:
        for file in (sys.stdout, log):
            file.write(line)
            file.flush()


def end_group(process: subprocess.Popen) -> None:
    """Kill a part and all processes that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.wait()


def read_rows(file: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return (rows, facts) of a part, without a line truncated by a kill."""
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if "what" in said:
            rows.append(said)
        else:
            facts |= said
    return rows, facts


def run_part(name: str, args: argparse.Namespace, seconds: float, log: Any, more: Sequence[str]) -> dict[str, Any]:
    """Run one part for at most `seconds`. Return its rows, facts, seconds, and error (None if it succeeded)."""
    file = args.work / f"{name}.jsonl"
    words = [name, "--file", file, "--work", args.work / name, "--seconds", f"{seconds:.0f}", *more]
    command = [sys.executable, str(PARTS_SCRIPT), *map(str, words)]
    start, late = time.monotonic(), False
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(args.rehearse),
        start_new_session=True,
        encoding="utf-8",
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    reader = threading.Thread(target=copy_lines, args=(process.stdout, log), daemon=True)
    reader.start()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        end_group(process)
    reader.join(5)
    rows, facts = read_rows(file)
    error = facts.pop("error", None)
    if late:
        error = f"ran past its share of {seconds:.0f} s"
    elif error is None and process.returncode:
        code = process.returncode
        error = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
    return {"rows": rows, "facts": facts, "seconds": time.monotonic() - start, "error": error}


def run_parts(args: argparse.Namespace, where: Mapping[str, str], log: Any) -> dict[str, dict[str, Any]]:
    """Run the chosen parts, each within its share of time. After a stop signal, return the results so far."""
    results = earlier(args, where)
    try:
        for number, name in enumerate(args.only):
            weights = [PARTS[part].weight for part in args.only[number:]]
            seconds = max(0.0, args.end - time.monotonic()) * weights[0] / sum(weights)
            print(f"\n=== {name}: {PARTS[name].title}, at most {seconds:.0f} s", flush=True)
            if seconds < 1:
                results[name] = {"rows": [], "facts": {}, "seconds": 0.0, "error": "no time was left for it"}
                continue
            rate = results.get("step", {}).get("facts", {}).get("samples_per_second")
            more = [*(["--rehearse"] if args.rehearse else []), *(["--step-rate", rate] if rate else [])]
            results[name] = run_part(name, args, seconds, log, [str(word) for word in more])
            with replacing(args.work / f"{name}.json") as temporary:
                temporary.write_text(json.dumps({"where": where, **results[name]}), encoding="utf-8")
            print(f"=== {name}: {results[name]['error'] or 'ended'} after {results[name]['seconds']:.0f} s", flush=True)
    except KeyboardInterrupt:
        for name in args.only:
            rows, facts = read_rows(args.work / f"{name}.jsonl")
            results.setdefault(name, {"rows": rows, "facts": facts, "seconds": 0.0, "error": "stopped before it ended"})
    return {name: results[name] for name in PARTS if name in results}


def earlier(args: argparse.Namespace, where: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return earlier results of the other parts from the same place; none if the checkout has changes."""
    found: dict[str, dict[str, Any]] = {}
    if "with changes" in where["commit"] or "unknown" in where["commit"]:
        return found
    for name in PARTS.keys() - set(args.only):
        file = args.work / f"{name}.json"
        if file.exists():
            result = json.loads(file.read_text(encoding="utf-8"))
            if result.pop("where") == where:
                found[name] = result
    return found


# --- the page ---------------------------------------------------------------------------------------------------------
def cell(text: object) -> str:
    """Format text for a table cell: on one line, with Markdown's characters escaped."""
    return re.sub(r"\s+", " ", str(text)).strip().replace("<", "&lt;").replace("|", "\\|")


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Format a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(map(cell, line)) + " |" for line in lines] + [""]


def verdict(row: Mapping[str, Any], rehearse: bool) -> str:
    """Return whether a row met its target, in words."""
    if not row.get("target"):
        return ""
    if row.get("met") is None:
        return "no measurement" if rehearse else "not known"
    return "met" if row["met"] else "not met"


def page_of(args: argparse.Namespace, where: Mapping[str, str], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page: where it ran, all targets, then each part with its command."""
    lines = ["# The first GPU", ""]
    if args.rehearse:
        lines += [f"**This is {REHEARSAL}.**", ""]
    lines += [f"Written on {time.strftime('%Y-%m-%d')} by `{command_of(args)}`.", ""]
    lines += table(["", ""], list(where.items()))
    lines += ["## Targets", ""]
    wanted = [
        [name, row["what"], row["figure"], row["target"], verdict(row, args.rehearse)]
        for name, result in results.items()
        for row in result["rows"]
        if row.get("target")
    ]
    lines += table(["part", "what", "figure", "target", ""], wanted)
    failed = [[name, result["error"]] for name, result in results.items() if result["error"]]
    if failed:
        lines += [
            "## Failed",
            "",
            f"Whole tracebacks are in `{args.output.with_suffix('.log').name}` next to this page.",
            "",
        ]
        lines += table(["part", "error"], failed)
    for name, result in results.items():
        lines += [f"## {PARTS[name].title}", "", "```bash", command_of(args, name), "```", ""]
        rows = [
            [row["what"], row["figure"], row.get("target", ""), verdict(row, args.rehearse)] for row in result["rows"]
        ]
        if result["error"]:
            rows.append(["FAILED", result["error"], "", ""])
        lines += table(["what", "figure", "target", ""], rows) + [f"{result['seconds']:.0f} s.", ""]
    missing = [name for name in PARTS if name not in results]
    if missing:
        lines += [f"Not run: {', '.join(missing)}.", ""]
    return "\n".join(lines)


def command_of(args: argparse.Namespace, part: str | None = None) -> str:
    """Return the command for the page, or for one part of it."""
    chosen = [part] if part else args.only if len(args.only) < len(PARTS) else []
    only = ["--only", *chosen] if chosen else []
    minutes = [] if args.minutes == 15 else ["--minutes", f"{args.minutes:g}"]
    rehearse = ["--rehearse"] if args.rehearse else []
    return " ".join([".venv/bin/python scripts/bench/gpu/gpu.py", *rehearse, *only, *minutes])


# --- the command ------------------------------------------------------------------------------------------------------
def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--minutes", type=float, default=15, help="time limit, minutes (default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="run every part at a small size on the CPU")
    parser.add_argument("--commit", help="commit of the checkout, if git cannot find it")
    parser.add_argument(
        "--output",
        type=Path,
        help="page to write (default: docs/benchmarks/gpu.md, for a rehearsal runs/gpu-rehearsal/gpu.md)",
    )
    parser.add_argument(
        "--work",
        type=Path,
        help="folder for the files of the parts (default: runs/gpu, for a rehearsal runs/gpu-rehearsal)",
    )
    args = parser.parse_args(arguments)
    args.only = [name for name in PARTS if args.only is None or name in args.only]
    args.work = (args.work or ROOT / "runs" / ("gpu-rehearsal" if args.rehearse else "gpu")).resolve()
    args.output = (args.output or (args.work / "gpu.md" if args.rehearse else PAGE)).resolve()
    if args.rehearse and args.output == PAGE:
        parser.error(f"--output {PAGE} is the page of measurements. Give another file for a rehearsal")
    if not args.minutes * 60 > RESERVE:
        parser.error(f"--minutes {args.minutes:g}: give at least half a minute")
    try:
        check_output(args.output)
    except ValueError as error:
        parser.error(f"--output: {error}")
    return args


def interrupt(*_: object) -> None:
    """Handle a signal as Ctrl-C, so that the page is still written."""
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parse(arguments)
    args.end = time.monotonic() + 60 * args.minutes - RESERVE
    where = probe(args.rehearse, args.commit)
    if "error" in where or not (args.rehearse or "device" in where):
        print(no_gpu(where), file=sys.stderr)
        return NO_GPU
    if args.rehearse:
        where["device"] = f"none, {REHEARSAL}"
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    args.work.mkdir(parents=True, exist_ok=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        shutil.rmtree(args.work / name, ignore_errors=True)
        (args.work / f"{name}.jsonl").unlink(missing_ok=True)
    with open(args.output.with_suffix(".log"), "w", encoding="utf-8") as log:
        results = run_parts(args, where, log)
    with replacing(args.output) as temporary:
        temporary.write_text(page_of(args, where, results), encoding="utf-8")
    failed = [name for name in args.only if results[name]["error"]]
    print(f"\n{args.output} is written" + (f"; FAILED: {', '.join(failed)}" if failed else ""), flush=True)
    return FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main())
