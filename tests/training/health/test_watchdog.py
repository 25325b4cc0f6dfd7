"""A run that stands still says where; one that goes on, or waits for good reason, says nothing."""

from __future__ import annotations

import tempfile
import threading
import time

from training.health.signals import Watchdog


def said_by(act, patience: float) -> str:
    """What a watchdog wrote while `act` ran."""
    with tempfile.TemporaryFile("w+") as stream:
        watchdog = Watchdog(patience, rank=3, stream=stream)
        act(watchdog)
        watchdog.close()
        stream.seek(0)
        return stream.read()


def stuck_here(watchdog):
    watchdog.beat(7)
    time.sleep(1.5)


def test_a_standstill_is_reported_once_with_step_rank_and_stacks():
    text = said_by(stuck_here, 0.3)
    assert text.count("warning: rank 3 has stood still") == 1 and "behind step 7; its threads" in text
    assert "in stuck_here" in text


def test_steps_and_pauses_keep_it_silent():
    def steps(watchdog):
        for step in range(8):
            time.sleep(0.1)
            watchdog.beat(step)

    def evaluation(watchdog):
        with watchdog.pause():
            time.sleep(1.2)

    assert said_by(steps, 0.6) == said_by(evaluation, 0.3) == ""


def test_a_standstill_is_counted_from_the_end_of_a_pause_and_not_while_another_pause_lasts():
    def work_after_a_pause(watchdog):
        with watchdog.pause():
            time.sleep(1.3)
        time.sleep(0.6)

    def one_within_another(watchdog):
        with watchdog.pause():
            with watchdog.pause():
                pass
            time.sleep(1.0)

    def stuck_after_a_pause(watchdog):
        with watchdog.pause():
            pass
        stuck_here(watchdog)

    assert said_by(work_after_a_pause, 1.0) == said_by(one_within_another, 0.3) == ""
    assert "in stuck_here" in said_by(stuck_after_a_pause, 0.3)


def test_a_second_standstill_is_reported_too():
    def twice(watchdog):
        for step in (3, 4):
            watchdog.beat(step)
            time.sleep(0.8)

    text = said_by(twice, 0.3)
    assert text.count("warning: rank 3 has stood still") == 2 and "behind step 4" in text


def test_zero_means_never():
    before = threading.active_count()
    assert said_by(lambda watchdog: time.sleep(0.2), 0) == "" and threading.active_count() == before


def test_a_stream_that_is_closed_does_not_end_the_watch():
    stream = tempfile.TemporaryFile("w+")  # noqa: SIM115
    stream.close()
    watchdog = Watchdog(0.05, rank=0, stream=stream)
    deadline = time.monotonic() + 10
    while not watchdog.reported and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert watchdog.reported and watchdog.thread.is_alive()
    watchdog.close()


STUCK = """
def slow(trained, batch, step, honest=training.loop.training_step):
    import time
    if step == 2 and trained.objective.context.rank == 1:
        time.sleep(6)  # the other rank waits for this one
    return honest(trained, batch, step)
training.loop.training_step = slow
"""


def test_every_rank_of_a_hanging_run_prints_its_stacks(forked, tmp_path):
    code = forked.run(
        "--model",
        "ProLIP-ViT-test",
        "--dataset-type",
        "synthetic",
        "--train-num-samples",
        "64",
        "--batch-size",
        "4",
        "--workers",
        "0",
        "--max-steps",
        "4",
        "--warmup",
        "1",
        "--device",
        "cpu",
        "--stall-seconds",
        "2",
        "--output",
        tmp_path,
        "--name",
        "run",
        ranks=2,
        before=STUCK,
    )
    assert code == 0, forked.err[-3000:]
    for rank in (0, 1):
        assert f"warning: rank {rank} has stood still" in forked.err
    assert "in slow" in forked.err
