"""What the tests of the console script run on: wds folders and two saved models."""

from __future__ import annotations

from pathlib import Path

import pytest
from clip_benchmark_runs import save_model, save_openclip, write_sets


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Path:
    return write_sets(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="session")
def ours(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("ours"), seed=5)


@pytest.fixture(scope="session")
def theirs(tmp_path_factory) -> tuple[str, str]:
    return save_openclip(tmp_path_factory.mktemp("theirs"))


@pytest.fixture(autouse=True)
def work_folder(tmp_path, monkeypatch):
    """Each test writes into a folder of its own, and asks no hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
