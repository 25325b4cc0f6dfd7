"""The sweep runner: every variant with every seed, once; a table; a failing run is reported behind the others."""

import contextlib
import io
import json
import subprocess
from pathlib import Path

import pytest
import yaml

import sweep as runner
from drawings import FOLDER, UNSEEN
from training.main import main as train_main

TINY = {
    "method": "prolip",
    "model": {"model": "ProLIP-ViT-test", "device_augment": True},
    "data": {"train_data": str(FOLDER / "noto.tar"), "select": "group=activities", "batch_size": 8, "workers": 0},
    "optim": {"warmup": 1},
    "run": {"max_steps": 2, "precision": "fp32", "device": "cpu", "log_every_n_steps": 1},
    "val": {"val_data": [f"emoji:{UNSEEN}"], "val_select": "group=activities"},
}
COLUMNS = {"R@1": ["names/i2t/R@1", 100], "group": "trace/group", "rate": "samples_per_second", "no": "none/such"}


def write_sweep(folder: Path, variants: dict[str, str], seeds: list[int]) -> Path:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(TINY))
    sweep = {"recipe": str(folder / "recipe.yaml"), "seeds": seeds, "flags": None, "variants": variants}
    sweep["columns"] = COLUMNS
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep, sort_keys=False))
    return path


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the command, trainings in this process; returns its error or None, and its output."""

    def here(command, *, stdout, **_):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            code = train_main(command[command.index("training.main") + 1 :])
        stdout.write(said.getvalue())
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(runner.subprocess, "run", here)

    def run(*words: object) -> tuple[str | None, str]:
        monkeypatch.setattr("sys.argv", ["sweep.py", *map(str, words)])
        capsys.readouterr()
        try:
            return runner.main(), capsys.readouterr().out
        except SystemExit as ended:
            return str(ended.code) + capsys.readouterr().err, ""

    return run


def test_a_sweep_trains_each_run_once_reports_what_failed_and_prints_a_row_per_variant(tmp_path, call):
    path = write_sweep(tmp_path, {"wrong": "--lr -1", "prolip": ""}, [0])
    words = (path, "--output", tmp_path / "runs")
    error, _ = call(*words)
    assert "wrong-s0 failed with exit code 2" in error and "--lr -1.0: give a finite number above 0" in error
    file = tmp_path / "runs/prolip-s0/eval.json"
    figures, written = json.loads(file.read_text()), file.stat().st_mtime_ns
    table = call(*words, "--only", "prolip")[1]
    assert file.stat().st_mtime_ns == written
    (row,) = (line.split(" | ") for line in table.splitlines() if line.startswith("| prolip"))
    assert float(row[3]) == pytest.approx(figures["trace/group"], abs=6e-4)
    assert row[5] == "– |" and float(row[4]) > 0

    file.write_text(json.dumps({"names/i2t/R@1": figures["names/i2t/R@1"]}))
    assert call(*words, "--table", "--recompute")[1] == table


def test_a_finished_run_of_another_recipe_or_other_flags_is_not_passed_off_as_this_one(tmp_path, monkeypatch):
    path = write_sweep(tmp_path, {"a": "--lr 1e-3"}, [0])
    sweep, folder = runner.read_sweep(path), tmp_path / "runs"
    trained: list[str] = []
    monkeypatch.setattr(runner, "train", lambda sweep, variant, *_: trained.append(variant))
    (folder / "a-s0").mkdir(parents=True)
    (folder / "a-s0/eval.json").write_text("{}")
    (folder / "a-s0.made-of").write_text(runner.made_of(sweep, "a"))
    runner.train_all(sweep, ["a"], folder, 1)
    with pytest.raises(SystemExit, match="a-s0 was trained with another recipe or flags: delete it"):
        runner.train_all(sweep | {"variants": {"a": "--lr 2e-3"}}, ["a"], folder, 1)
    (tmp_path / "recipe.yaml").write_text("method: siglip")
    with pytest.raises(SystemExit, match="another recipe"):
        runner.train_all(sweep, ["a"], folder, 1)
    (folder / "a-s0.made-of").unlink()  # runs of before this was kept
    runner.train_all(sweep, ["a"], folder, 1)
    assert trained == []
    with pytest.raises(SystemExit, match="recipe .* does not exist"):
        runner.made_of(sweep | {"recipe": "nowhere.yaml"}, "a")


REFUSED = [({"seeds": [0, 0]}, "different integers"), ({"variants": {"a/b": ""}}, "names of letters")]
REFUSED += [({"variants": {"..": ""}}, "names of letters"), ({"flags": '--name "x'}, "quotation mark")]


@pytest.mark.parametrize("change, said", REFUSED)
def test_seeds_names_and_flags_that_no_run_can_have_are_refused(change, said, tmp_path):
    path = write_sweep(tmp_path, {"a": ""}, [0])
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    with pytest.raises(SystemExit, match=said):
        runner.read_sweep(path)


@pytest.mark.parametrize("text", ['{"names/i2t/R@1": 0.', '{"names/i2t/R@1": "x"}', "null"])
def test_a_table_of_figures_that_are_cut_or_none_is_an_error_in_one_line(text, tmp_path):
    (run := tmp_path / "a-s0").mkdir()
    (run / "eval.json").write_text(text)
    with pytest.raises(SystemExit, match=r"error: .*a-s0/eval.json [^\n]*train again$"):
        runner.figures_of(run)


def test_unknown_variants_and_keys_are_refused(tmp_path, call):
    path = write_sweep(tmp_path, {"a": ""}, [0])
    assert "no variant b: give a" in call(path, "--output", tmp_path, "--only", "b")[0]
    path.write_text(yaml.safe_dump({"recipe": "x"}))
    with pytest.raises(SystemExit, match="give columns, flags, recipe, seeds, variants"):
        runner.read_sweep(path)


CELLS = [([0.5], "0.500"), ([1.0, 2.0], "1.500 ± 0.500"), ([40.0, 42.0], "41.0 ± 1.0")]


@pytest.mark.parametrize("values, text", CELLS)
def test_cells_show_mean_and_half_the_spread(values, text):
    assert runner.cell(values) == text
