"""The 25 lines of docs/developing/add_a_method.md train by the page's command and compute the loss that they name."""

from __future__ import annotations

import json
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from training.main import main

PAGE = (Path(__file__).parents[3] / "docs/developing/add_a_method.md").read_text(encoding="utf-8")


@pytest.fixture
def lines(tmp_path, monkeypatch) -> str:
    """The example, as a module that the environment names."""
    text = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    (tmp_path / "smooth.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PROLIP_METHODS", "smooth")
    yield text
    sys.modules.pop("smooth", None)


def module() -> ModuleType:
    return import_module("smooth")


def test_it_trains_by_the_command_of_the_page_with_scale_and_bias_in_the_log(lines, tmp_path, capsys):
    assert len([line for line in lines.splitlines() if line.strip()]) <= 25 and PAGE.index(lines) < 200
    command = re.search(r"^prolip train (--method smooth .*?)\n```", PAGE, re.DOTALL | re.MULTILINE)[1]
    words = shlex.split(command.replace("\\\n", " "))
    assert main([*words, "--output", str(tmp_path), "--log-every-n-steps", "5"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "smooth/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[-1]["step"] == 20
    assert all(row["scale"] > 9 and row["bias"] < 0 for row in rows)
    assert re.search(r"\| scale [\d.]+  bias -[\d.]+ \|", capsys.readouterr().out)
    assert json.loads((tmp_path / "smooth/config.json").read_text())["objective"] == {"smoothing": 0.05}


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_its_loss_is_cross_entropy_with_smoothed_labels(lines, smoothing):
    generator = torch.Generator().manual_seed(0)
    mean = {
        name: F.normalize(torch.randn(6, 4, generator=generator, dtype=torch.float64), dim=1).float()
        for name in ("image_mean", "text_mean")
    }
    reps = mean | {"scale": torch.tensor(3.0), "bias": torch.tensor(-1.0)}
    objective = module().SmoothObjective.__new__(module().SmoothObjective)
    torch.nn.Module.__init__(objective)
    objective.config = module().SmoothConfig(smoothing=smoothing)
    probability = torch.sigmoid(3.0 * mean["image_mean"].double() @ mean["text_mean"].double().T - 1.0)
    label = torch.eye(6, dtype=torch.float64) * (1 - smoothing) + smoothing / 2
    want = -(label * probability.log() + (1 - label) * (1 - probability).log()).sum() / 6
    found = objective.logged(reps, {})
    assert found["loss"].item() == pytest.approx(want.item(), rel=1e-5)
    assert found["scale"] == 3 and found["bias"] == -1
