"""Meters that do not wait, lines for people, objects for programs."""

from __future__ import annotations

import io
import json
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_runs import metrics

from training.checkpoint.run_dir import Ledger
from training.health.errors import LossMeter, NonFiniteError
from training.health.log import RunLog, Stopwatch, progress_line
from training.parallel import World

WORLD = World()


def test_the_meter_gives_means_since_the_last_reading():
    meter = LossMeter()
    for step, value in enumerate((1.0, 2.0, 6.0), start=1):
        meter.add({"loss": torch.tensor(value), "ppcl": torch.tensor(-value)}, step)
    assert meter.read(WORLD) == {"loss": 3.0, "ppcl": -3.0}
    meter = LossMeter(allowed=1)  # no term of a bad step, though it is finite
    for step, loss in enumerate((1.0, float("nan"), 3.0), start=1):
        meter.add({"loss": torch.tensor(loss), "ppcl": torch.tensor(10.0**step)}, step)
    assert meter.read(WORLD) == {"loss": 2.0, "ppcl": 505.0}
    assert meter.read(WORLD) == {}


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_the_first_step_and_term_that_are_not_finite_are_named(bad):
    meter = LossMeter()
    for step in range(1, 8):
        values = {"loss": 1.0, "vib": 1.0, "ppcl": 1.0}
        if step >= 4:
            values |= {"loss": bad, "vib": bad}
        if step >= 6:
            values["ppcl"] = bad
        meter.add({name: torch.tensor(value) for name, value in values.items()}, step)
    with pytest.raises(NonFiniteError, match="^step 4: loss, vib not finite"):
        meter.check(WORLD)


def test_the_step_that_is_one_too_many_is_named_with_its_first_samples_and_how_many_more_there_were():
    meter = LossMeter(allowed=2)
    meter.add({"loss": torch.tensor(float("nan"))}, 1, ["a", "b"])
    assert meter.check(WORLD) == ["step 1: loss not finite (samples a, b)"]
    for step in (3, 4, 5):
        meter.add({"loss": torch.tensor(float("nan"))}, step, [f"{step}{letter}" for letter in "abcdefg"])
    with pytest.raises(NonFiniteError, match=r"^step 4: loss not finite \(samples 4a, 4b, 4c, 4d, 4e and 2 more\)"):
        meter.check(WORLD)
    assert meter.bad_steps == 4


def test_ignored_terms_that_are_infinite_stay_out_of_their_mean():
    meter = LossMeter(ignored=("grad_norm",))
    for step, value in enumerate((float("inf"), 2.0, 4.0), start=1):
        meter.add({"loss": torch.tensor(float(step)), "grad_norm": torch.tensor(value)}, step)
    assert meter.read(WORLD) == {"loss": 2.0, "grad_norm": 3.0}


def test_the_stopwatch_leaves_out_what_it_is_told_to_and_adds_what_was_before(monkeypatch):
    now = [50.0]
    monkeypatch.setattr("training.health.log.time.perf_counter", lambda: now[0])
    watch = Stopwatch(before=1000.0)
    now[0], watch.samples, watch.waited = 150.0, 640, 8.0
    watch.pause(60.0)  # of the hundred seconds
    assert watch.elapsed() == 1040.0
    assert watch.lap() == {"samples_per_second": 16.0, "data_wait": 0.2}
    now[0], watch.samples = 160.0, 20
    assert watch.lap() == {"samples_per_second": 2.0, "data_wait": 0.0} and watch.elapsed() == 1050.0


def values(**more: float) -> dict[str, float]:
    return {"loss": 2.0, "ppcl": 1.5, "lr": 1e-3, "samples_per_second": 512.3, "data_wait": 0.031} | more


def test_the_progress_line_holds_what_a_person_looks_for():
    shown = values(scale=10.02, bias=-9.87, trace_image=0.012, trace_text=0.034, grad_norm=1.25)
    statistics = ("scale", "bias", "trace_image", "trace_text")
    line = progress_line(shown, (120, 2400, 1.5), 3725, {"bad image": 3}, statistics)
    for part in (
        "step  120/2400 (5%) epoch 1.5",
        "loss 2  (ppcl 1.5)",
        "scale 10.02  bias -9.87  trace image 0.012 text 0.034",
        "grad 1.25",
        "lr 1.00e-03",
        "512 samples/s  data wait 3%",
        "ETA 1:02:05",
        "faults bad image=3",
    ):
        assert part in line
    assert "\n" not in line


def points(folder) -> dict[str, list[tuple[int, float]]]:
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_curves_of_a_resumed_run_have_every_step_once(tmp_path):
    """Ten was the last step that counts, 20 is done again."""
    for resume_at, steps in ((None, (10, 20)), (10, (20, 30))):
        log = RunLog(tmp_path, stream=io.StringIO())
        log.open(resume_at)
        for step in steps:
            more = {"grad_norm": float("inf"), "faults": {"bad image": 1}} if step == 30 else {}
            log.metrics(step, {"loss": step + (resume_at or 0.0), **more})
        log.metrics(steps[-1], {"i2t_r1": 0.5}, kind="eval")
        log.close()
        time.sleep(1)  # TensorBoard reads files by the second in their names
    assert points(tmp_path)["train/loss"] == [(10, 10.0), (20, 30.0), (30, 40.0)]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["step"]) for row in rows] == [*(("train", n) for n in (10, 20, 30)), ("eval", 30)]
    assert rows[2]["grad_norm"] is None and rows[2]["faults"] == {"bad image": 1}


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")  # a trace that users would see
def test_a_tensorboard_that_cannot_write_is_reported_once_and_the_run_goes_on(tmp_path):
    stream = io.StringIO()
    log = RunLog(tmp_path, stream=stream)
    log.open()
    writer = log.board._get_file_writer().event_writer._async_writer
    writer._writer._writer = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    for step in (1, 2, 3):
        log.metrics(step, {"loss": 1.0})
        writer._worker.join(10)  # its thread ends by the error
    log.close()
    said = stream.getvalue()
    assert said.count("NOT logged; the run continues") == 1 and "No space left on device (TensorBoard)" in said
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3]


def test_a_ledger_that_cannot_be_written_is_reported_once_and_the_run_goes_on(tmp_path, capfd):
    ledger = Ledger(tmp_path, rank=0)
    ledger.file = open("/dev/full", "w", buffering=2**16)  # noqa: SIM115
    for step in (1, 2):
        ledger.write(step, 0, ["a"])
        ledger.flush()
    ledger.close()
    said = capfd.readouterr().err
    assert said.count("warning: ") == 1 and "rank_0.jsonl; later steps are missing" in said


def test_a_log_that_cannot_be_written_does_not_end_the_run(tmp_path):
    """A full disk is reported, and later lines are complete."""
    stream = io.StringIO()
    log = RunLog(tmp_path, stream=stream)
    log.open()
    honest, log.file = log.file, open("/dev/full", "w", buffering=1)  # noqa: SIM115
    log.metrics(1, {"loss": 1.0})
    assert "warning: the metrics of step 1 were NOT logged; the run continues: [Errno 28]" in stream.getvalue()
    log.file = honest
    log.metrics(2, {"loss": 1.0})
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 2
