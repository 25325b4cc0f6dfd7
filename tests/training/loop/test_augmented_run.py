"""Runs whose texts and images are augmented on the way to the model: as one process on two ranks, and when stopped."""

from __future__ import annotations

import shlex
from pathlib import Path

import torch
from training_runs import TINY, metrics, start, stop_after

from training.health.signals import EXIT_STOPPED

AUGMENTED = shlex.split(
    "--text-mask 0.1 --text-random 0.1 --text-delete 0.2 --word-drop 0.2 --cutout 0.4 "
    "--cutout-prob 0.5 --erase-prob 0.5 --max-steps 4 --save-frequency 0"
)


def losses(folder: Path) -> torch.Tensor:
    return torch.tensor([row["loss"] for row in metrics(folder) if "loss" in row])


def test_a_run_that_is_stopped_goes_on_with_the_same_changes(tmp_path):
    whole = start(tmp_path, "whole", *AUGMENTED)
    assert stop_after(2, [*TINY, "--output", str(tmp_path), "--name", "parts", *AUGMENTED]) == EXIT_STOPPED
    parts = start(tmp_path, "parts", *AUGMENTED, "--resume", "latest")
    assert losses(parts).equal(losses(whole)) and len(losses(whole)) == 4
    plain = start(tmp_path, "plain", "--max-steps", "4", "--save-frequency", "0")
    assert not losses(plain).isclose(losses(whole)).any()


def test_two_ranks_change_what_one_process_changes(tmp_path, forked):
    for name, ranks, batch, workers in (("one", 1, 16, 2), ("two", 2, 8, 1)):
        words = [*TINY, *AUGMENTED, "--batch-size", batch, "--workers", workers, "--output", tmp_path]
        assert forked.run(*words, "--name", name, ranks=ranks) == 0, forked.err[-3000:]
    torch.testing.assert_close(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-4, atol=1e-5)
