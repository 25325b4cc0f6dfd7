"""The demo from end to end, with a toy model and two steps."""
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_leaves_model_figures_and_page(tmp_path):
    toy = ["--model", "ProLIP-ViT-test", "--max-steps", "2", "--warmup", "1", "--batch-size", "16", "--workers", "0"]
    ended = subprocess.run(
        [sys.executable, str(ROOT / "scripts/demo.py"), "--output-dir", str(tmp_path), "--", *toy],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = tmp_path / "demo"
    for name in ("config.json", "metrics.jsonl", "eval.json", "model/model.safetensors", "report.html"):
        assert (run / name).stat().st_size > 0
    assert f"Open {run / 'report.html'}" in ended.stdout


def test_a_training_error_is_the_demos_error(tmp_path):
    ended = subprocess.run(
        [sys.executable, str(ROOT / "scripts/demo.py"), "--output-dir", str(tmp_path), "--", "--batch-size", "0"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 2 and "error:" in ended.stderr and not (tmp_path / "demo").exists()
