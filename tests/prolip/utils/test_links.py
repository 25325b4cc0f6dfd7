"""Links inside a folder: followed once each way, however they lead to each other."""

from __future__ import annotations

import os

from prolip.utils.links import walk


def test_links_to_each_other_end_and_every_folder_is_listed(tmp_path):
    """Eight folders that link to each other have 110,000 paths without a loop."""
    for i in range(8):
        (tmp_path / f"m{i}").mkdir()
        (tmp_path / f"m{i}" / "a.png").touch()
        for j in set(range(8)) - {i}:
            (tmp_path / f"m{i}" / f"l{j}").symlink_to(f"../m{j}")
    found = [os.path.relpath(folder, tmp_path) for folder, names in walk(tmp_path) if names == ["a.png"]]
    assert {f"m{i}" for i in range(8)} <= set(found) and len(found) < 500


def test_one_folder_is_followed_from_several_places(tmp_path):
    (tmp_path / "c/d").mkdir(parents=True)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "c").symlink_to("../c")
    found = [os.path.relpath(folder, tmp_path) for folder, _ in walk(tmp_path)]
    assert found == [".", "a", "a/c", "a/c/d", "b", "b/c", "b/c/d", "c", "c/d"]
