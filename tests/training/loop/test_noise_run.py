"""Runs on shuffled captions: noise is written down, the same on all ranks, and the same when the run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from training_runs import TINY, metrics, start, stop_after

from training.health.signals import EXIT_STOPPED
from training.main import main

NOISE = ["--noise-ratio", "0.2", "--max-steps", "6", "--save-frequency", "0"]


def swaps(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "noise.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / "step_6.pt", weights_only=True)["objective"]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in metrics(folder) if "loss" in row]


def test_a_noisy_run_goes_on_bit_for_bit_and_says_what_it_shuffled(tmp_path, capsys):
    whole = start(tmp_path, "whole", *NOISE)
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("noise: "))
    found = swaps(whole)
    changed = sum(line["own"] != line["given"] for line in found)
    assert f"noise: {len(found):,} of " in said and said.endswith(f"(20.0%) shuffled, {changed:,} changed text")
    command = [*TINY, "--output", str(tmp_path), "--name", "parts", *NOISE]
    assert stop_after(2, command) == EXIT_STOPPED
    parts = start(tmp_path, "parts", *NOISE, "--resume", "latest")
    assert swaps(parts) == found and losses(parts) == losses(whole)
    first, second = weights(whole), weights(parts)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_other_noise_is_not_gone_on_with(tmp_path, capsys):
    assert stop_after(2, [*TINY, "--output", str(tmp_path), "--name", "run", *NOISE]) == EXIT_STOPPED
    before = (tmp_path / "run" / "noise.jsonl").read_bytes()
    command = [*TINY, "--output", str(tmp_path), "--name", "run", *NOISE, "--resume", "latest"]
    for words in (["--noise-ratio", "0.5"], ["--noise-seed", "1"], ["--noise-ratio", "0"]):
        capsys.readouterr()
        assert main([*command, *words]) == 2
        assert "captions had other noise" in capsys.readouterr().err
    assert (tmp_path / "run" / "noise.jsonl").read_bytes() == before


def test_ranks_read_a_share_each_and_shuffle_as_one(tmp_path, forked):
    for name, ranks, batch, workers in (("one", 1, 16, 2), ("two", 2, 8, 1)):
        words = [*TINY, *NOISE, "--batch-size", batch, "--workers", workers, "--output", tmp_path, "--name", name]
        assert forked.run(*words, "--seed", 3, ranks=ranks) == 0, forked.err[-3000:]
    one, two = (tmp_path / name for name in ("one", "two"))
    assert swaps(one) == swaps(two) and len(swaps(one)) > 100
    torch.testing.assert_close(torch.tensor(losses(two)), torch.tensor(losses(one)), rtol=1e-4, atol=1e-5)
