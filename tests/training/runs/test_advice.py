"""What a run advises when it is refused or ends is true at that moment: typed, it leads to a run that ends well."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest
from training_runs import words

from training.checkpoint.files import list_steps
from training.checkpoint.run_dir import write_status
from training.checkpoint.storage import Storage
from training.health.errors import explain
from training.main import main

STEPS = 3
# What may be left of a run, and how it is asked for again.
LEFT = ["nothing", "lock", "config", "killed before", "killed behind", "failed", "finished", "no checkpoint", "damaged"]
LEFT += ["newest damaged", "elsewhere", "elsewhere damaged"]
ASKED = [[], ["--resume", "latest"], ["--resume", "auto"], ["--resume", "missing.pt"]]
CASES = [(left, asked, place) for left in LEFT for asked in ASKED for place in (False, True)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run that has ended, with two checkpoints."""
    folder = tmp_path_factory.mktemp("finished")
    assert main(words(folder, "run", "--max-steps", STEPS, "--save-every-steps", 2)) == 0
    return folder / "run"


def leave(left: str, finished: Path, folder: Path) -> None:
    """What is there of the run, in folder/run; checkpoints `elsewhere` in folder/c."""
    run, place = folder / "run", folder / "run" / "checkpoints"
    if left in ("nothing", "lock", "config"):
        if left != "nothing":
            run.mkdir()
            (run / ".lock").touch()
        if left == "config":
            shutil.copy(finished / "config.json", run)
        return
    shutil.copytree(finished, run)
    if left.startswith("elsewhere"):
        place = shutil.move(place, folder / "c")
        config = json.loads((run / "config.json").read_text())
        config["run"]["checkpoint_dir"] = str(place)
        (run / "config.json").write_text(json.dumps(config))
    if left in ("killed before", "no checkpoint"):
        shutil.rmtree(place)
    states = {"killed": "running", "failed": "failed", "elsewhere": "stopped"}
    if state := states.get(left.split()[0]):
        write_status(run, state)
    if left == "killed behind":
        (place / f"step_{STEPS}.pt").unlink()
    if "damaged" in left:
        for step in list_steps(Storage(str(place)))[: 1 if "newest" in left else 2]:
            path = place / f"step_{step}.pt"
            path.write_bytes(path.read_bytes()[:1000])


def follow(asked: list[str], said: str, folder: Path) -> list[str]:
    """The flags with the first thing in their place that was advised and can be typed as it stands."""
    if given := re.search(r"give (--checkpoint-dir \S+?)[,:]? ", said):
        return [*asked, *given[1].split()]
    if "larger --epochs or --max-steps" in said:
        return [*asked, "--max-steps", str(STEPS + 2)]
    if found := re.findall(r"--resume (auto|latest)", said):
        advised = [word for word in found if word not in asked or len(found) == 1]
        if advised and not said.startswith(f"error: --resume {advised[0]} found no"):
            return [*without(asked, "--resume"), "--resume", advised[0]]
    if "give another --checkpoint-dir" in said:
        return [*without(without(asked, "--checkpoint-dir"), "--resume"), "--checkpoint-dir", str(folder / "another")]
    assert "--overwrite" in said, said
    return [*without(asked, "--resume"), "--overwrite"]


def without(flags: list[str], flag: str) -> list[str]:
    if flag not in flags:
        return flags
    at = flags.index(flag)
    return flags[:at] + flags[at + 2 :]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 16))])
def test_advice_is_never_a_circle(tmp_path, finished, capsys, seed):
    """Six of all cases by default, all of them in the slow profile."""
    for number, (left, asked, place) in enumerate(random.Random(7).sample(CASES, len(CASES))[seed::16]):
        folder = tmp_path / str(number)
        folder.mkdir()
        leave(left, finished, folder)
        begun = [*asked, *(["--checkpoint-dir", str(folder / "c")] if place else [])]
        flags, tried = begun, []
        while main(words(folder, "run", "--max-steps", STEPS, *flags)) != 0:
            said = capsys.readouterr().err
            assert said.startswith("error: ") and said.count("\n") == 1, said
            tried.append((flags, said))
            flags = follow(flags, said, folder)
            assert flags not in [flags for flags, _ in tried] and len(tried) < 4, (left, begun, tried)
        capsys.readouterr()
        assert json.loads((folder / "run" / "status.json").read_text())["state"] == "finished"


def test_checkpoints_elsewhere_are_gone_on_from_and_without_them_a_log_is_not_written_over(tmp_path, finished, capsys):
    words_ = words(tmp_path, "run", "--max-steps", STEPS + 2, "--resume", "auto")
    leave("no checkpoint", finished, tmp_path)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert main(words_) == 2 and "no checkpoint to resume from" in capsys.readouterr().err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    shutil.rmtree(tmp_path / "run")
    leave("elsewhere", finished, tmp_path)
    assert main(words_) == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes().startswith(before)
    assert (tmp_path / "c" / f"step_{STEPS + 2}.pt").exists()


SYSTEM = {
    "DataLoader worker (pid 7) is killed by signal: Killed. ": "(process 7) was killed by signal: Killed, most",
    "DataLoader worker (pid(s) 7, 8) exited unexpectedly": "(process 7, 8) ended without a word, most likely by",
    "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that": "Bus error, most likely /dev/shm",
    "Too many open files. Communication with the workers is no longer possible": "`ulimit -n`",
    "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)": "--shm-size",
    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried": "this process got no more memory",
    "[gloo/transport/tcp/pair.cc:545] Read error [::1]:9: Connection reset by peer": "another rank ended",
    "[gloo/transport/tcp/pair.cc:5] writev [::1]:9: Broken pipe": "another rank ended",
}


@pytest.mark.parametrize("text", SYSTEM)
def test_what_the_system_does_to_a_run_is_reported_in_a_line(text):
    line = explain(RuntimeError(text))
    assert line is not None and SYSTEM[text] in line and "\n" not in line


def test_the_signal_that_ended_a_worker_is_found_behind_what_torch_met_next():
    try:
        try:
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
        except RuntimeError as first:
            raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly") from first
    except RuntimeError as error:
        assert "killed by signal: Killed" in (explain(error) or "")
