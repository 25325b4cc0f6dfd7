"""clip_benchmark with re-weighted prompts gives what `prolip eval tasks` does, and refuses what it does."""

from pathlib import Path

import miniatures as mini
import pytest
from clip_benchmark_runs import CLASSES, evaluate
from commands import clip_benchmark, refusal

from prolip.embedder import Embedder
from prolip.evaluation.datasets.webdataset import open_wds
from prolip.evaluation.evaluate import compute_features, evaluate_dataset
from prolip.evaluation.prompts import fit_prompts
from prolip.prompts.bprw import Reweighing


@pytest.fixture(scope="module")
def kept(folders, ours, tmp_path_factory):
    """Weights for `single` by other images of its classes."""
    root = tmp_path_factory.mktemp("weights")
    mini.wds_classification(root / "pool", CLASSES, images=24, seed=7)
    weights = fit_prompts(open_wds(root / "pool"), Embedder.load(ours), Reweighing(3, alpha=1.1))
    weights.save(root / "w.json")
    return root, weights


@pytest.mark.parametrize("similarity", ["csd", "mean", "wasserstein2"])
def test_classes_are_mixed_by_the_weights_of_the_file(folders, ours, kept, similarity):
    root, weights = kept
    flags = ["--model", ours, "--similarity", similarity]
    found = evaluate(folders / "single", *flags, "--prompts", str(root / "w.json"))
    scored = open_wds(folders / "single")
    want = evaluate_dataset(scored, compute_features(scored, Embedder.load(ours), prompts=weights), similarity)
    assert found["metrics"]["acc1"] == pytest.approx(want.metrics["acc1"])
    assert found["metrics"]["mean_per_class_recall"] == pytest.approx(want.metrics["mean_per_class_recall"])
    assert found["prompts"] == str(weights)


def test_other_classes_models_tasks_and_the_same_images_are_refused(folders, ours, theirs, kept, tmp_path, capsys):
    root, weights = kept

    def refused(folder, *flags):
        return refusal(capsys, lambda words: evaluate(*words), folder, "--prompts", root / "w.json", *flags)

    assert "these are 3" in refused(folders / "few", "--model", ours)
    assert "these very images" in refused(root / "pool", "--model", ours)
    assert "has other weights" in refused(folders / "single", "--model", mini.prolip_folder(tmp_path / "other", seed=9))
    assert "remove it" in refused(folders / "pairs", "--model", ours)
    assert "remove it" in refused(folders / "single", "--model", theirs[0], "--pretrained", theirs[1])
    words = f"eval --dataset wds/single --dataset_root {folders}/single --num_workers 0 --quiet --model".split()
    clip_benchmark([*words, ours, "--prompts", str(root / "w.json")])  # the file is named by the weights
    assert [path.stem.rpartition("_")[2] for path in Path().glob("*.json")] == [weights.digest]
