"""The kit for a first GPU: what it says without one, what becomes of parts that fail, what its page holds."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from open_clip.loss import SigLipLoss

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts/bench/gpu/gpu.py"
sys.path.insert(0, str(SCRIPT.parent))
import gpu  # noqa: E402
import gpu_loss  # noqa: E402
import gpu_parts  # noqa: E402
import gpu_speed  # noqa: E402
from gpu_kit import Kit  # noqa: E402

WHERE = {"device": "NVIDIA H100 80GB HBM3", "driver": "580", "torch": "2.14", "commit": "abc", "CUDA of torch": "13.0"}
#: Replacement of gpu_parts.py: some parts fail, each in its own way, after a first row.
STAND_IN = """
import json, os, signal, subprocess, sys, time
part, file = sys.argv[1], sys.argv[sys.argv.index("--file") + 1]
def write(values):
    with open(file, "a") as out:
        out.write(json.dumps(values) + "\\n")
met = None if "--rehearse" in sys.argv else part != "step"
write({"what": f"{part} a|b", "figure": "1 | 2", "target": "<= 1", "met": met})
print("words", *sys.argv[1:], flush=True)
if part == "kernel":
    print("Traceback (most recent call last)\\n  whole", file=sys.stderr)
    write({"error": "ValueError: x | y"})
    sys.exit(1)
if part == "pairs":
    os.kill(os.getpid(), signal.SIGKILL)
if part == "step":
    write({"samples_per_second": 123.5})
if part == "fsdp":
    sys.exit(7)
if part == "waits":
    child = subprocess.Popen(["sleep", "60"])
    write({"what": "child", "figure": str(child.pid)})
    time.sleep(60)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Parts that take no time, on a machine that seems to have a GPU."""
    monkeypatch.setattr(gpu, "PARTS_SCRIPT", tmp_path / "parts.py")
    gpu.PARTS_SCRIPT.write_text(STAND_IN)
    monkeypatch.setattr(gpu, "probe", lambda rehearse, commit=None: dict(WHERE))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "gpu.md")]


def rows_of(page: str, title: str) -> list[str]:
    """The rows of the first table below a heading, without its head."""
    lines = page.split(f"## {title}\n")[1].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| ---"))
    return [line for line in lines[first + 1 : lines.index("", first)] if line]


# --- without a GPU ----------------------------------------------------------------------------------------------------
def test_without_a_gpu_one_line_says_so_and_the_exit_code_is_3():
    done = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 3 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"no GPU: torch {torch.__version__} ") and "make gpu" in line and "--rehearse" in line


# --- parts that fail --------------------------------------------------------------------------------------------------
def test_a_part_that_fails_leaves_the_rows_of_the_others(stand_in, tmp_path):
    assert gpu.main([*stand_in, "--only", "kernel", "pairs", "step", "loader", "fsdp"]) == 1
    page, log = (tmp_path / "gpu.md").read_text(), (tmp_path / "gpu.log").read_text()
    errors = {"kernel": "ValueError: x \\| y", "pairs": "ended by SIGKILL", "fsdp": "ended with exit status 7"}
    for name, error in errors.items():
        title = gpu.PARTS[name].title
        assert rows_of(page, title) == [
            f"| {name} a\\|b | 1 \\| 2 | <= 1 | met |".replace("<", "&lt;"),
            f"| FAILED | {error} |  |  |",
        ]
        assert f"| {name} | {error} |" in rows_of(page, "Failed")
    assert rows_of(page, gpu.PARTS["step"].title)[0].endswith("| not met |")
    assert len(rows_of(page, gpu.PARTS["loader"].title)) == 1
    assert "Traceback (most recent call last)\n  whole" in log  # all of it, standard error too
    assert "--step-rate 123.5" in log.split("words loader")[1]
    assert "Not run: tests, run, waits." in page


def test_a_part_that_runs_out_of_its_share_is_ended_with_all_that_it_started(stand_in, tmp_path):
    args = gpu.parse(stand_in)
    args.work.mkdir()
    with open(tmp_path / "log", "w") as log:
        result = gpu.run_part("waits", args, 4.0, log, [])
    assert result["error"] == "ran past its share of 4 s" and result["seconds"] < 30
    child = int(result["rows"][1]["figure"])  # rows before the kill are there
    deadline = time.monotonic() + 10
    while (status := Path(f"/proc/{child}/stat")).exists() and status.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the part's child still runs"
        time.sleep(0.05)


def kit(tmp_path: Path, rehearse: bool = True) -> Kit:
    return Kit(argparse.Namespace(rehearse=rehearse, seconds=60, step_rate=None, work=tmp_path, file=tmp_path / "rows"))


def test_the_tests_that_need_cuda_are_found():
    found = gpu_parts.cuda_tests(ROOT / "tests")
    skipped = {
        "training/loop/test_loop.py::test_on_cuda_a_step_does_not_stop_the_host",
        "prolip/data/augment/test_colour.py::test_cuda_makes_the_same_images_and_the_host_never_waits",
    }
    assert {f"tests/{name}" for name in skipped | {"prolip/losses/test_fused.py"}} < set(found)
    assert not any("gpu_bench" in name for name in found)
    assert gpu_parts.REHEARSED in (ROOT / "tests/prolip/losses/test_fused.py").read_text()


def test_a_batch_that_does_not_fit_is_halved_and_the_step_is_held_against_its_targets(tmp_path, monkeypatch):
    def times(kit, model, batch, compile):
        if batch == 512:
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
        return {"siglip": [0.1] * 3, "prolip": [0.1 if compile else 0.2] * 3}

    monkeypatch.setattr(gpu_speed, "step_times", times)
    monkeypatch.setattr(gpu_speed, "flops_of", lambda name, rows: 1e11)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    gpu_speed.step(kit(tmp_path, rehearse=False))
    rows, facts = gpu.read_rows(tmp_path / "rows")
    assert rows[0] == {"what": "batch 512, eager", "figure": "out of memory: CUDA out of memory."}
    judged = {row["what"]: (row["figure"], row["met"]) for row in rows if "target" in row}
    assert judged == {
        "ProLIP step / SigLIP step, compiled": ("1.000", True),
        "MFU of the ProLIP step, compiled": ("0.259 of 989.4 TFLOP/s", False),
    }
    assert facts == {"samples_per_second": 2560.0}


def test_the_plain_loss_that_ppcl_is_held_against_is_openclips():
    from bench.train import loss as bench_loss

    x = bench_loss.Inputs(20, 8, "cpu")
    got = gpu_loss.gradients(gpu_loss.compiled_blocks(gpu_loss.one_block, 7), x)
    want = gpu_loss.gradients(lambda x: SigLipLoss()(x.image.mean, x.text.mean, x.scale, x.bias), x)
    assert gpu_loss.furthest(got[:2], want[:2]) < 1e-5
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_rehearsal_of_all_parts_ends_well(tmp_path):
    words = ["--rehearse", "--work", tmp_path, "--minutes", "30"]
    done = subprocess.run([sys.executable, SCRIPT, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    page = (tmp_path / "gpu.md").read_text()
    assert gpu.REHEARSAL in page and "not met" not in page and "Failed" not in page
    for part in gpu.PARTS.values():
        assert rows_of(page, part.title)
