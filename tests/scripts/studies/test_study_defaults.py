"""The study of defaults: its draws of data, its parts, and what a run goes on with."""

from __future__ import annotations

import tarfile

import pytest

from studies.methods import defaults as study_defaults
from training.main import parse


@pytest.fixture
def trained(monkeypatch) -> list[tuple[str, list[str]]]:
    """What would be trained, in order, with its flags; nothing is."""
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


def test_a_run_from_trained_weights_has_the_other_corpuss_model_trained_first(tmp_path, trained):
    words = ["--sizes", "50", "--starts", "trained", "--variants", "no-clip", "--seeds", "2", "--part", "1/2"]
    study_defaults.main(["--out", str(tmp_path), *words])
    second = next(name for name in study_defaults.corpora() if name != "emoji")
    assert [name for name, _ in trained] == [f"{second}-3000-scratch-defaults-s0", "emoji-50-trained-no-clip-s2"]
    config = parse(trained[1][1])
    assert config.model.pretrained == str(tmp_path / f"{second}-3000-scratch-defaults-s0" / "model")
    assert config.optim.grad_clip_norm is None
    assert config.val.val_data == ("emoji:data/emoji/emojione.tar",)  # by the suite whose figures the table reads


def test_tables_have_a_row_for_a_setting_and_a_column_for_so_much_of_a_corpus(monkeypatch, tmp_path, capsys):
    ended = {"emoji-50-trained-defaults": 12.0, "emoji-50-trained-no-clip": 9.0, "emoji-300-trained-defaults": 20.0}

    def results(folder, case, seeds, evaluation="eval"):
        value = ended.get(case.name)
        return [] if value is None else [{study_defaults.KEY: value + (evaluation == study_defaults.KEPT)}]

    monkeypatch.setattr(study_defaults, "results", results)
    monkeypatch.setattr(study_defaults, "value_of", lambda found: found / 100)
    monkeypatch.setattr(
        study_defaults,
        "gain",
        lambda first, second, keys: {key: f"{second[0][key] - first[0][key]:+.1f}" for key in keys},
    )
    page = tmp_path / "page.md"
    page.write_text(
        "".join(f"<!-- {name}: by scripts/studies/methods/defaults.py -->\n" * 2 for name in ("trained", "kept"))
    )
    study_defaults.main(["--out", str(tmp_path), "--tables-only", "--starts", "trained", "--write", str(page)])
    lines = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    assert lines[0][:4] == ["| setting", "emoji 50", "emoji 300", "emoji 3,000"]
    assert [line[:4] for line in lines[1:3]] == [
        ["| defaults", "12.0", "20.0", ""],
        ["| `--grad-clip-norm none`", "-3.0", "", ""],
    ]
    assert [line[:3] for line in lines[4:]] == [
        ["| before", "-", "-"],
        ["| defaults", "13.0", "21.0"],
        ["| `--grad-clip-norm none`", "10.0", ""],
    ]
