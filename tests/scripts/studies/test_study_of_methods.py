"""The study of all methods: trained once, adapted, its tables in the marks of a page; differences by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sweeping import train_here

from drawings import SHARDS, UNSEEN
from prolip.corpora.emoji.result import load
from studies import tables
from studies.methods import study

SELECT = "--select group=activities --val-select group=activities"
TINY = "--model ProLIP-ViT-test --precision fp32 --device cpu --workers 0 --batch-size 16"
FLAGS = f"{TINY} --train-data {SHARDS} --train-num-samples 32 {SELECT} --val-data emoji:{UNSEEN} --val-names {UNSEEN}"
#: Of adaptations; the model is the source's.
ADAPT = (
    f"--precision fp32 --device cpu --workers 0 --batch-size 16 --train-data {UNSEEN} --train-num-samples 16"
    f" {SELECT} --val-data emoji:{UNSEEN} --max-steps 2 --warmup 1"
)
BACKBONE = f"{FLAGS} --max-steps 2 --warmup 1"
ARGUMENTS = ["--steps", "3", "--seeds", "0", "1", "--flags", FLAGS]
ARGUMENTS += ["--adapt-flags", ADAPT, "--backbone-flags", BACKBONE]
WORDS = [*ARGUMENTS, "--noise", "0", "20", "--methods", "siglip", "vse"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[Path]:
    """Two methods' runs at two levels of noise, one of them adapted."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study.sweep, "train", train_here)
        patch.setitem(study.SOURCES, "siglip", ("none", "probability"))
        patch.setattr(study.few_shot, "START", "none")  # tested by itself
        study.main(["--out", str(folder), *WORDS])
        yield folder


def test_what_has_ended_is_not_trained_again_and_keeps_no_checkpoint(runs, monkeypatch, capsys):
    before = {path: path.stat().st_mtime_ns for path in runs.glob("*/eval.json")}
    names = ["siglip", "vse", "siglip-20", "vse-20", *(f"siglip-by-{weight}" for weight in ("none", "probability"))]
    assert {path.parent.name for path in before} >= {f"{name}-s{seed}" for seed in (0, 1) for name in names}
    assert (runs / "backbone-s0/model").is_dir()
    assert not list(runs.glob("*/checkpoints")) and (runs / "siglip-s0/model").is_dir()
    assert (runs / "siglip-20-s0/noise.jsonl").exists() and not (runs / "siglip-s0/noise.jsonl").exists()
    monkeypatch.setattr(study.sweep, "train", None)
    study.main(["--out", str(runs), *WORDS])
    assert "names RSUM" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in runs.glob("*/eval.json")} == before


def test_tables_hold_every_method_that_was_trained_and_means_of_its_seeds(runs):
    found = study.Runs(study.parse(["--out", str(runs), *WORDS]))
    lines = study.retrieval(found, 20)
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["siglip", "vse"]
    values = [load(runs / f"vse-20-s{seed}" / "eval").metrics["names/rsum"] for seed in (0, 1)]
    assert lines[3].split("|")[2].strip() == tables.cell(values)
    assert tables.cell([1.0, 2.0]) == "1.5 (1.0 2.0)" and tables.cell([float("nan")]) == "-" and tables.cell([]) == "-"
    assert len(study.adapted(found)) == 2 + 3
    assert len(study.uncertainty(found)) == 2  # both are points
