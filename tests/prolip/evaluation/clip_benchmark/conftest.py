"""Inputs for the tests of the console script: wds folders and two saved models."""

from __future__ import annotations

from pathlib import Path

import miniatures as mini
import pytest
import torch
from clip_benchmark_runs import write_sets


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Path:
    return write_sets(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="session")
def ours(folder) -> str:
    return folder


@pytest.fixture(scope="session")
def theirs(tmp_path_factory) -> tuple[str, str]:
    """(name, weights file) of a small OpenCLIP model."""
    folder = tmp_path_factory.mktemp("theirs")
    mini.small_openclip(folder)
    return "ViT-mini", str(folder / "weights.pt")


@pytest.fixture(autouse=True)
def work_folder(tmp_path, monkeypatch):
    """Each test writes into a folder of its own, and asks no hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)  # what a worker that failed waits
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
