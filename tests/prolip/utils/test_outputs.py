"""Files and folders are committed whole: kills and full disks leave the old or the new state."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import faults
from prolip.utils import outputs
from prolip.utils.outputs import check_output, holder_of, lock, replacing, replacing_folder


@pytest.mark.parametrize("commit", ["commits:file", "commits:folder"])
def test_a_kill_or_a_full_disk_at_any_call_leaves_the_old_or_the_new_state(tmp_path, commit):
    report = faults.check(commit, tmp_path, every=True)
    assert "the old state" in report and "the new state" in report
    assert all(kind in report for kind in ("write", "fsync", "rename"))


@pytest.mark.slow
def test_a_model_its_card_graphs_embeddings_or_a_checkpoint_are_old_or_new_after_a_kill_anywhere(tmp_path):
    report = faults.check(
        "commits_models:fitted_new,fitted_again,ours,hub,graphs,pairs,checkpoint", tmp_path, every=True
    )
    assert report.count("the old state") > 15 and report.count("the new state") > 5


def test_a_kill_between_the_two_renames_of_nfs_leaves_the_former_folder_under_a_name_that_nobody_sweeps(
    tmp_path, monkeypatch
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/old").touch()
    monkeypatch.setattr(outputs.ctypes, "CDLL", lambda *_, **__: None)
    rename, end = os.rename, OSError

    def ends(old, new):
        if str(old).endswith(".tmp"):
            raise end("the second rename")
        rename(old, new)

    monkeypatch.setattr(os, "rename", ends)
    with pytest.raises(OSError, match="second"), replacing_folder(tmp_path / "folder"):
        pass
    assert os.listdir(tmp_path) == ["folder"] and os.listdir(tmp_path / "folder") == ["old"]  # put back
    end = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), replacing_folder(tmp_path / "folder"):
        pass
    (former,) = os.listdir(tmp_path)
    assert former.startswith("folder.former-") and os.listdir(tmp_path / former) == ["old"]


def test_names_that_are_kept_are_linked_into_the_new_folder(tmp_path):
    target = tmp_path / "folder"
    (target / "below/deep").mkdir(parents=True)
    for name in ("mine", "below/deep/file", "gone", "both"):
        (target / name).write_text(name)
    (target / "link").symlink_to("mine")
    (target / "mine").chmod(0o600)
    target.chmod(0o750)
    number = (target / "below/deep/file").stat().st_ino
    with replacing_folder(target, kept=lambda name: name != "gone") as temporary:
        (temporary / "both").write_text("new")
    assert sorted(os.listdir(target)) == ["below", "both", "link", "mine"] and os.listdir(tmp_path) == ["folder"]
    assert (target / "both").read_text() == "new" and (target / "below/deep/file").stat().st_ino == number
    assert os.readlink(target / "link") == "mine"
    assert (target / "mine").stat().st_mode & 0o777 == 0o600 and target.stat().st_mode & 0o777 == 0o750


def test_what_another_process_writes_during_the_exchange_is_not_lost(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()

    def late(new, target, exchange=outputs._exchange):
        (target / "other").write_text("late")
        exchange(new, target)

    monkeypatch.setattr(outputs, "_exchange", late)
    with replacing_folder(tmp_path / "folder", kept=lambda name: True) as temporary:
        (temporary / "one").touch()
    assert sorted(os.listdir(tmp_path / "folder")) == ["one", "other"] and os.listdir(tmp_path) == ["folder"]


def test_a_folder_that_one_stands_in_stays_and_gets_the_new_files(tmp_path, monkeypatch):
    target = tmp_path / "folder"
    target.mkdir()
    number = target.stat().st_ino
    for name in ("mine", "gone", "both"):
        (target / name).write_text(name)
    monkeypatch.chdir(target)
    with replacing_folder(Path(), kept=lambda name: name == "mine") as temporary:
        (temporary / "both").write_text("new")
    assert target.stat().st_ino == number and sorted(os.listdir(target)) == ["both", "mine"]
    assert (target / "both").read_text() == "new" and os.listdir(tmp_path) == ["folder"]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_a_link_and_what_it_leads_to_is_replaced(tmp_path, there, monkeypatch):
    (tmp_path / "far").mkdir()
    (tmp_path / "far/folder").mkdir() if there else None
    (tmp_path / "far/file").write_text("old") if there else None
    for name in ("file", "folder"):
        (tmp_path / name).symlink_to(f"far/{name}")
    monkeypatch.chdir(tmp_path)
    with replacing(Path("file")) as temporary:
        temporary.write_text("new")
    with replacing_folder(Path("folder")) as temporary:
        (temporary / "new").touch()
    assert (tmp_path / "file").is_symlink() and (tmp_path / "folder").is_symlink()
    assert (tmp_path / "far/file").read_text() == "new" and os.listdir(tmp_path / "far/folder") == ["new"]
    assert sorted(os.listdir(tmp_path / "far")) == ["file", "folder"]


def test_folders_above_are_made_and_files_have_the_mode_of_the_umask_or_keep_their_own(tmp_path):
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "a/b/file") as temporary:
            temporary.write_text("one")
            temporary.chmod(0o600)  # as safetensors does
        with replacing_folder(tmp_path / "c/d") as folder:
            (folder / "file").touch(0o600)
    finally:
        os.umask(before)
    assert (tmp_path / "a/b/file").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "c/d").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "c/d/file").stat().st_mode & 0o777 == 0o640
    (tmp_path / "a/b/file").chmod(0o600)
    with replacing(tmp_path / "a/b/file") as temporary:
        temporary.write_text("two")
    assert (tmp_path / "a/b/file").stat().st_mode & 0o777 == 0o600


def test_a_pipe_is_written_as_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_output(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with replacing(tmp_path / "pipe") as place:
        place.write_text("text")
    assert os.read(reader, 9) == b"text" and os.listdir(tmp_path) == ["pipe"]
    os.close(reader)


def test_a_disk_without_room_is_refused_and_one_that_tells_no_sizes_is_not(tmp_path, monkeypatch):
    check_output(tmp_path / "new/file", size=1)
    with pytest.raises(ValueError, match=r"file needs about [\d,]+ MiB, but [\d,]+ MiB are free in .*: free space"):
        check_output(tmp_path / "new/file", size=2**60)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=0, free=0))
    check_output(tmp_path / "new/file", size=2**60)


def test_a_folder_with_other_files_than_the_callers_is_refused(tmp_path):
    check_output(tmp_path, folder=True, mark="mark.json")
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ValueError, match=r"has no mark.json, so 'mine.txt' in it would be deleted"):
        check_output(tmp_path, folder=True, mark="mark.json")
    (tmp_path / "mark.json").touch()
    check_output(tmp_path, folder=True, mark="mark.json")


def test_what_a_killed_writer_left_is_deleted_by_the_next_and_what_a_live_one_writes_is_not(tmp_path):
    leave = (
        "import os, pathlib, sys; from prolip.utils.outputs import *\n"
        "with replacing(pathlib.Path(sys.argv[1])) as file: file.write_text('half'); os._exit(9)"
    )
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
    (tmp_path / "lock").write_bytes(b"a\xff\x1b[31m\nb")
    assert "\n" not in holder_of(tmp_path / "lock") and "\x1b" not in holder_of(tmp_path / "lock")
    assert lock(tmp_path / "lock") is not None
