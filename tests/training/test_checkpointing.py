"""Checkpoints on disk: never half a file, newest loadable first, no run overwritten by accident."""
from __future__ import annotations

import os

import pytest
import torch

from training.checkpointing import find_checkpoint, list_checkpoints, open_run_folder, save_checkpoint, write_atomically
from training.flags import FlagError


def state(epoch: int, step: int = 0, batch: int = 0) -> dict:
    return {"epoch": epoch, "step": step, "batch_in_epoch": batch, "weights": torch.full((3,), float(epoch))}


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(file):
        file.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_checkpoint_is_loaded_as_it_was_saved(tmp_path):
    path = save_checkpoint(tmp_path, state(3, 30), keep=0)
    assert path.name == "epoch_3.pt"
    found, loaded, passed_over = find_checkpoint("latest", tmp_path)
    assert found == path and loaded["step"] == 30 and passed_over == []
    torch.testing.assert_close(loaded["weights"], torch.full((3,), 3.0))


def test_newest_goes_by_progress_not_by_name_or_time(tmp_path):
    for epoch in (10, 9, 2):
        save_checkpoint(tmp_path, state(epoch), keep=0)
    save_checkpoint(tmp_path, state(10, step=105, batch=5), keep=0)
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "epoch_10_step_105.pt", "epoch_10.pt", "epoch_9.pt", "epoch_2.pt",
    ]  # fmt: skip


def test_only_the_newest_are_kept_when_asked(tmp_path):
    for epoch in range(1, 5):
        save_checkpoint(tmp_path, state(epoch), keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["epoch_4.pt", "epoch_3.pt"]


def test_latest_passes_over_damaged_files_and_names_them(tmp_path):
    save_checkpoint(tmp_path, state(1), keep=0)
    good = save_checkpoint(tmp_path, state(2), keep=0)
    for epoch, content in ((3, good.read_bytes()[:200]), (4, b"")):
        (good.parent / f"epoch_{epoch}.pt").write_bytes(content)
    torch.save({"other": 1}, good.parent / "epoch_5.pt")
    path, _, passed_over = find_checkpoint("latest", tmp_path)
    assert path == good
    assert [name in text for name, text in zip(("epoch_5", "epoch_4", "epoch_3"), passed_over)] == [True] * 3


def test_a_missing_checkpoint_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(FlagError, match="--resume nowhere.pt: there is no such file; --resume latest"):
        find_checkpoint("nowhere.pt", tmp_path)
    with pytest.raises(FlagError, match="holds none.*start without --resume"):
        find_checkpoint("latest", tmp_path)


def test_a_folder_with_a_run_is_not_taken_by_accident(tmp_path):
    folder = tmp_path / "run"
    open_run_folder(folder, overwrite=False, resume=False)
    with pytest.raises(FlagError, match="already holds a run.*--name.*--resume latest.*--overwrite"):
        open_run_folder(folder, overwrite=False, resume=False)
    open_run_folder(folder, overwrite=False, resume=True)


def test_overwriting_deletes_what_a_run_wrote_and_nothing_else(tmp_path):
    open_run_folder(tmp_path, overwrite=False, resume=False)
    save_checkpoint(tmp_path, state(1), keep=0)
    (tmp_path / "notes.txt").write_text("mine")
    open_run_folder(tmp_path, overwrite=True, resume=False)
    assert list_checkpoints(tmp_path) == []
    assert (tmp_path / "notes.txt").read_text() == "mine"
