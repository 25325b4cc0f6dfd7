"""docs/tour.ipynb runs unchanged, and its stored outputs come from a successful run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import nbformat
import pytest
from fitted_models import fitted_model
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
TOUR = ROOT / "docs/tour.ipynb"


def texts(notebook) -> list[str]:
    """Return the printed text of each cell that prints."""
    return [
        "".join(output.get("text", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code" and cell.outputs
    ]


def pictures(notebook) -> int:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def clone_with(tmp_path: Path) -> Path:
    """Write a fresh clone, without the output of runs."""
    for name in ("data", "scripts", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").mkdir()
    shutil.copy(TOUR, tmp_path / "docs")
    return tmp_path


def execute(root: Path):
    """The notebook after its run in a clone, by a kernel that has this code."""
    notebook = nbformat.read(root / "docs/tour.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    options = {"timeout": 1200, "kernel_name": "python3", "resources": {"metadata": {"path": str(root / "docs")}}}
    return NotebookClient(notebook, **options).execute()


def check(printed: list[str], drawn: int, model: str) -> None:
    """Check the output of a run, for any model."""
    whole = "\n".join(printed)
    assert f"{model}: 192 dimensions" in whole and "'penguin' " in whole and drawn == 2
    assert re.search(r"[\d.]+% of 365 drawings get their own name", whole)
    assert re.search(r"with it \d+% are answered", whole)
    assert re.search(r"noise +softmax: .+ confidence [01]\.\d{4}", whole)


def test_its_outputs_are_stored_whole_and_name_nobodys_machine():
    notebook = nbformat.read(TOUR, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    check(texts(notebook), pictures(notebook), "runs/demo/model")
    assert not re.search(r"/(?:work|tmp|root|home|usr)/", "\n".join(texts(notebook)))
    assert texts(notebook)[-1].count("I do not know") == 3  # noise, a blank page, stripes
    assert TOUR.stat().st_size < 500_000


def test_it_runs_with_the_model_of_make_demo(tmp_path):
    """One that has learnt nothing, in its place."""
    root = clone_with(tmp_path)
    model = fitted_model(tmp_path / "made", "ProLIP-ViT-XS-16").removeprefix("local-dir:")
    shutil.copytree(model, root / "runs/demo/model")
    done = execute(root)
    check(texts(done), pictures(done), "runs/demo/model")


@pytest.mark.slow
def test_without_a_model_it_trains_its_own_first(tmp_path):
    done = execute(clone_with(tmp_path))
    check(texts(done), pictures(done), "runs/tour/model")
