"""Files and folders are committed whole: kills and full disks leave the old or the new state."""
import os
import subprocess
import sys

import pytest

import faults
from prolip.utils import outputs
from prolip.utils.outputs import holder_of, lock, replacing, replacing_folder


@pytest.mark.parametrize("commit", ["commits:file", "commits:folder"])
def test_a_kill_or_a_full_disk_at_any_call_leaves_the_old_or_the_new_state(tmp_path, commit):
    report = faults.check(commit, tmp_path, every=True)
    assert "the old state" in report and "the new state" in report
    assert all(kind in report for kind in ("write", "fsync", "rename"))


def test_a_folder_takes_the_place_of_another_where_names_cannot_be_exchanged(tmp_path, monkeypatch):
    monkeypatch.setattr(outputs.ctypes, "CDLL", lambda *_, **__: None)  # without renameat2
    for text in ("old", "new"):
        with replacing_folder(tmp_path / "folder") as temporary:
            (temporary / text).write_text(text)
    assert os.listdir(tmp_path) == ["folder"] and os.listdir(tmp_path / "folder") == ["new"]


def test_what_a_killed_writer_left_is_deleted_by_the_next_and_what_a_live_one_writes_is_not(tmp_path):
    leave = ("import os, pathlib, sys; from prolip.utils.outputs import *\n"
             "with replacing(pathlib.Path(sys.argv[1])) as file: file.write_text('half'); os._exit(9)")  # fmt: skip
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", leave, tmp_path / "a[1]"], check=False, env=env)
    assert len(os.listdir(tmp_path)) == 1
    with replacing(tmp_path / "a[1]") as one:
        one.write_text("one")
        with replacing(tmp_path / "a[1]") as other:
            other.write_text("other")
        assert one.exists()
    assert os.listdir(tmp_path) == ["a[1]"] and (tmp_path / "a[1]").read_text() == "one"


def test_a_lock_tells_who_holds_it_and_since_when(tmp_path):
    held = lock(tmp_path / "lock")
    assert held is not None and lock(tmp_path / "lock") is None
    assert holder_of(tmp_path / "lock").startswith(f"process {os.getpid()} on ")
    assert ", since 20" in holder_of(tmp_path / "lock")
    held.close()
    assert lock(tmp_path / "lock") is not None
