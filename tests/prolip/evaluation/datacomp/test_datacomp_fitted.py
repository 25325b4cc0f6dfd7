"""DataComp on a model that was given variances: it answers as before by the mean, and with uncertainty by its score."""

from __future__ import annotations

import json
from pathlib import Path

import miniatures
import pytest
import torch
from commands import datacomp, evaluate_corpus
from datacomp_suite import Oracle, write_suite

import prolip
from drawings import SHARDS, UNSEEN
from prolip.cli.main import main as command_line
from prolip.evaluation.suites.datacomp.tasks import select_tasks
from prolip.models.checkpoint import save_pretrained

FLICKR = "retrieval/flickr_1k_test_image_text_retrieval"
FEW = select_tasks(["cifar10", "fmow", "geode", "utkface", FLICKR, "winogavil"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model of points (`before`), the same with variances (`after`), and some tasks."""
    root = tmp_path_factory.mktemp("fitted")
    torch.manual_seed(0)
    save_pretrained(prolip.create_model("ProLIP-ViT-test", method_cfg={"name": "siglip"}), root / "before")
    assert (
        command_line(
            [
                "uncertainty",
                "--model",
                f"local-dir:{root}/before",
                "--data",
                SHARDS,
                "--caption-sampling",
                "name:2,group",
                "--bank",
                "64",
                "--centres",
                "64",
                "--output",
                str(root / "after"),
            ]
        )
        == 0
    )
    write_suite(root / "data", FEW, Oracle(miniatures.prolip_folder(root / "labels")))
    words = ["--classes", "subgroup", "--output", str(root / "data/wds_cars_test")]
    assert command_line(["data", "emoji", "--data", UNSEEN, *words]) == 0
    return root


def results(folder: Path, model: str, *similarity: str) -> dict[tuple[str, str], dict]:
    """Lines of results.jsonl by task and similarity."""
    out = folder / "out" / "-".join((model, *similarity))
    datacomp(
        [
            "--model",
            f"local-dir:{folder}/{model}",
            "--data",
            str(folder / "data"),
            "--output",
            str(out),
            "--workers",
            "0",
            "--device",
            "cpu",
            "--tasks",
            "cars",
            *(x.key for x in FEW),
            *similarity,
        ]
    )
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return {(line["key"], line["identity"]["similarity"]): line for line in lines}


def test_every_kind_of_task_runs_by_its_own_score_and_by_the_mean_as_before(folder):
    before, after = results(folder, "before"), results(folder, "after", "--similarity", "true_match", "mean")
    assert len(before) == len(FEW) + 1 and len(after) == 2 * len(before)
    for (key, _), line in before.items():
        wanted = line["metrics"]["main_metric"]
        assert after[key, "mean"]["metrics"]["main_metric"] == pytest.approx(wanted, abs=1e-9)
        own = after[key, "true_match"]
        assert own["info"]["image_trace"] > 0
        assert any(name.startswith("refusal/") and "/score/" not in name for name in own["metrics"])
        assert 0 <= own["metrics"].get("calibration/match/ece", 0) <= 1
    assert sum("calibration/match/ece" in line["metrics"] for line in after.values()) >= 4


def test_a_task_gives_what_the_corpus_gives(folder):
    (line,) = (x for (key, _), x in results(folder, "after").items() if key == "cars")
    corpus = evaluate_corpus(["--model", f"local-dir:{folder}/after", "--data", UNSEEN])
    assert line["identity"]["similarity"] == corpus.similarity == "true_match"
    assert line["metrics"]["acc1"] == corpus.metrics["zero_shot/subgroup/top1"]
