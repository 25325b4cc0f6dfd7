"""Commits that tests/faults.py interrupts: a file and a folder by the helpers of prolip.utils.outputs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from prolip.utils.outputs import replacing, replacing_folder


def _write_file(folder: Path, text: str) -> None:
    with replacing(folder / "file.txt") as temporary:
        temporary.write_text(text)


def _write_folder(folder: Path, text: str) -> None:
    with replacing_folder(folder / "folder") as temporary:
        for name in ("a", "b"):
            (temporary / name).write_text(text)


def _read_folder(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((folder / "folder").iterdir())}


file = SimpleNamespace(
    prepare=lambda folder: _write_file(folder, "old"),
    commit=lambda folder: _write_file(folder, "new"),
    state=lambda folder: (folder / "file.txt").read_text(),
)
folder = SimpleNamespace(
    prepare=lambda folder: _write_folder(folder, "old"),
    commit=lambda folder: _write_folder(folder, "new"),
    state=_read_folder,
)
