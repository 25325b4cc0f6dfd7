"""The warning of a run that is still at chance."""

from __future__ import annotations

import pytest
import torch
from training_runs import metrics, words

from prolip.methods.base import CANDIDATES, RECALL, in_batch_recall
from training.health.log import ChanceWatch
from training.main import main


def judged(watch: ChanceWatch, recalls: dict[int, float]) -> list[int]:
    return [step for step, recall in recalls.items() if watch.judge(step, recall)]


def test_it_warns_once_behind_a_tenth_of_the_run():
    assert judged(ChanceWatch(256, 1, 1000), dict.fromkeys(range(50, 1001, 50), 1 / 256)) == [100]
    assert judged(ChanceWatch(64, 4, 990), dict.fromkeys(range(50, 1001, 50), 0.02)) == [100]


def test_it_does_not_warn_of_a_run_that_learns():
    assert judged(ChanceWatch(256, 1, 1000), {50: 0.004, 100: 0.05, 150: 0.004}) == []
    assert judged(ChanceWatch(16, 1, 300), {50: 0.5}) == []


def test_small_batches_are_pooled_until_there_are_256_pairs():
    watch = ChanceWatch(8, 2, 100)
    assert judged(watch, {5: 0.1, 10: 0.1, 15: 0.1}) == []  # 240 pairs
    assert judged(watch, {16: 0.1}) == [16]
    assert judged(ChanceWatch(8, 2, 100), {10: 0.1, 16: 0.9}) == []


def test_a_resumed_run_counts_from_where_it_goes_on():
    watch = ChanceWatch(64, 1, 100, seen=50)
    assert judged(watch, {53: 0.0}) == [] and judged(watch, {54: 0.0}) == [54]


def test_recall_is_of_the_first_rows_by_cosine_and_of_the_first_text():
    image, text = torch.randn(2, CANDIDATES + 9, 7, generator=torch.Generator().manual_seed(0)).double().unbind()
    text += image
    found = in_batch_recall({"image_mean": image, "text_mean": torch.stack([text, -text], 1)})[RECALL]
    cosine = (image @ (text / text.norm(dim=1, keepdim=True)).T)[:CANDIDATES, :CANDIDATES]
    assert found == sum(int(row.argmax()) == i for i, row in enumerate(cosine)) / CANDIDATES > 0
    same = torch.ones(50, 7)
    assert in_batch_recall({"image_mean": same, "text_mean": same})[RECALL] == pytest.approx(1 / 50)  # collapsed
    assert in_batch_recall({"points": image}) == {}


def test_a_run_that_cannot_learn_warns_and_logs_recall_beside_chance(tmp_path, capsys):
    frozen = ["--lock-image", "--lock-text", "--batch-size", 32, "--max-steps", 16, "--log-every-n-steps", 8]
    assert main(words(tmp_path, "frozen", *frozen)) == 0
    text = capsys.readouterr().out
    assert text.count("the model is still at chance: in-batch R@1 is") == 1
    assert "frozen towers (--lock-image, --lock-text)" in text
    assert text.index("warning: step 8") > text.index("step  8/16") and "(chance 3.1%)" in text
    assert all(0 <= line[RECALL] <= 1 for line in metrics(tmp_path / "frozen"))
