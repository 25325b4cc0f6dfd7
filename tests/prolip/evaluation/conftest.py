"""Models that tests below this folder share; its being here also puts the folder's helper modules on the path."""

from __future__ import annotations

import miniatures as mini
import pytest

from prolip.embedder import Embedder
from prolip.evaluation.metrics import streaming as blockwise


@pytest.fixture
def in_blocks(monkeypatch):
    """Have score matrices read so many scores at a time."""

    def read(scores: int) -> None:
        monkeypatch.setattr(blockwise, "BLOCK", scores)
        monkeypatch.setattr(blockwise, "ROWS", 1)

    return read


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """`local-dir:` address of a small ProLIP model."""
    return mini.prolip_folder(tmp_path_factory.mktemp("small_prolip"))


@pytest.fixture(scope="session")
def ours(folder):
    """It, loaded."""
    return Embedder.load(folder)


@pytest.fixture(scope="session")
def theirs(tmp_path_factory):
    """A small deterministic model of OpenCLIP's, loaded."""
    return mini.small_openclip(tmp_path_factory.mktemp("small_openclip"))
