"""Output that dies and signals that come do not cost a run anything: it ends with the model of an undisturbed one."""

from __future__ import annotations

import itertools
import os
import random
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from training_runs import status, steps_done

from forked import until

STEPS = 8
WORDS = shlex.split(
    "--dataset-type synthetic --train-num-samples 48 --model ProLIP-ViT-test --precision fp32 --device "
    f"cpu --batch-size 8 --workers 1 --warmup 1 --log-every-n-steps 1 --max-steps {STEPS} --ledger --no-report"
)
# A save that takes as long as a test needs.
SLOW_SAVE = "import time; training.loop.save = lambda run, save=training.loop.save: (save(run), time.sleep(60))"
SLOW_BUILD = "import time; training.run.parts.build_model = lambda *_: time.sleep(60)"
# Steps that take a while, so that what is done to a run is done before it ends.
SLOW_STEP = (
    "import time\nhonest = training.loop.training_step\n"
    "training.loop.training_step = lambda *more: (time.sleep(0.1), honest(*more))[1]"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(forked, runs) -> Path:
    """The undisturbed run."""
    assert forked.run(*WORDS, "--output", runs, "--name", "whole") == 0, forked.err
    return runs / "whole"


def words(runs: Path, name: str, *more: object) -> list[object]:
    return [*WORDS, "--output", runs, "--name", name, *more]


def assert_same(run: Path, whole: Path) -> None:
    for name in ("model/model.safetensors", "ledger/rank_0.jsonl"):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_run_that_has_ended_and_lost_its_model_writes_it_again(forked, runs, whole):
    """Evaluation advises this, and the resume refused: there was nothing left to train."""
    shutil.copytree(whole, runs / "lost")
    shutil.rmtree(runs / "lost" / "model")
    assert forked.run(*words(runs, "lost", "--resume", "latest")) == 0, forked.err
    assert_same(runs / "lost", whole)
    assert forked.run(*words(runs, "lost", "--resume", "latest")) == 2 and "the run is finished" in forked.err


STREAMS = ["closed", "/dev/full", "head:1", "head:700"]
PAIRS = [("/dev/full", ""), ("head:1", "closed")]
NONE = [("closed", "same")]  # a shell refuses `>&- 2>&1`
EVERY = [pair for pair in itertools.product([*STREAMS, ""], [*STREAMS, "same", ""]) if pair not in [*PAIRS, *NONE]]


@pytest.mark.parametrize("out, err", [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in EVERY)])
def test_a_run_whose_output_dies_ends_as_an_undisturbed_one(forked, runs, whole, out, err):
    run = runs / f"run{out}-{err}".translate(str.maketrans("/:", "__"))
    assert forked.run(*words(runs, run.name), out=out, err=err) == 0
    assert_same(run, whole)
    assert status(run)["state"] == "finished" and steps_done(run) == STEPS
    if out in STREAMS[1:] and not err:
        reported = "Broken pipe" if "head" in out else "No space left on device"
        assert forked.err.count("\n") == 1 and "warning: cannot write to stdout ([Errno " in forked.err
        assert reported in forked.err and reported in status(run)["lost_output"]["stdout"]


SENT = ["SIGINT", "SIGHUP", pytest.param("SIGTERM", marks=pytest.mark.slow)]
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))]


@pytest.mark.parametrize("name", SENT)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_stop_signal_to_all_processes_leaves_a_checkpoint_that_goes_on_bit_for_bit(forked, runs, whole, name, seed):
    rng, run = random.Random(f"{name}{seed}"), runs / f"{name}{seed}"
    moment = rng.randint(1, STEPS - 3)
    forked.start(*words(runs, run.name), before=SLOW_STEP)
    until(lambda: steps_done(run) >= moment)
    time.sleep(rng.uniform(0, 0.1))
    forked.send(getattr(signal, name))
    assert forked.end() == 75, forked.err
    at = status(run)
    assert at["state"] == "stopped" and at["exit_code"] == 75 and f"{name} at step {at['step']} of" in at["reason"]
    assert forked.err.splitlines()[0].startswith(f"{name} received: the run will finish its step, save and stop")
    assert forked.err.splitlines()[1] == f"stopped: {at['reason']}. Resume with:" and len(forked.err.splitlines()) == 3
    assert forked.run(*words(runs, run.name, "--resume", "latest")) == 0, forked.err
    assert_same(run, whole)


def test_a_signal_that_nohup_ignores_stays_ignored(forked, runs, whole):
    run = runs / "nohup"
    forked.start(*words(runs, run.name), before=SLOW_STEP, ignored=("SIGHUP", "SIGINT"))
    until(lambda: steps_done(run) >= 1)
    forked.send(signal.SIGHUP)
    forked.send(signal.SIGINT)
    assert forked.end() == 0 and forked.err == ""
    assert_same(run, whole)


def test_a_second_ctrl_c_leaves_at_once_and_a_save_is_never_half(forked, runs, whole):
    """The first one of two at the same moment is the same: launchers send it to a process and to its group."""
    run = runs / "twice"
    forked.start(*words(runs, run.name), before=SLOW_SAVE)
    until(lambda: steps_done(run) >= 2)
    forked.send(signal.SIGINT)
    forked.send(signal.SIGINT)
    time.sleep(0.7)
    assert status(run)["state"] == "running"
    begun = time.monotonic()
    forked.send(signal.SIGINT)
    assert forked.end() == 130 and time.monotonic() - begun < 5
    assert "SIGINT again: stopped immediately; --resume auto (with its --name) resumes" in forked.err
    assert status(run)["state"] == "failed" and "interrupted immediately" in status(run)["reason"]
    assert status(run)["checkpoint"]  # it was whole, though the run still slept in its saving
    assert forked.run(*words(runs, run.name, "--resume", "auto")) == 0, forked.err
    assert_same(run, whole)


def test_ctrl_c_before_the_first_step_is_heard_and_twice_leaves_nothing_behind_that_hinders(forked, runs, whole):
    """The advice of that moment is true: there is no checkpoint."""
    run = runs / "early"
    forked.start(
        *words(runs, run.name), before=SLOW_BUILD
    )
    time.sleep(0.3)
    forked.send(signal.SIGINT)
    time.sleep(0.7)
    forked.send(signal.SIGINT)
    assert forked.end() == 130
    assert "--resume auto (with its --name) resumes from the newest checkpoint, or starts again" in forked.err
    assert not (run / "status.json").exists()
    assert forked.run(*words(runs, run.name, "--resume", "auto")) == 0, forked.err
    assert_same(run, whole)


def test_a_try_that_was_killed_is_noted_by_the_next_one_though_that_is_refused(forked, runs):
    run = runs / "killed"
    forked.start(*words(runs, run.name), before=SLOW_STEP)
    until(lambda: steps_done(run) >= 1)
    forked.send(signal.SIGKILL)
    assert forked.end() == -9 and status(run)["state"] == "running"
    assert forked.run(*words(runs, run.name, "--resume", "auto", "--method", "siglip", "--pretrained", "no.pt")) == 2
    assert status(run)["state"] == "running"  # the folder was not even looked at
    assert forked.run(*words(runs, run.name, "--resume", run / "nothing.pt")) == 2
    assert status(run)["state"] == "failed" and status(run)["checkpoint"] is None


def test_a_killed_worker_is_reported_in_a_line_and_its_advice_goes_on(forked, runs, whole):
    run, cause = runs / "worker", "was killed by signal: Killed, most likely by the kernel, out of memory"
    forked.start(*words(runs, run.name, "--save-every-steps", 1, "--prefetch", 2), before=SLOW_STEP)
    until(lambda: steps_done(run) >= 2)
    os.kill(forked.workers()[0], signal.SIGKILL)
    assert forked.end() == 2
    (line,) = forked.err.splitlines()
    assert line.startswith("error: a worker of the data loader (process ") and cause in line and "--prefetch" in line
    assert status(run)["state"] == "failed" and cause in status(run)["reason"]
    assert forked.run(*words(runs, run.name, "--prefetch", 1, "--resume", "auto")) == 0, forked.err
    assert_same(run, whole)


SMALL_SHM = """
import ctypes, subprocess
mounts = ["--make-rprivate", "/"], ["-t", "tmpfs", "-o", "size=450k", "none", "/dev/shm"]
if ctypes.CDLL(None).unshare(0x20000) or any(subprocess.run(["mount", *words]).returncode for words in mounts):
    os._exit(99)
"""


def test_a_full_dev_shm_is_reported_in_a_line_and_its_advice_goes_on(forked, runs, whole):
    """Python's queue drops an item that its thread cannot send, and the run would wait for it, or continue without."""
    run, settings = runs / "shm", {"before": SMALL_SHM}
    if (code := forked.run(*words(runs, "shm", "--prefetch", 6), **settings)) == 99:
        pytest.skip("no file system may be mounted here")
    assert code == 2 and forked.err.count("\n") == 1, forked.err
    assert all(word in forked.err for word in ("unable to allocate shared memory", "--shm-size", "--prefetch"))
    assert forked.run(*words(runs, "shm", "--prefetch", 1, "--resume", "auto"), **settings) == 0, forked.err
    assert_same(run, whole)


def test_what_a_worker_cannot_hand_on_ends_it(forked, runs):
    """Any error of its queue's thread ends it."""
    before = """
import multiprocessing.reduction as reduction
import torch.multiprocessing.reductions as reductions
def fail(*_): raise OSError(24, "Too many open files")
reduction.DupFd = reductions.reduction.DupFd = fail
"""
    assert forked.run(*words(runs, "dropped"), before=before) == 2
    first, second = forked.err.splitlines()
    assert first == "a worker of the data loader cannot send its samples: OSError: [Errno 24] Too many open files"
    assert second.startswith("error: a worker of the data loader (process ") and "ended without a message" in second


def test_a_rank_hears_of_its_launchers_end_by_any_signal(forked, runs):
    """torchrun under nohup hands SIGHUP on to ranks that ignore it as well, and kills them next."""
    run, before = runs / "rank", SLOW_STEP + "\nos.environ['TORCHELASTIC_RUN_ID'] = 'x'; STOP.install()"
    forked.start(*words(runs, run.name), ignored=("SIGHUP",), before=before)
    until(lambda: steps_done(run) >= 1)
    forked.send(signal.SIGHUP)
    assert forked.end() == 75 and status(run)["state"] == "stopped"
