"""Meters that do not wait, lines for people, objects for programs."""

from __future__ import annotations

import io
import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training.checkpoint.run_dir import truncate_log
from training.health.nonfinite import LossMeter, NonFiniteError
from training.log import RunLog, Stopwatch, progress_line
from training.parallel import World

WORLD = World()


def test_the_meter_gives_means_since_the_last_reading():
    meter = LossMeter()
    for step, value in enumerate((1.0, 2.0, 6.0), start=1):
        meter.add({"loss": torch.tensor(value), "ppcl": torch.tensor(-value)}, step)
    assert meter.read(WORLD) == {"loss": 3.0, "ppcl": -3.0}
    meter.add({"loss": torch.tensor(5.0)}, 4)
    assert meter.read(WORLD) == {"loss": 5.0}
    assert meter.read(WORLD) == {}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
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


def test_ignored_terms_may_be_infinite():
    meter = LossMeter(ignored=("grad_norm",))
    meter.add({"loss": torch.tensor(1.0), "grad_norm": torch.tensor(float("inf"))}, 1)
    meter.check(WORLD)


def test_ignored_terms_that_are_infinite_stay_out_of_their_mean():
    meter = LossMeter(ignored=("grad_norm",))
    for step, value in enumerate((float("inf"), 2.0, 4.0), start=1):
        meter.add({"loss": torch.tensor(float(step)), "grad_norm": torch.tensor(value)}, step)
    assert meter.read(WORLD) == {"loss": 2.0, "grad_norm": 3.0}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_no_term_of_a_bad_step_enters_the_means(bad):
    """Nor one that is finite: the step left the parameters as they were."""
    meter = LossMeter(ignored=("grad_norm",), allowed=1)
    for step, loss in enumerate((1.0, bad, 3.0), start=1):
        terms = {"loss": loss, "ppcl": 10.0**step, "grad_norm_image": 10.0**step}
        meter.add({name: torch.tensor(value) for name, value in terms.items()}, step)
    assert meter.read(WORLD) == {"loss": 2.0, "ppcl": 505.0, "grad_norm_image": 505.0}


def test_the_stopwatch_leaves_out_what_it_is_told_to_and_adds_what_was_before(monkeypatch):
    now = [50.0]
    monkeypatch.setattr("training.log.time.perf_counter", lambda: now[0])
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
    line = progress_line(shown, 120, 2400, 1.5, 3725, {"bad image": 3}, statistics)
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


def test_metrics_are_one_valid_object_per_line(tmp_path):
    log = RunLog(tmp_path, stream=io.StringIO())
    log.open()
    log.metrics(10, {"loss": 1.0, "grad_norm": float("inf")})
    log.metrics(20, {"loss": 0.5, "faults": {"bad image": 1}})
    log.metrics(20, {"i2t_r1": 0.5}, kind="eval")
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["step"]) for row in rows] == [("train", 10), ("train", 20), ("eval", 20)]
    assert rows[0]["grad_norm"] is None and rows[1]["faults"] == {"bad image": 1}
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_a_resumed_run_drops_what_it_will_write_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10}\n{"step": 20}\n{"step": 30}\n{"step": 4')
    truncate_log(path, 20)
    assert path.read_text() == '{"step": 10}\n{"step": 20}\n'


def test_other_ranks_write_nothing(tmp_path):
    stream = io.StringIO()
    log = RunLog(tmp_path, is_first=False, stream=stream)
    log.say("hello")
    log.metrics(1, {"loss": 1.0})
    log.close()
    assert stream.getvalue() == "" and not list(tmp_path.iterdir())


def points(folder) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: tag -> (step, value)."""
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_curves_of_a_resumed_run_have_every_step_once(tmp_path):
    """Ten was the last step that counts, 20 is done again."""
    for resume_at, steps in ((None, (10, 20)), (10, (20, 30))):
        log = RunLog(tmp_path, stream=io.StringIO())
        log.open(resume_at)
        for step in steps:
            log.metrics(step, {"loss": step + (resume_at or 0.0)})
        log.close()
    assert points(tmp_path)["train/loss"] == [(10, 10.0), (20, 30.0), (30, 40.0)]
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [10, 20, 30]


def test_a_log_that_cannot_be_written_does_not_end_the_run(tmp_path):
    """A full disk: told, and what is written later is whole."""
    stream = io.StringIO()
    log = RunLog(tmp_path, stream=stream)
    log.open()
    honest, log.file = log.file, open("/dev/full", "w", buffering=1)  # noqa: SIM115
    log.metrics(1, {"loss": 1.0})
    assert "warning: the metrics of step 1 were NOT logged, the run goes on: [Errno 28]" in stream.getvalue()
    log.file = honest
    log.metrics(2, {"loss": 1.0})
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 2
