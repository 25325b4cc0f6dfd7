"""Reading run folders, whole and in parts."""
import pytest
from report_stand_in import make_result, write_run

from prolip.report import runs


def test_a_whole_run_is_read(tmp_path):
    run = runs.read(write_run(tmp_path / "demo", make_result()))
    assert len(run.train) == 12 and len(run.evals) == 2 and run.train[-1]["seconds"] == 360.0
    assert run.config["method"] == "prolip" and run.result.info["images"] == 22


def test_parts_may_be_missing(tmp_path):
    folder = write_run(tmp_path / "demo")
    assert runs.read(folder).result is None
    (folder / "config.json").unlink()
    assert runs.read(folder).config is None and len(runs.read(folder).train) == 12
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="is it a run folder"):
        runs.read(folder)
    with pytest.raises(FileNotFoundError, match="no run folder"):
        runs.read(tmp_path / "none")


def test_another_evaluation_is_chosen_by_name(tmp_path):
    folder = write_run(tmp_path / "demo")
    make_result().save(folder / "eval_ema")
    assert runs.read(folder).result is None and runs.read(folder, "eval_ema").result is not None


def test_a_line_cut_by_a_kill_is_left_out(tmp_path):
    folder = write_run(tmp_path / "demo")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 13, "lo')
    assert len(runs.read(folder).train) == 12


def test_settings_are_flat_and_without_what_is_unset():
    assert runs.flatten({"a": {"b": 1, "c": None}, "d": [2]}) == {"a.b": 1, "d": [2]}
