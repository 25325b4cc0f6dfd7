"""Resuming a run, or not: refusals change nothing, and no good file is lost."""

from __future__ import annotations

import json
import random
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from training_runs import batches, make, metrics, words

from prolip.utils.flags import FlagError
from training.checkpoint.files import Storage, list_steps, load_checkpoint
from training.checkpoint.resume import restore, save
from training.checkpoint.run_dir import claim, lock_run_dir
from training.config import RunConfig
from training.health.errors import NonFiniteError
from training.main import main
from training.parallel import World


def start(folder: Path, name: str, *more: str) -> Path:
    assert main(words(folder, name, *more)) == 0
    return folder / name


def files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")  # contains a time
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def steps_in(place: Path) -> list[int]:
    return list_steps(Storage(str(place)))


@pytest.mark.parametrize("place", ["own", "memory"])
def test_a_run_that_goes_back_leaves_its_later_checkpoints_behind(tmp_path, place, capsys):
    """`latest` is the newest of the course that was taken, not of the one that was left."""
    where = [] if place == "own" else ["--checkpoint-dir", f"gs://{tmp_path.name}-back"]
    run = start(tmp_path, "run", "--max-steps", 9, "--save-every-steps", 3, *where)
    storage = Storage(str(where[1] if where else run / "checkpoints"))
    start(tmp_path, "run", "--max-steps", 5, "--resume", storage.path("step_3.pt"), *where)
    assert list_steps(storage) == [5, 3]
    assert {"superseded_step_6.pt", "superseded_step_9.pt"} <= set(storage.names())
    assert "step_9.pt is later than step 3, from which the run resumes" in capsys.readouterr().out
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4, 5]


def test_overwriting_deletes_the_runs_checkpoints_wherever_they_lie(tmp_path):
    place = tmp_path / "c"
    start(tmp_path, "run", "--max-steps", 9, "--save-every-steps", 3, "--checkpoint-dir", place)
    (place / "superseded_step_20.pt").touch()
    (place / "notes.txt").touch()
    again = ["--save-every-steps", 1, "--keep-checkpoints", 2, "--checkpoint-dir", place]
    start(tmp_path, "run", "--max-steps", 5, *again, "--overwrite")
    assert steps_in(place) == [5, 4]
    assert {path.name for path in place.iterdir()} == {".lock", "notes.txt", "step_4.pt", "step_5.pt"}


@pytest.mark.parametrize("more", [["--overwrite"], ["--resume", "first/checkpoint"]])
def test_the_checkpoints_of_another_run_are_left_alone(tmp_path, capsys, more):
    """A saved config names its --checkpoint-dir: another run from it must not write there."""
    place = tmp_path / "c"
    first = start(tmp_path, "first", "--max-steps", 2, "--checkpoint-dir", place)
    if more[:1] == ["--resume"]:
        more = ["--resume", start(tmp_path, "other", "--max-steps", 1, "--warmup", 0) / "checkpoints" / "step_1.pt"]
    before = files(place)
    assert main(["--config", str(first / "config.json"), "--name", "second", *map(str, more)]) == 2
    assert "holds the checkpoints of another run, up to step 2: give another --checkpoint-dir" in (
        capsys.readouterr().err
    )
    assert files(place) == before


def test_a_store_that_does_not_answer_is_reported_in_a_line(tmp_path, monkeypatch, capsys):
    class NoCredentials(Exception):
        """An error of a store's own library."""

    def refuse(self):
        raise NoCredentials("unable to locate credentials")

    monkeypatch.setattr(Storage, "names", refuse)
    assert main(words(tmp_path, "run", "--max-steps", 2, "--resume", "gs://far/step_3.pt")) == 2
    assert "--resume gs://far/step_3.pt: gs://far/step_3.pt cannot be read (NoCredentials: unable" in (
        capsys.readouterr().err
    )


def test_a_run_that_began_while_another_waited_for_its_folder_is_not_written_into(tmp_path):
    """Two starts of one name: both found the folder free, the second one gets it when the first is through."""
    folder = tmp_path / "run"
    folder.mkdir()
    held = lock_run_dir(folder)

    def first_run() -> None:
        (folder / "config.json").touch()
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
        held.close()

    threading.Timer(0.3, first_run).start()
    with ExitStack() as stack, pytest.raises(FlagError, match="already holds a run"):
        claim(RunConfig(), folder, Storage(str(folder / "checkpoints")), stack)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may be above 5 MiB: the nearest to a full disk that a test can have for itself."""
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * 2**20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_called_by_its_name_and_leaves_what_was_written_whole(tmp_path, capsys):
    """Writing to a path, torch says `unexpected pos 64 vs 0`."""
    run, more = tmp_path / "run", ["--max-steps", 6, "--save-every-steps", 2, "--keep-checkpoints", 1]
    start(tmp_path, "run", "--max-steps", 2)
    before = files(run / "checkpoints"), files(run / "model")
    with full_disk():
        assert main(words(tmp_path, "run", *more, "--resume", "latest")) == 2
    reported = capsys.readouterr()
    assert "NOT written; the run continues: OSError" in reported.out and "MiB are free on the disk of " in reported.out
    assert f"error: the model was not written to {run} (" in reported.err
    assert "fix this, then --resume auto (with its --name) resumes" in reported.err
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    assert (files(run / "checkpoints"), files(run / "model")) == before
    start(tmp_path, "run", *more, "--resume", "auto")
    assert steps_in(run / "checkpoints") == [6] and [row["step"] for row in metrics(run)] == [1, 2, 3, 4, 5, 6]


def test_a_place_that_cannot_be_written_is_refused_before_the_first_step(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(words(tmp_path, "run", "--max-steps", 2, "--checkpoint-dir", tmp_path / "file/c")) == 2
    assert f"--checkpoint-dir {tmp_path}/file/c cannot be written" in capsys.readouterr().err
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """Train three steps of a run, with a checkpoint after each of the last two."""
    return start(tmp_path_factory.mktemp("runs"), "run", "--max-steps", 3, "--save-every-steps", 2)


@pytest.mark.parametrize(
    "more, message",
    [
        (["--opt", "lion"], "was trained with --opt adamw, but this run has lion: give --opt adamw"),
        (["--method", "siglip"], "was trained with --method prolip, but this run has siglip: give --method prolip"),
        (["--lock-image"], "trained other parameters (model.visual.class_embedding is trained, here missing"),
        (["--force-image-size", "48"], "has another model (model.visual.positional_embedding is (18, 32), here (38"),
        (["--batch-size", "4"], "give --global-batch-size 8"),
        (["--ema-decay", "0.9"], "holds no averaged weights"),
        (["--seed", "4"], "in another order of the data: seed was 0, is 4"),
        (["--max-steps", "2", "--warmup", "0"], "is at step 3 of 2: the run is finished"),
        (["--resume", "2"], "another order"),  # an earlier step, at which the log would be cut
    ],
)
def test_what_is_refused_changes_nothing(stopped, capsys, more, message):
    before = files(stopped)
    if more[0] == "--resume":
        more = ["--resume", str(stopped / "checkpoints" / "step_2.pt"), "--train-num-samples", "72"]
    more = [*([] if "--resume" in more else ["--resume", "latest"]), *more]
    assert main(words(stopped.parent, "run", "--max-steps", 6, *more)) == 2
    assert message in capsys.readouterr().err
    after = files(stopped)
    assert {name for name in before | after if before.get(name) != after.get(name)} <= {".lock"}


def test_settings_that_change_are_reported_and_in_force(tmp_path, capsys):
    bias = ["--init-logit-bias", -10]
    run = start(tmp_path, "run", "--max-steps", 3, *bias)
    more = [*bias, "--wd", 0.5, "--beta2", 0.5, "--logit-lr-mult", 7, "--layer-decay", 0.5, "--lr-scheduler", "const"]
    start(tmp_path, "run", "--max-steps", 4, "--resume", "latest", *more)
    text = capsys.readouterr().out
    for change in ("optim.wd: 0.2 -> 0.5", "optim.beta2: 0.95 -> 0.5", "run.max_steps: 3 -> 4"):
        assert change in text
    states = [load_checkpoint(run / "checkpoints" / f"step_{step}.pt")["optimizer"] for step in (3, 4)]
    groups = {name: group for group in states[1]["param_groups"] for name in group["names"]}
    assert all(group["betas"] == (0.9, 0.5) for group in groups.values())
    assert groups["model.visual.proj"]["weight_decay"] == 0.5 and groups["model.logit_scale"]["weight_decay"] == 0
    assert groups["model.logit_scale"]["lr"] == pytest.approx(7 * 5e-4)
    assert groups["model.visual.conv1.weight"]["lr"] == pytest.approx(0.125 * 5e-4)
    # the other groups hold other numbers of parameters, and each one kept its own moments: one step away from them
    moments = [
        {
            name: state["state"][number]["exp_avg"]
            for group in state["param_groups"]
            for number, name in zip(group["params"], group["names"])
        }
        for state in states
    ]
    assert moments[0].keys() == moments[1].keys() and len(states[0]["param_groups"]) < len(states[1]["param_groups"])
    for name, old in moments[0].items():
        assert old.shape == moments[1][name].shape
        if old.numel() > 500 and old.norm() > 0:
            assert torch.cosine_similarity(old.flatten(), moments[1][name].flatten(), dim=0) > 0.3, name


class Held:
    """Replacement of the writer of checkpoints."""

    def settle(self):
        """Nothing is under way."""

    def submit(self, state):
        self.state = state


def state_of(run) -> dict:
    run.outputs.saver = Held()
    save(run)
    return run.outputs.saver.state


def test_a_loss_scale_goes_on_and_one_that_there_was_not_begins(tmp_path):
    """fp16 after fp16; and after a run without a loss scale, whose checkpoint has none."""
    first, second = (make(tmp_path / name) for name in "ab")
    first.trained.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = state_of(first)
    for changed, scale in (({}, 8.0), ({"scaler": {}}, 2.0)):
        second.trained.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        restore(second, state | changed)
        assert second.trained.scaler.get_scale() == scale


def views_of(run) -> tuple[list, list]:
    batch = next(batches(run))
    prepared = run.trained.objective.prepare(batch, 2)
    places = (prepared["masked_text"] != batch["text"][:2]).nonzero().tolist()
    return prepared["keep"].tolist(), [[column for row, column in places if row == wanted] for wanted in (0, 1)]


def test_a_checkpoint_from_before_version_2_keeps_the_random_numbers_of_its_code(tmp_path, capsys):
    """The views are those of commit 6999e53, whose checkpoints have no version."""
    old, resumed, new = (make(tmp_path / str(n), objective={"mask_fraction": 0.25}, seed=3, draws=n) for n in (1, 2, 2))
    state = state_of(old)
    with pytest.raises(
        FlagError, match=r"have version 3, but this code supports versions 1, 2: resume with the code that"
    ):
        restore(resumed, state | {"draws": 3, "step": 2})
    assert resumed.at.step == 0 and resumed.trained.objective.context.draws.version == 2
    assert state.pop("draws") == 1 and state["config"]["run"].pop("draws") == 1
    restore(resumed, state)
    assert "note: random numbers keep the checkpoint's version 1" in capsys.readouterr().out
    theirs = [[3, 7, 11, 15], [6, 7, 11, 13]], [[1, 2, 3, 4, 5, 7], [0, 1, 2, 4, 5, 6, 7, 8, 9]]
    assert views_of(resumed) == theirs == views_of(old) != views_of(new)
    state = state_of(resumed)  # and so does the next checkpoint, and the config
    assert state["draws"] == state["config"]["run"]["draws"] == 1


def test_a_run_that_allows_fewer_bad_steps_than_it_had_is_refused_before_its_first_step(tmp_path):
    """The gate would stay closed: the run would end successfully without training."""
    first, second = make(tmp_path / "first", max_nonfinite=2), make(tmp_path / "second", max_nonfinite=1)
    first.health.meter.bad_steps = 2
    before = {name: x.clone() for name, x in second.trained.objective.state_dict().items()}
    with pytest.raises(FlagError, match="had 2 non-finite steps, but this run allows 1, .* --max-nonfinite 2 or"):
        restore(second, state_of(first))
    assert all(torch.equal(x, before[name]) for name, x in second.trained.objective.state_dict().items())


def test_steps_that_were_passed_over_count_in_the_whole_run(tmp_path):
    """--max-nonfinite 2, both used up before the checkpoint: the next bad step shuts the gate and stops the run."""
    first, second = (make(tmp_path / name, max_nonfinite=2) for name in "ab")
    first.health.meter.bad_steps = 2
    restore(second, state_of(first))
    assert second.trained.gate.hold(torch.tensor(1.0)) == 0
    assert second.trained.gate.hold(torch.tensor(float("nan"))) == 1
    assert second.trained.gate.hold(torch.tensor(1.0)) == 1
    second.health.meter.add({"loss": torch.tensor(float("nan"))}, 3)
    with pytest.raises(NonFiniteError, match=r"step 3: loss not finite .*--max-nonfinite 2 allows 2"):
        second.health.meter.check(second.world)


def test_every_rank_goes_on_with_its_own_random_state_of_a_checkpoint_that_holds_them(tmp_path, rank=1):
    state, states = state_of(make(tmp_path / "saved")), []
    assert "random" not in state
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(
            {
                "torch": torch.get_rng_state(),
                "python": random.Random(seed).getstate(),
                "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
            }
        )
    run = make(tmp_path / "resumed")
    run.world = World(rank=rank, world_size=2)
    restore(run, state | {"random": states})
    assert torch.equal(torch.get_rng_state(), states[rank]["torch"])
    assert random.getstate() == states[rank]["python"]
    assert not run.trained.seeded  # it goes through the steps
    run.world = World()
    assert "random" not in state_of(run) and run.trained.seeded  # as in a run that resumes from this one
