"""Checkpoints on disk and elsewhere: never half a file, newest valid first, kept as asked."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import fsspec
import pytest
import torch

from prolip.utils.flags import FlagError
from training.checkpoint.files import (
    CheckpointWriter,
    Storage,
    check_checkpoint,
    find_checkpoint,
    in_memory,
    list_steps,
    load_checkpoint,
    obsolete,
)
from training.checkpoint.run_dir import lock_run_dir, write_json


def state(step: int) -> dict:
    return {"step": step, "weights": torch.full((300,), float(step)), "nested": [{"tuple": (1, torch.ones(2))}]}


def save(url, *steps: int, **settings) -> Storage:
    saver = CheckpointWriter(Storage(str(url)), **settings)
    for step in steps:
        saver.submit(state(step))
    saver.settle(final=True)
    saver.close()
    return saver.storage


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(file, text, encoding):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {})
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_checkpoint_is_loaded_as_it_was_saved(tmp_path, kind):
    url = str(tmp_path / "c") if kind == "local" else f"gs://{tmp_path.name}/c"
    storage = save(url, 30)
    assert storage.names() == ["step_30.pt"]
    address, passed_over = find_checkpoint("latest", Storage(url))
    assert address == f"{url}/step_30.pt" and passed_over == []
    loaded = load_checkpoint(address)
    assert loaded["step"] == 30 and loaded["nested"][0]["tuple"][0] == 1
    torch.testing.assert_close(loaded["weights"], torch.full((300,), 30.0))


def test_retention_keeps_the_newest_and_the_first_behind_each_multiple(tmp_path):
    assert obsolete([3, 1, 2], 0, 0) == []
    assert obsolete([1, 2, 3, 4], 2, 0) == [1, 2]
    assert obsolete([5, 15, 25, 35, 45, 55, 65], 1, 30) == [5, 15, 25, 45, 55]
    assert obsolete([10, 20, 30, 40], 1, 20) == [10, 30]
    storage = save(tmp_path, *range(5, 70, 10), keep=2, keep_every=30)
    assert list_steps(storage) == [65, 55, 35]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    storage, opened = Storage(str(tmp_path)), threading.Event()
    honest = storage.write

    def slow(name, fill):
        opened.wait(10)
        honest(name, fill)

    storage.write = slow
    saver, values = CheckpointWriter(storage), state(1)
    start = time.perf_counter()
    saver.submit(values)
    values["weights"].zero_()  # the next step
    assert time.perf_counter() - start < 5 and storage.names() == []
    opened.set()
    saver.settle(final=True)
    saver.close()
    assert load_checkpoint(f"{tmp_path}/step_1.pt")["weights"].eq(1).all()


def test_a_write_that_fails_is_reported_and_only_the_last_one_stops_the_run(tmp_path):
    storage, said, fail = Storage(str(tmp_path)), [], [True]
    honest = storage.write

    def write(name, fill):
        if fail[0]:
            raise OSError("disk full")
        honest(name, fill)

    storage.write = write
    saver = CheckpointWriter(storage, say=said.append)
    saver.submit(state(1))
    saver.settle()
    assert said == ["warning: a checkpoint was NOT written; the run continues: OSError: disk full"]
    fail[0] = False
    saver.submit(state(2))
    saver.settle(final=True)
    fail[0] = True
    saver.submit(state(3))
    with pytest.raises(OSError, match="the last checkpoint was not written: .*disk full"):
        saver.settle(final=True)
    saver.close()
    assert list_steps(storage) == [2]


def test_a_checkpoint_that_is_there_is_not_called_unwritten(tmp_path):
    """Later steps may fail: a full disk of the run folder, a store that deletes nothing."""
    storage, said = Storage(str(tmp_path)), []

    def fail(*things):
        raise OSError("no")

    saver, storage.delete = CheckpointWriter(storage, keep=1, say=said.append, saved=fail), fail
    saver.submit(state(1))
    saver.submit(state(2))
    saver.settle(final=True)
    saver.close()
    assert saver.last == f"{tmp_path}/step_2.pt" and list_steps(storage) == [2, 1]
    assert any(text.startswith(f"warning: {tmp_path}/step_2.pt is written, but ") for text in said)
    assert not any("NOT" in text for text in said)


def test_latest_passes_over_damaged_files_and_names_them(tmp_path):
    storage = save(tmp_path, 1, 2)
    good = (tmp_path / "step_2.pt").read_bytes()
    for step, content in ((3, good[:200]), (4, b""), (6, good[: len(good) // 2] + b"x" + good[len(good) // 2 + 1 :])):
        (tmp_path / f"step_{step}.pt").write_bytes(content)
    address, passed_over = find_checkpoint("latest", storage)
    assert address == f"{tmp_path}/step_2.pt"
    assert [name in text for name, text in zip(("step_6", "step_4", "step_3"), passed_over)] == [True] * 3
    for step in (3, 6):  # one that is named itself has a remedy
        with pytest.raises(FlagError, match=rf"step_{step}.pt cannot be loaded: .*; --resume auto uses the newest"):
            find_checkpoint(f"{tmp_path}/step_{step}.pt", storage)


def test_remote_files_take_their_name_when_they_are_whole(monkeypatch):
    storage = Storage("gs://atomic")
    filesystem = type(storage.filesystem)
    move, seen = filesystem.mv, []

    def spy(self, source, target, **rest):
        seen.extend(storage.names())
        move(self, source, target, **rest)

    monkeypatch.setattr(filesystem, "mv", spy)
    storage.write("step_1.pt", lambda file: file.write(b"whole"))
    assert seen == [".step_1.pt.tmp"] and storage.names() == ["step_1.pt"]
    assert fsspec.open("gs://atomic/step_1.pt").open().read() == b"whole"


def test_a_missing_checkpoint_is_refused_with_what_to_do(tmp_path):
    storage = Storage(str(tmp_path))
    with pytest.raises(FlagError, match="--resume nowhere.pt does not exist; --resume auto"):
        find_checkpoint("nowhere.pt", storage)
    (tmp_path / "folder").mkdir()
    with pytest.raises(FlagError, match="folder is a folder: give a file in it, or --name RUN --resume la"):
        find_checkpoint(f"{tmp_path}/folder", storage)
    with pytest.raises(FlagError, match="holds no checkpoint: --resume auto starts at step 0"):
        find_checkpoint("latest", storage)
    assert find_checkpoint("auto", storage) == (None, [])
    torch.save({"other": 1}, tmp_path / "step_5.pt")
    with pytest.raises(FlagError, match="not a checkpoint of a run"):
        load_checkpoint(f"{tmp_path}/step_5.pt")
    (tmp_path / "step_5.pt").unlink()
    (tmp_path / "step_1.pt").write_bytes(b"damaged")
    with pytest.raises(FlagError, match="found no valid checkpoint .*step_1.pt.*replace --resume with --over"):
        find_checkpoint("auto", storage)


def test_a_folder_that_another_process_writes_is_waited_for_then_refused(tmp_path):
    said: list[str] = []
    held = lock_run_dir(tmp_path)
    with pytest.raises(FlagError, match=f"is in use by process {os.getpid()} on .*: wait until it ends"):
        lock_run_dir(tmp_path, patience=0.6, say=said.append)
    assert len(said) == 1 and said[0].startswith("waiting for process")
    threading.Timer(0.3, held.close).start()
    lock_run_dir(tmp_path, patience=30).close()


@pytest.mark.parametrize("known", ["TMPDIR", "SLURM_TMPDIR", "beside"])
@pytest.mark.skipif(not in_memory("/dev/shm"), reason="no folder of this system is known to be memory")
def test_checkpoints_on_their_way_lie_on_a_disk_and_are_swept(tmp_path, monkeypatch, known):
    disk, url = tmp_path / "disk", f"gs://{tmp_path.name}/{known}"
    disk.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(disk) if known == "TMPDIR" else "/dev/shm")
    monkeypatch.setenv("SLURM_TMPDIR", str(disk) if known == "SLURM_TMPDIR" else "/dev/shm/none")
    storage = Storage(url, beside=disk if known == "beside" else Path("/dev/shm"))
    storage.write("step_1.pt", lambda file: torch.save(state(1), file))
    with storage.fetched("step_1.pt") as path:
        assert torch.load(path)["step"] == 1 and path.parent.parent == disk
    assert not list(disk.iterdir())
    if known == "beside":  # of a process that was killed
        (disk / ".checkpoint-a.tmp").mkdir()
        storage.sweep()
        assert not list(disk.iterdir())


def test_whatever_byte_is_flipped_or_cut_a_checkpoint_is_reported_or_unharmed(tmp_path):
    """Padding and a few fields of the archive carry nothing: a flip there must leave every value as it was."""
    save(tmp_path, 7)
    path = tmp_path / "step_7.pt"
    good, rng, reported = path.read_bytes(), random.Random(0), 0
    for case in range(300):
        data = bytearray(good)
        if case % 3:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        else:
            del data[rng.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            check_checkpoint(str(path))
            loaded = load_checkpoint(str(path))
        except FlagError:
            reported += 1
            continue
        assert case % 3 and loaded["weights"].eq(7).all() and loaded["step"] == 7
        assert loaded["nested"][0]["tuple"][1].eq(1).all()
    assert reported > 200
