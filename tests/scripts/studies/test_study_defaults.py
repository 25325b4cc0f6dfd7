"""The study of defaults: its draws of data, its parts, and the initial model of a run."""

from __future__ import annotations

import tarfile

import pytest

from studies.methods import defaults as study_defaults
from training.main import parse


@pytest.fixture
def trained(monkeypatch) -> list[tuple[str, list[str]]]:
    """Record the runs that would be trained, in order, with their flags, without training."""
    found = []

    def note(sweep, variants, folder, jobs):
        run = folder / f"{variants[0]}-s{sweep['seeds'][0]}"
        if not run.exists():
            run.mkdir(parents=True)
            found.append((run.name, ["--config", sweep["recipe"], *study_defaults.sweep.flags_of(sweep, variants[0])]))

    monkeypatch.setattr(study_defaults.sweep, "train_all", note)
    return found


def test_a_subset_is_a_draw_of_whole_samples_and_another_for_every_seed(tmp_path):
    names = []
    for seed in (0, 1):
        with tarfile.open(study_defaults.subset(tmp_path, "emoji", 50, seed)) as shard:
            files = shard.getnames()
        names.append({name.partition(".")[0] for name in files})
        assert len(names[-1]) == 50 and len(files) == 150
    assert len(names[0] & names[1]) < 10
    assert not any("emojione" in name for name in names[0])


def test_parts_make_up_the_study_and_every_command_line_is_one(tmp_path, trained):
    words = ["--sizes", "50", "--starts", "scratch", "--variants", "defaults", "lr-2", "bias-10", "--seeds", "0"]
    for part in (1, 2):
        study_defaults.main(["--out", str(tmp_path), "--part", f"{part}/2", *words])
    second = next(name for name in study_defaults.corpora() if name != "emoji")
    wanted = {f"{corpus}-50-scratch-{v}-s0" for corpus in ("emoji", second) for v in ("defaults", "lr-2", "bias-10")}
    assert {name for name, _ in trained} == wanted and len(trained) == 6
    flags = dict(trained)
    assert parse(flags["emoji-50-scratch-defaults-s0"]).model.init_logit_bias == "auto"
    assert parse(flags["emoji-50-scratch-bias-10-s0"]).model.init_logit_bias == -10
    assert parse(flags["emoji-50-scratch-lr-2-s0"]).optim.lr == 1e-3
