"""The study of curation: which captions are exchanged, what is trained on, and what its page says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sweeping import train_here

from drawings import SHARDS, UNSEEN
from prolip.data.reading.shards import expand_source
from prolip.data.reading.tar import read_shard
from prolip.data.samples import json_record
from studies import tables
from studies.methods import study
from studies.use import curation as study_curation

ROOT = Path(__file__).resolve().parents[3]

TINY = (
    f"--model ProLIP-ViT-test --precision fp32 --device cpu --workers 0 --batch-size 16 --train-num-samples 32"
    f" --val-data emoji:{UNSEEN} --val-names {UNSEEN} --val-select group=activities"
)


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> tuple[Path, str]:
    """A study's folder, and its page, on the drawings of the tests."""
    folder = tmp_path_factory.mktemp("curation")
    recipe, page = folder / "recipe.yaml", folder / "page.md"
    text = (ROOT / study.RECIPES["emoji"]).read_text()
    recipe.write_text("\n".join(x for x in text.splitlines() if not x.lstrip().startswith("select:")))
    page.write_text(2 * (tables.MARK.format(study_curation.MARK.format("emoji"), "studies/use/curation") + "\n"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study.sweep, "train", train_here)
        patch.setitem(study.RECIPES, "emoji", str(recipe))
        patch.setitem(study.DESIGNERS, "emoji", (SHARDS, SHARDS))
        words = ["--out", str(folder / "runs"), "--seeds", "0", "1", "--steps", "2", "--flags", TINY]
        words += ["--write", str(page), "--backbone-flags", f"{TINY} --max-steps 2 --warmup 1"]
        study_curation.main(words)
        patch.setattr(study.sweep, "train", None)  # all is there
        study_curation.main(words)
    return folder / "runs", page.read_text()


def test_captions_are_exchanged_among_a_share_of_each_shard_and_the_rest_is_left_alone(ended):
    runs, _ = ended
    for url in expand_source(SHARDS):
        before = {raw["__key__"]: raw for raw in read_shard(url)}
        noisy = {raw["__key__"]: raw for raw in read_shard(str(runs / "noisy" / Path(url).name))}
        right = {raw["__key__"] for raw in read_shard(str(runs / "right" / Path(url).name))}
        wrong = {key for key, raw in noisy.items() if json_record(raw)["wrong"]}
        assert noisy.keys() == before.keys() and right == noisy.keys() - wrong
        assert len(wrong) == round(study_curation.WRONG * len(before))
        names = {key: json_record(raw)["name"] for key, raw in before.items()}
        for key, raw in noisy.items():
            assert (json_record(raw)["name"] != names[key]) == (key in wrong)
            assert raw["webp"] == before[key]["webp"] and raw["txt"].decode() == json_record(raw)["name"]
        assert sorted(json_record(noisy[key])["name"] for key in wrong) == sorted(names[key] for key in wrong)


def test_the_page_says_what_was_found_and_what_every_training_gave(ended):
    runs, page = ended
    wrong, kept = [], {raw["__key__"] for path in (runs / "kept").glob("*.tar") for raw in read_shard(str(path))}
    for path in sorted((runs / "noisy").glob("*.tar")):
        wrong += [(raw["__key__"], json_record(raw)["wrong"]) for raw in read_shard(str(path))]
    dropped = [bad for key, bad in wrong if key not in kept]
    assert f"The rule drops {len(dropped):,}, of which {100 * np.mean(dropped):.1f}% are wrong" in page
    folder = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert folder[-3:] == ["all", "kept", "right"] and "`normalised_score`" in folder
    for name in study_curation.VARIANTS:
        rsums = [study.load(runs / f"{name}-s{seed}" / "eval").metrics["names/rsum"] for seed in (0, 1)]
        assert f"| {name} | {tables.cell(rsums)} |" in page
