"""A run without progress shows where it is; one that progresses, or waits for a valid reason, shows nothing."""

from __future__ import annotations

import sys
import tempfile
import time

import pytest
from training_runs import words

from training.health.signals import Watchdog


@pytest.fixture
def said(monkeypatch):
    """Returns what a watchdog of a patience wrote while a function ran."""

    def run(act, patience: float) -> str:
        with tempfile.TemporaryFile("w+") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "__stderr__", stream)
            patch.setattr("training.health.signals.say", lambda text: print(text, file=stream, flush=True))
            watchdog = Watchdog(patience, rank=3)
            act(watchdog)
            watchdog.close()
            stream.seek(0)
            return stream.read()

    return run


def stuck_here(watchdog):
    watchdog.beat(7)
    time.sleep(0.5)


def test_a_standstill_shows_stacks_once_and_then_for_how_long_which_rank_stood_still(said):
    def twice(watchdog):
        stuck_here(watchdog)
        watchdog.beat(8)
        time.sleep(0.3)
        watchdog.beat(9)

    text = said(stuck_here, 0.2)
    assert text.count("Timeout (") == 1 and "in stuck_here" in text and "warning" not in text
    text = said(twice, 0.2)
    assert text.count("Timeout (") == 2 and "rank 3 made no progress for 1 s before step 8" in text.replace(
        "0 s", "1 s"
    )


def test_steps_and_pauses_keep_it_silent_and_a_standstill_counts_from_their_end(said):
    def steps(watchdog):
        for step in range(4):
            time.sleep(0.1)
            watchdog.beat(step)

    def pauses(watchdog):
        with watchdog.pause():
            with watchdog.pause():
                pass
            time.sleep(0.5)
        time.sleep(0.1)
        watchdog.beat(1)

    def stuck_after_a_pause(watchdog):
        with watchdog.pause():
            pass
        stuck_here(watchdog)

    assert said(steps, 0.4) == said(pauses, 0.3) == said(lambda watchdog: time.sleep(0.2), 0) == ""
    assert "in stuck_here" in said(stuck_after_a_pause, 0.3)


STUCK = """
def slow(trained, batch, step, honest=training.loop.training_step):
    import time
    if step == 2 and trained.objective.context.rank == 1:
        time.sleep(2)  # the other rank waits for this one
    return honest(trained, batch, step)
training.loop.training_step = slow
"""


def test_every_rank_of_a_hanging_run_prints_its_stacks(forked, tmp_path):
    line = words(tmp_path, "run", "--batch-size", 4, "--max-steps", 4, "--stall-seconds", 1)
    assert forked.run(*line, ranks=2, before=STUCK) == 0, forked.err[-3000:]
    assert forked.err.count("Timeout (") == 2 and "in slow" in forked.err
    assert all(f"rank {rank} made no progress for" in forked.err for rank in (0, 1))
