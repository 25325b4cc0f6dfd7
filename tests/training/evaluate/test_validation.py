"""Test sets during training: the figures of the saved model, at the steps asked for, by any number of ranks."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from training_runs import ROOT, TINY, metrics, start

import prolip
from prolip.corpora.emoji import corpus as emoji
from prolip.corpora.emoji.export import write_emoji
from prolip.embedder import Embedder
from prolip.evaluation.datasets.registry import open_dataset
from prolip.evaluation.evaluate import evaluate_dataset
from prolip.evaluation.tasks import TASKS
from prolip.utils.flags import FlagError
from training.config import ValidationConfig
from training.evaluate import check_metric, keep_best, open_validation
from training.main import parse
from training.parallel import World

STEPS = 4


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> dict[str, str]:
    """Drawings of the designer that runs do not train on, as a retrieval set and as class folders; and COCO's files."""
    root = tmp_path_factory.mktemp("sets")
    corpus = emoji.read([ROOT / "data/emoji/emojione.tar"]).select("group=activities")
    write_emoji(corpus, root / "drawings")
    for drawing in corpus.drawings:
        folder = root / "classes" / corpus.concepts[drawing.concept].subgroup.replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{drawing.key}.png").write_bytes(drawing.data)
    images, records = root / "images", []
    images.mkdir()
    for number, drawing in enumerate(corpus.drawings[:8]):
        (images / f"{number}.png").write_bytes(drawing.data)
        name = corpus.concepts[drawing.concept].name
        sentences = [{"raw": f"{name} {word}", "sentid": 5 * number + i} for i, word in enumerate("abcde")]
        records.append({"filename": f"{number}.png", "split": "test", "cocoid": number, "sentences": sentences})
    (root / "coco.json").write_text(json.dumps({"images": records, "dataset": "coco"}))
    return {
        "imagenet": f"imagenet:{root / 'classes'}",
        "coco": f"coco:{root / 'coco.json'},{images}",
        "drawings": f"wds:{root / 'drawings'}",
    }


def flags_of(sets: dict[str, str]) -> list[str]:
    imagenet, coco = (sets[name].partition(":")[2] for name in ("imagenet", "coco"))
    return ["--imagenet-val", imagenet, "--coco-test", coco, "--val-data", sets["drawings"]]


@pytest.fixture(scope="module")
def run(tmp_path_factory, sets) -> Path:
    """Four steps, evaluated at every second, with an averaged model of which the best is kept."""
    words = f"--max-steps {STEPS} --val-every-steps 2 --ema-decay 0.5 --best-metric ema/drawings/i2t/mAP@R"
    return start(tmp_path_factory.mktemp("runs"), "whole", *flags_of(sets), *words.split())


def evaluations(folder: Path) -> dict[int, dict]:
    return {row["step"]: row for row in metrics(folder) if row["kind"] == "eval"}


def test_figures_come_at_the_steps_asked_for_and_once_at_the_end(run):
    assert [row["step"] for row in metrics(run) if row["kind"] == "eval"] == [2, 4]
    assert [row["step"] for row in metrics(run) if row["kind"] == "train"] == list(range(1, STEPS + 1))


def test_the_last_figures_are_those_of_the_saved_models(run, sets):
    found = json.loads((run / "eval.json").read_text())
    assert found["step"] == STEPS
    for prefix, folder in (("", "model"), ("ema/", "model_ema")):
        embedder = Embedder.load(f"local-dir:{run / folder}")
        for name, spec in sets.items():
            dataset = open_dataset(spec)
            wanted = evaluate_dataset(dataset, embedder).metrics
            assert list(wanted) == TASKS[dataset.kind].names(dataset)
            for metric, value in wanted.items():
                got = found[f"{prefix}{name}/{metric}"]
                assert math.isclose(got, value, rel_tol=1e-5, abs_tol=1e-5), (prefix, name, metric)


def test_the_best_model_is_kept_with_its_figure(run, sets):
    values = {step: row["ema/drawings/i2t/mAP@R"] for step, row in evaluations(run).items()}
    kept = json.loads((run / "best" / "best.json").read_text())
    assert kept["value"] == max(values.values()) == values[kept["step"]]
    result = evaluate_dataset(open_dataset(sets["drawings"]), Embedder.load(f"local-dir:{run / 'best'}"))
    assert result.metrics["i2t/mAP@R"] == pytest.approx(kept["value"], rel=1e-5)


def test_the_average_of_epochs_is_measured_once_there_is_one_and_can_be_the_best(sets, tmp_path):
    words = "--train-num-samples 64 --epochs 4 --val-frequency 1 --swa-epochs 2 --ema-decay 0.5"
    best = ["--best-metric", "swa/drawings/rsum", "--val-data", sets["drawings"]]
    folder = start(tmp_path, "swa", *words.split(), *best)
    rows = evaluations(folder)
    assert {step: "swa/drawings/rsum" in row for step, row in rows.items()} == {2: False, 4: False, 6: True, 8: True}
    assert all("ema/drawings/rsum" in row and "drawings/rsum" in row for row in rows.values())
    kept = json.loads((folder / "best" / "best.json").read_text())
    assert kept["value"] == max(rows[step]["swa/drawings/rsum"] for step in (6, 8))
    assert kept["value"] == rows[kept["step"]]["swa/drawings/rsum"]
    dataset, last = open_dataset(sets["drawings"]), json.loads((folder / "eval.json").read_text())
    for place, value in (("best", kept["value"]), ("model_swa", last["swa/drawings/rsum"])):
        wanted = evaluate_dataset(dataset, Embedder.load(f"local-dir:{folder / place}")).metrics["rsum"]
        assert wanted == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("words", [["--fsdp"], pytest.param([], marks=pytest.mark.slow)], ids=["in shards", "whole"])
def test_ranks_share_the_work_and_find_what_one_process_finds(forked, run, sets, tmp_path, words):
    """Both trained on the same global batches; parameters differ in their last bits, and so do the figures."""
    more = f"--max-steps {STEPS} --val-every-steps 2 --ema-decay 0.5 --batch-size 16 --output {tmp_path} --name two"
    words = [*flags_of(sets), *words, *more.split(), "--best-metric", "drawings/i2t/mAP@R"]
    assert forked.run(*TINY, *words, ranks=2) == 0, forked.err
    one, two = evaluations(run), evaluations(tmp_path / "two")
    assert one.keys() == two.keys() and one[2].keys() == two[2].keys()
    for name, value in one[2].items():
        if name.endswith(("R@10", "acc5", "queries", "queries_without_match")):
            assert two[2][name] == pytest.approx(value, abs=0.03), name
    assert forked.out.count("step 4: imagenet acc1") == 1
    assert (tmp_path / "two" / "best" / "best.json").exists()


def make(sets: dict[str, str], *words: str):
    config = parse([*TINY, *flags_of(sets), *words])
    return open_validation(config, None, None, World())


@pytest.mark.parametrize(
    "metric, message",
    [
        ("imagenet/acc11", "did you mean imagenet/acc1"),
        ("ema/imagenet/acc1", "add --ema-decay"),
        ("swa/imagenet/acc1", "add --swa-epochs"),
        ("names/i2t/R@1", "not a metric of any test set"),
        ("coco/mAP", "not a metric of any test set"),
    ],
)
def test_a_figure_that_there_will_never_be_is_refused(sets, metric, message):
    tasks = make(sets).tasks
    for known in ("imagenet/acc1", "ema/coco/t2i/median_rank", "swa/drawings/rsum"):
        check_metric(known, tasks, False, averaged=("ema", "swa"))
    with pytest.raises(FlagError, match=message):
        check_metric(metric, tasks, False, averaged=("ema",) if metric.startswith("swa") else ())


def test_another_split_is_that_of_tasks_that_have_splits_alone(sets, tmp_path):
    file, images = sets["coco"].removeprefix("coco:").split(",")
    content = json.loads(Path(file).read_text())
    for record in content["images"][:3]:
        record["split"] = "val"
    (tmp_path / "coco.json").write_text(json.dumps(content))
    task, classes = f"coco:{tmp_path / 'coco.json'},{images}", sets["imagenet"]
    config = parse([*TINY, "--coco-test", f"{file},{images}", "--val-data", task, classes, "--val-split", "val"])
    found = {one.name: one.size for one in open_validation(config, None, None, World()).tasks}
    assert found == {"coco": 8, "coco_karpathy_val": 3, "classes": found["classes"]}
    with pytest.raises(ValueError, match="no images of the split 'dev': it has test, val"):
        other = dataclasses.replace(config.val, val_split="dev")
        open_validation(dataclasses.replace(config, val=other), None, None, World())


def test_a_set_that_is_lost_on_the_way_does_not_end_the_run(sets, run):
    validation = make(sets)
    embedder = Embedder.load(f"local-dir:{run / 'model'}")
    lost = dataclasses.replace(validation.tasks[0], samples=lambda share: iter(Path("gone").read_text()))
    whole = validation.tasks[1]

    def broken_samples(share):
        return (sample._replace(image=b"") if sample.key == "3" else sample for sample in whole.samples(share))

    broken = dataclasses.replace(whole, samples=broken_samples)
    empty = dataclasses.replace(whole, name="gone", samples=lambda share: iter(()))
    parts = {"preprocess": embedder.preprocess, "tokenizer": embedder.tokenizer}
    validation = dataclasses.replace(validation, tasks=(lost, broken, empty), **parts)
    found = validation.measure(prolip.create_model(f"local-dir:{run / 'model'}"), World())
    assert found.headlines[0].startswith("imagenet was skipped: FileNotFoundError")
    assert "bad image 1" in found.headlines[1] and "coco/i2t/R@1" in found.metrics
    assert found.headlines[2].startswith("coco is no better than chance (14.3%)")
    assert found.headlines[3].startswith("gone was skipped: DamagedData: no image in")


def test_best_follows_its_direction_through_gaps_and_restarts(tmp_path, monkeypatch):
    """The folder holds the best value so far; one of another metric does not count."""
    saved = []
    monkeypatch.setattr("training.evaluate.save_pretrained", lambda model, folder, tokenizer: saved.append(model))
    for lowest, wanted in ((False, [0.2, 0.5]), (True, [0.2, 0.1])):
        folder, kept = tmp_path / str(lowest), []
        folder.mkdir()
        (folder / "best.json").write_text(json.dumps({"step": 1, "metric": "other", "value": 1e9}))
        val = ValidationConfig(best_metric="ema/x/f", best_lowest=lowest)
        for step, value in enumerate([float("nan"), 0.2, 0.2, 0.5, 0.1]):
            if "so far" in keep_best(folder, val, step, {"ema/x/f": value}, "averaged", None):
                kept.append(value)
        assert kept == wanted and json.loads((folder / "best.json").read_text())["value"] == wanted[-1]
    assert set(saved) == {"averaged"}
    said = keep_best(folder, val, 9, {"ema/x/g": 1.0}, "averaged", None)
    assert "no metric 'ema/x/f'; similar names: ema/x/g" in said
