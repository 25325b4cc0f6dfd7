"""The benchmark of BPRW agrees with its loop, and the study's table has the figures of the evaluation's commands."""

import re

import pytest
from commands import evaluate
from miniatures import prolip_folder

from bench.use import prompts as bench_prompts
from prolip.corpora.emoji import corpus as emoji
from studies.use import prompts as study_prompts


def test_the_loop_of_the_benchmark_finds_the_same_weights(capsys):
    bench_prompts.main(["--classes", "3", "--prompts", "5", "--points", "9", "--dim", "16", "--loop", "--alpha", "2"])
    out = capsys.readouterr().out
    assert "3 classes, 5 prompts, 9 points" in out and re.search(r"^alpha 2: [\d.]+ s", out, re.M)
    assert float(re.search(r"differ by (\S+)", out)[1]) < 1e-5


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Random models of two seeds of three that are asked for, and a corpus of few subgroups."""
    folder = tmp_path_factory.mktemp("study_prompts")
    for seed in (0, 1):
        prolip_folder(folder / f"prolip-s{seed}/model", seed)
    return folder


def test_the_table_has_the_commands_figures_and_what_is_not_trained(runs, monkeypatch, capsys):
    read = emoji.read
    some = "subgroup=food fruit|animal bird|food sweet|face smiling|sky weather|plant flower"
    monkeypatch.setattr(emoji, "read", lambda shards: read(shards).select(some))
    rules = ["all", "below:1", "top-K", "best", "bprw", "bprw:3"]
    words = ["--runs", str(runs), "--methods", "prolip", "pcme", "--work", str(runs / "work"), "--prompts", "4"]
    study_prompts.main([*words, "--rules", *rules])
    out, err = capsys.readouterr()
    assert "**prolip**, 4 prompts, seeds 0, 1 (not trained: 2)" in out and "no model of pcme" in err
    rows = {
        cells[0]: cells[1:]
        for line in out.splitlines()
        if line.startswith("| ") and (cells := [cell.strip() for cell in line.strip("|").split("|")])
    }
    plain = None
    for rule in rules:
        if rule == "top-K":
            assert 0 <= float(rows[rule][0]) <= 100 and rows[rule][2] == ""
            continue
        found = []
        for seed in (0, 1):
            address = ["--model", f"local-dir:{runs}/prolip-s{seed}/model", "--data", f"wds:{runs}/work/wds_4"]
            found.append(evaluate([*address, "--prompts", rule])[0].metrics)
        mean = {key: 50 * (found[0][key] + found[1][key]) for key in study_prompts.FIGURES}
        plain = plain or mean
        assert [rows[rule][0], rows[rule][2]] == [f"{mean[key]:.1f}" for key in study_prompts.FIGURES]
        if rule != "all":
            change = [f"{round(mean[key] - plain[key], 1) + 0.0:+.1f} [" for key in study_prompts.FIGURES]
            assert [rows[rule][column].startswith(words) for column, words in zip((1, 3), change)] == [True, True]
    shares = [float(x) for x in rows["prolip-s0"][1:]]
    assert len(shares) == 7 and all(0 < share <= 1 for share in shares[:2]) and all(x > 0 for x in shares)
