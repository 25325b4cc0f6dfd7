"""The few-shot table of the study with tiny models: its runs, resuming, and its metrics."""

from statistics import harmonic_mean

import pytest
import torch
from commands import evaluate
from sweeping import train_here

import prolip
from prolip.evaluation.datasets.webdataset import open_wds
from prolip.models.checkpoint import save_pretrained
from studies.methods import few_shot as study_few_shot
from studies.methods import study


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The study of a random model by one seed, its few-shot runs of two steps."""
    folder = tmp_path_factory.mktemp("study")
    torch.manual_seed(0)
    model = prolip.create_model("ProLIP-ViT-test", method_cfg={"name": "siglip"})
    save_pretrained(model, folder / "siglip-s0/model")
    patch = pytest.MonkeyPatch()
    patch.setattr(study.sweep, "train", train_here)
    patch.setattr(study_few_shot, "METHODS", {"vacsr": "--no-pooled-heads --adapter-hidden 8"})
    options = study.parse(["--out", str(folder), "--methods", "siglip", "--noise", "0", "--seeds", "0", "--steps", "2"])
    found = study.Runs(options)
    wanted = study_few_shot.trainings(folder, 0, 2)
    study.sweep.train_all(wanted, list(wanted["variants"]), folder, 1)
    study_few_shot.evaluate(folder, 0)
    yield found
    patch.undo()


def test_the_test_sets_know_base_classes_or_novel_ones_and_no_trained_drawing(runs):
    folder = study_few_shot.data(runs.folder, 0)
    sets = {name: open_wds(folder / name) for name in ("whole", *study_few_shot.SETS)}
    base, novel = sets["base"].classnames, sets["novel"].classnames
    assert base + novel == sets["whole"].classnames and len(base) - len(novel) in (0, 1)
    assert all(sets[other].classnames == base for other in study_few_shot.OTHERS)
    assert all(sets[name].templates == ("{c}",) for name in study_few_shot.SETS)
    whole = {sample.image for sample in sets["whole"].samples()}
    tested = {sample.image for name in ("base", "novel") for sample in sets[name].samples()}
    assert tested < whole and len(whole - tested) >= 60


def test_the_table_has_the_figures_of_the_evaluation_and_its_own_differences(runs):
    rows = [line.split(" | ") for line in study.few(runs)]
    assert [row[0].strip("| ") for row in rows[2:]] == ["siglip, as it was", "vacsr", "vacsr, by the cosine"]
    sets = [f"wds:{study_few_shot.data(runs.folder, 0) / name}" for name in study_few_shot.SETS]
    values = []
    for row, name in zip(rows[2:], ("siglip", "few-vacsr", "few-vacsr")):
        words = ["--similarity", "mean"] if "cosine" in row[0] else []
        model = f"local-dir:{runs.folder / f'{name}-s0' / 'model'}"
        results = evaluate(["--model", model, "--data", *sets, *words])
        a, b, *others = (100 * result.metrics["mean_per_class_recall"] for result in results)
        values.append([a, b, harmonic_mean([a, b]) if a and b else 0.0, *others])
        assert row[1:6] == [f"{value:.1f}" for value in values[-1]]
    for row, found in zip(rows[3:], values[1:]):
        for text, now, before in zip(row[6:], found, values[0]):
            assert text.startswith(f"{now - before:+.1f} [")
