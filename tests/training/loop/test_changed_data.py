"""Runs on shuffled captions and augmented inputs: the same on all ranks, and the same when the run resumes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from training_runs import TINY, assert_same_state, metrics, newest, start, stop_after

from training.health.signals import EXIT_STOPPED
from training.main import main

NOISE = shlex.split("--noise-ratio 0.2 --max-steps 4 --save-frequency 0")
AUGMENTED = shlex.split(
    "--text-mask 0.1 --text-random 0.1 --text-delete 0.2 --word-drop 0.2 --cutout 0.4 "
    "--cutout-prob 0.5 --erase-prob 0.5 --max-steps 4 --save-frequency 0"
)
CHANGED = pytest.mark.parametrize("changed", [NOISE, AUGMENTED], ids=["noise", "augmented"])


def swaps(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "noise.jsonl").read_text().splitlines()]


def losses(folder: Path) -> torch.Tensor:
    return torch.tensor([row["loss"] for row in metrics(folder) if "loss" in row])


@CHANGED
def test_a_run_goes_on_bit_for_bit_with_the_same_changes(tmp_path, capsys, changed):
    whole = start(tmp_path, "whole", *changed)
    said = capsys.readouterr().out
    assert stop_after(2, [*TINY, "--output", str(tmp_path), "--name", "parts", *changed]) == EXIT_STOPPED
    parts = start(tmp_path, "parts", *changed, "--resume", "latest")
    assert losses(parts).equal(losses(whole)) and len(losses(whole)) == 4
    assert_same_state(newest(whole), newest(parts))
    if changed is NOISE:
        said, found = next(line for line in said.splitlines() if line.startswith("noise: ")), swaps(whole)
        moved = sum(line["own"] != line["given"] for line in found)
        assert f"noise: {len(found):,} of " in said and said.endswith(f"(20.0%) shuffled, {moved:,} changed text")
        assert swaps(parts) == found
    else:
        plain = start(tmp_path, "plain", "--max-steps", "4", "--save-frequency", "0")
        assert not losses(plain).isclose(losses(whole)).any()


def test_other_noise_is_not_gone_on_with(tmp_path, capsys):
    command = [*TINY, "--output", str(tmp_path), "--name", "run", *NOISE]
    assert stop_after(2, command) == EXIT_STOPPED
    before = (tmp_path / "run" / "noise.jsonl").read_bytes()
    assert main([*command, "--resume", "latest", "--noise-seed", "1"]) == 2
    assert "captions had other noise" in capsys.readouterr().err
    assert (tmp_path / "run" / "noise.jsonl").read_bytes() == before


def test_two_ranks_change_what_one_process_changes(tmp_path, forked):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, ranks, batch, workers in ((one, 1, 16, 2), (two, 2, 8, 1)):
        place = ["--batch-size", batch, "--workers", workers, "--output", tmp_path, "--name", folder.name]
        assert forked.run(*TINY, *AUGMENTED, *NOISE, *place, "--seed", 3, ranks=ranks) == 0, forked.err[-3000:]
    torch.testing.assert_close(losses(two), losses(one), rtol=1e-4, atol=1e-5)
    assert swaps(one) == swaps(two) and len(swaps(one)) > 100
