"""The console script, run for real on small wds folders, against prolip.evaluation and against clip_benchmark alone."""

from __future__ import annotations

import inspect
import io
import json
import sys
from pathlib import Path

import dense_ranking
import miniatures as mini
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clip_benchmark import cli
from clip_benchmark.metrics import linear_probe, zeroshot_classification
from clip_benchmark_runs import CLASSES, evaluate
from embedding import similarity_scores
from faulty_servers import FaultyServer
from PIL import Image
from sklearn.metrics import average_precision_score

from prolip.embedder import Embedder
from prolip.evaluation.clip_benchmark import command, encoder, patches
from prolip.evaluation.metrics.classification import classification as classification_metrics
from prolip.evaluation.metrics.classification import multilabel
from prolip.gaussian import Gaussian, as_points
from prolip.measures import pairwise_csd_similarity
from prolip.prompts.templates import build_zero_shot_classifier, mix_groups
from prolip.scores import CSDScore

TEMPLATES = [template.replace("{c}", "{}") for template in mini.TEMPLATES]


@pytest.fixture(scope="module")
def model(ours):
    """The model, loaded without clip_benchmark."""
    return Embedder.load(ours)


def classes_of(model, classes=CLASSES) -> Gaussian:
    """Every class as the mixture of its prompts."""
    return build_zero_shot_classifier(model.network, model.tokenizer, [[c] for c in classes], TEMPLATES)


def alone(monkeypatch, folder: Path, *flags: str) -> dict:
    """The metrics that clip_benchmark's own command writes."""
    common = ["--dataset", f"wds/{folder.name}", "--dataset_root", str(folder), "--output", "alone.json"]
    common += ["--batch_size", "5", "--num_workers", "0", "--quiet", "--no_amp"]
    monkeypatch.setattr(sys, "argv", ["clip_benchmark", "eval", *common, *flags])
    cli.main()
    return json.loads(Path("alone.json").read_text())["metrics"]


def images_of(model, samples) -> Gaussian:
    pictures = (Image.open(io.BytesIO(mini.picture_of(sample))).convert("RGB") for sample in samples)
    return model.encode_image(torch.stack([model.preprocess(picture) for picture in pictures]))


def labels_of(samples) -> torch.Tensor:
    """(N,) classes."""
    return torch.tensor([int(sample["cls"]) for sample in samples])


def multihot_of(samples) -> np.ndarray:
    """(N, C) labels."""
    return np.stack([np.load(io.BytesIO(sample["npy"])) for sample in samples])


def captions_of(samples) -> list[list[str]]:
    """The captions of every image."""
    return [sample["txt"].decode().splitlines() for sample in samples]


def expected_classification(z_image: Gaussian, z_class: Gaussian, labels, similarity: str) -> dict[str, float]:
    """Return the metrics of prolip.evaluation for the same Gaussians, by clip_benchmark's names."""
    direct = classification_metrics(similarity_scores(z_image, z_class, similarity), labels)
    names = {"acc1": "top1", "acc5": "top5", "mean_per_class_recall": "mean_per_class_recall"}
    return {name: direct[ours] for name, ours in names.items() if ours in direct}


def expected_retrieval(z_image: Gaussian, z_text: Gaussian, per_image: int, similarity: str, ks=(1, 5)):
    """The same for retrieval."""
    relevant = torch.eye(len(z_image.mean)).bool().repeat_interleave(per_image, 1)
    direct = dense_ranking.retrieval(similarity_scores(z_image, z_text, similarity), relevant, ks)
    ways = {"image_retrieval": "t2i", "text_retrieval": "i2t"}
    found = {f"{name}_recall@{k}": direct.get(f"{way}/R@{k}") for name, way in ways.items() for k in ks}
    return {name: value for name, value in found.items() if value is not None}


def test_products_of_rows_are_csd_similarity_to_the_last_bits_of_float64_whatever_the_traces():
    g = torch.Generator().manual_seed(0)
    scale = torch.logspace(-6, 3, 40).unsqueeze(1)  # traces from 1e-5 to 1e4
    means = [F.normalize(torch.randn(40, 16, generator=g), dim=-1) for _ in range(2)]
    p, q = (Gaussian(mean, (scale * (0.5 + torch.rand(40, 16, generator=g))).log()) for mean in means)
    model = encoder.GaussianEncoder(torch.nn.Identity(), CSDScore())
    images, texts = F.normalize(model.rows(p, 1.0), dim=-1), F.normalize(model.rows(q, -1.0), dim=-1)
    exact = pairwise_csd_similarity(p.to(torch.float64), q.to(torch.float64))
    with torch.autocast("cpu"):  # what --amp brings must not reach the scores
        assert type(images @ texts.t()) is torch.Tensor
        torch.testing.assert_close(images @ texts.t(), exact, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(100.0 * texts @ images.t(), 100 * exact.mT, rtol=1e-14, atol=1e-12)


@pytest.mark.parametrize("similarity", ["csd", "mean"])
def test_classification_equals_the_mixtures_of_our_evaluator(folders, ours, model, similarity, capsys):
    for name, classes in (("single", CLASSES), ("few", CLASSES[:3])):
        samples = mini.read_split(folders / name / "test")
        result = evaluate(folders / name, "--model", ours, "--similarity", similarity)
        z_class, z_image = classes_of(model, classes), images_of(model, samples)
        expected = expected_classification(z_image, z_class, labels_of(samples), similarity)
        assert result["metrics"] == pytest.approx(expected, abs=1e-6)
        assert (result["similarity"], result["amp"], result["task"]) == (similarity, False, "zeroshot_classification")
    assert "acc5" not in result["metrics"]  # of three classes, where clip_benchmark has NaN
    assert "note: acc5 is left out: fewer than five classes" in capsys.readouterr().err


def test_multilabel_ranks_images_by_csd_with_their_traces(folders, ours, model):
    samples = mini.read_split(folders / "multi" / "test")
    z_image, z_class, labels = images_of(model, samples), classes_of(model), multihot_of(samples)
    values = {}
    for similarity in ("csd", "mean"):
        scores = similarity_scores(z_image, z_class, similarity)
        columns = range(labels.shape[1])
        values[similarity] = float(np.mean([average_precision_score(labels[:, c], scores[:, c]) for c in columns]))
        result = evaluate(folders / "multi", "--model", ours, "--similarity", similarity)
        assert result["metrics"] == pytest.approx({"mean_average_precision": values[similarity]}, abs=1e-6)
    assert abs(values["csd"] - values["mean"]) > 1e-3  # else this test could not distinguish them


@pytest.mark.parametrize("similarity", ["csd", "mean"])
def test_retrieval_equals_our_evaluator_and_leaves_out_k_above_the_gallery(folders, ours, model, similarity, capsys):
    samples = mini.read_split(folders / "pairs" / "test")
    z_image, z_text = images_of(model, samples), model.embed_texts(x for texts in captions_of(samples) for x in texts)
    flags = ["--model", ours, "--similarity", similarity, "--recall_k", "1", "5", "20", "100"]
    result = evaluate(folders / "pairs", *flags)
    assert result["task"] == "zeroshot_retrieval"  # from dataset_type.txt; clip_benchmark knows names only
    assert result["metrics"] == pytest.approx(expected_retrieval(z_image, z_text, 3, similarity, (1, 5, 20, 100)))
    images, reported = len(samples), capsys.readouterr().err
    assert images < 20 < 3 * images < 100 and "text_retrieval_recall@20" in result["metrics"]
    assert f"note: image_retrieval_recall@20 is left out: only {images} images" in reported
    assert f"note: text_retrieval_recall@100 is left out: only {3 * images} texts" in reported


@pytest.fixture
def without_cuda(monkeypatch):
    """linear_probe.evaluate as `python -O` compiles it, without its `assert device == "cuda"`; .cuda() does nothing."""
    namespace = dict(vars(linear_probe))
    exec(compile(inspect.getsource(linear_probe), linear_probe.__file__, "exec", optimize=1), namespace)
    namespace["accuracy"] = patches.accuracy
    monkeypatch.setitem(patches.ORIGINAL, "linear_probe", namespace["evaluate"])
    monkeypatch.setattr(command, "check_device", lambda run: None)
    for kind in (torch.Tensor, torch.nn.Module):
        monkeypatch.setattr(kind, "cuda", lambda self: self)


@pytest.mark.usefixtures("without_cuda")
def test_linear_probe_reads_the_means_and_none_of_other_weights_in_the_same_folder(folders, model, ours, tmp_path):
    flags = ["--task", "linear_probe", "--fewshot_epochs", "1", "--feature_root", "deep/features"]
    result = evaluate(folders / "probe", "--model", ours, *flags)
    [written] = Path("deep/features").rglob("features_test.pt")
    samples = mini.read_split(folders / "probe" / "test")
    torch.testing.assert_close(torch.load(written), images_of(model, samples).mean, rtol=0, atol=1e-6)
    assert result["similarity"] == "mean" and {"lp_acc1", "lp_acc5"} <= result["metrics"].keys()
    for seed, evaluations in ((1, 2), (2, 1)):
        other = mini.prolip_folder(tmp_path / "model", seed)
        for _ in range(evaluations):
            evaluate(folders / "probe", "--model", other, *flags)
        assert len(list(Path("deep/features").iterdir())) == 1 + seed
    first, second, third = [torch.load(path) for path in Path("deep/features").rglob("features_test.pt")]
    assert min((x - y).abs().max() for x, y in ((first, second), (first, third), (second, third))) > 1e-3
    result = evaluate(folders / "probe", "--model", ours, *flags, "--val_split", "val", "--skip_load")
    assert result["metrics"]["weight_decay"] > 0 and 0 <= result["metrics"]["lp_acc1"] <= 1


def test_an_openclip_model_gets_the_numbers_of_clip_benchmark_and_of_our_evaluator(folders, theirs, monkeypatch):
    name, weights = theirs
    flags = ["--model", name, "--pretrained", weights]
    model = Embedder.load(name, weights)
    single, multi, pairs = (mini.read_split(folders / n / "test") for n in ("single", "multi", "pairs"))
    prompts = model.embed_texts(t.format(c) for c in CLASSES for t in TEMPLATES)
    z_class = as_points(prompts.mean.unflatten(0, (len(CLASSES), -1)).mean(1))
    texts = model.embed_texts(text for texts in captions_of(pairs) for text in texts)
    ap = multilabel(similarity_scores(images_of(model, multi), z_class, "csd"), multihot_of(multi))
    expected = {
        "single": expected_classification(images_of(model, single), z_class, labels_of(single), "csd"),
        "multi": {"mean_average_precision": ap["mAP_all_classes"]},
        "pairs": expected_retrieval(images_of(model, pairs), texts, 3, "csd"),
    }
    for folder, task in (("multi", "zeroshot_classification"), ("pairs", "zeroshot_retrieval")):
        own = alone(monkeypatch, folders / folder, *flags, "--task", task, "--recall_k", "1", "5")
        assert own == pytest.approx(expected[folder], abs=1e-6)
    with monkeypatch.context() as repaired:  # clip_benchmark alone, but for what NumPy 2.4 refuses

        def accuracy(output, target, topk):
            order = output.argsort(dim=1, descending=True)
            return [float(np.mean([t in row[:k] for t, row in zip(target.tolist(), order.tolist())])) for k in topk]

        repaired.setattr(zeroshot_classification, "accuracy", accuracy)
        own = alone(repaired, folders / "single", *flags, "--task", "zeroshot_classification")
        assert own == pytest.approx(expected["single"], abs=1e-6)
    for folder, values in expected.items():
        result = evaluate(folders / folder, *flags, "--recall_k", "1", "5")
        assert result["metrics"] == pytest.approx(values, abs=1e-6)
        assert (result["similarity"], result["pretrained"]) == ("cosine", weights)


def test_prompts_of_each_class_are_mixed_and_a_saved_classifier_is_used_again(folders, ours, model):
    prompts = {c: [f"{c} number {i}" for i in range(1 + k % 3)] for k, c in enumerate(CLASSES)}
    Path("cupl.json").write_text(json.dumps({"single": prompts}))
    flags = ["--model", ours, "--custom_template_file", "cupl.json"]
    result = evaluate(folders / "single", *flags, "--save_clf", "classifier.pt")
    texts, counts = [x for texts in prompts.values() for x in texts], list(map(len, prompts.values()))
    z_class = mix_groups(model.embed_texts(texts), counts)
    saved = torch.load("classifier.pt")
    rows = encoder.GaussianEncoder(model.network, CSDScore()).rows(z_class, -1.0).as_subclass(torch.Tensor)
    torch.testing.assert_close(saved, rows.mT, rtol=0, atol=1e-6)
    samples = mini.read_split(folders / "single" / "test")
    expected = expected_classification(images_of(model, samples), z_class, labels_of(samples), "csd")
    assert result["metrics"] == pytest.approx(expected, abs=1e-6)
    again = evaluate(folders / "single", *flags, "--load_clfs", "classifier.pt", "classifier.pt")
    assert again["metrics"] == pytest.approx(expected, abs=1e-6)


def test_shards_behind_a_url_and_more_workers_than_shards_give_every_image_once(folders, ours, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    single = evaluate(folders / "single", "--model", ours)["metrics"]
    assert evaluate(folders / "single", "--model", ours, workers=3)["metrics"] == pytest.approx(single)
    with FaultyServer.of_folder(folders) as server:
        for name, metrics in (("single", single), ("pairs", evaluate(folders / "pairs", "--model", ours)["metrics"])):
            assert evaluate(f"{server.root}/{name}", "--model", ours)["metrics"] == pytest.approx(metrics)


def test_accuracy_gives_equal_scores_to_the_lower_class():
    output = torch.tensor([[1.0, 1, 1, 0], [1, 1, 1, 0], [0, 2, 2, 2], [0, 0, 0, 0]])
    target = torch.tensor([0, 2, 3, 1])
    assert patches.accuracy(output, target, (1, 2, 5)) == [0.25, 0.5, 1.0]
