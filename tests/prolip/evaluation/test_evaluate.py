"""One task from files to figures, against clip_benchmark, scikit-learn, dense rankings and the definition in words."""

import json
from dataclasses import replace

import dense_ranking
import miniatures as mini
import numpy as np
import open_clip
import pytest
import torch
from clip_benchmark.datasets.builder import build_wds_dataset
from clip_benchmark.metrics import zeroshot_classification as zsc
from embedding import similarity_scores
from sklearn import metrics as sk

from prolip.corpora.emoji.evaluate import evaluate_corpus as evaluate_corpus
from prolip.evaluation.datasets.base import DamagedData
from prolip.evaluation.datasets.published import open_caption_table, open_winogavil
from prolip.evaluation.datasets.registry import open_dataset
from prolip.evaluation.datasets.webdataset import open_wds
from prolip.evaluation.evaluate import TaskResult, compare_results, compute_features, evaluate_dataset
from prolip.evaluation.table import format_intervals, format_table, format_uncertainty, harmonic_means
from prolip.evaluation.tasks import TASKS
from prolip.gaussian import Gaussian
from prolip.measures import kl
from prolip.measures.chance import chance_remark


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    root = tmp_path_factory.mktemp("sets")
    return {
        "single": mini.wds_classification(root / "wds_single", images=40),
        "multi": mini.wds_multilabel(root / "wds_multi"),
        "pairs": mini.wds_retrieval(root / "wds_pairs"),
    }


@pytest.fixture(scope="module")
def benchmark(theirs, sets):
    """(model, tokenizer, loader of a set) as clip_benchmark itself has them for an OpenCLIP model."""
    model, _, preprocess = open_clip.create_model_and_transforms("ViT-mini", theirs.name.removeprefix("ViT-mini:"))

    def loader(name):
        dataset = build_wds_dataset(f"wds/{name}", preprocess, data_dir=str(sets[name]))
        batches = torch.utils.data.DataLoader(dataset.batched(6), batch_size=None, num_workers=0)
        return dataset, batches

    return model.eval(), open_clip.get_tokenizer("ViT-mini"), loader


def test_classification_gives_clip_benchmarks_figures(theirs, sets, benchmark):
    model, tokenizer, loader = benchmark
    dataset, batches = loader("single")
    classes = zsc.zero_shot_classifier(model, tokenizer, dataset.classes, dataset.templates, "cpu", amp=False)
    logits, target = zsc.run_classification(model, classes, batches, "cpu", amp=False)
    got = evaluate_dataset(open_wds(sets["single"]), theirs).metrics
    # clip_benchmark's own `accuracy` fails with NumPy 2.4; this is what it computes
    assert got["acc1"] == pytest.approx(float((logits.argmax(1) == target).float().mean()), abs=1e-6)
    in_five = (logits.topk(5, 1)[1] == target[:, None]).any(1)
    assert got["acc5"] == pytest.approx(float(in_five.float().mean()), abs=1e-6)
    recall = sk.balanced_accuracy_score(target, logits.argmax(1))
    assert got["mean_per_class_recall"] == pytest.approx(recall, abs=1e-6)
    assert 0 < got["acc1"] < got["acc5"] < 1  # figures that can be wrong


@pytest.mark.parametrize("similarity", ["csd", "kl"])
def test_classification_agrees_with_scikit_learn_for_any_similarity(ours, sets, similarity):
    features = compute_features(open_wds(sets["single"]), ours)
    scores = similarity_scores(features.image, features.text, similarity).numpy()
    labels = features.labels.numpy()
    got = evaluate_dataset(features.dataset, features, similarity)
    predicted = scores.argmax(1)
    assert got.metrics["acc1"] == got.value == pytest.approx(sk.accuracy_score(labels, predicted))
    assert got.metrics["acc5"] == pytest.approx(sk.top_k_accuracy_score(labels, scores, k=5, labels=range(7)))
    assert got.metrics["mean_per_class_recall"] == pytest.approx(sk.balanced_accuracy_score(labels, predicted))
    assert got.info["similarity"] == similarity and got.info["images"] == 40 and got.info["classes"] == 7


def test_a_multilabel_set_is_scored_by_average_precision_in_blocks_too(ours, sets, in_blocks):
    features = compute_features(open_wds(sets["multi"]), ours)
    scores, labels = similarity_scores(features.image, features.text).numpy(), features.labels.numpy()
    wanted = np.mean([sk.average_precision_score(labels[:, c], scores[:, c]) for c in range(7)])
    in_blocks(20)
    assert evaluate_dataset(features.dataset, features).value == pytest.approx(wanted)


def test_an_asymmetric_measure_takes_the_image_first(ours, sets):
    features = compute_features(open_wds(sets["single"]), ours)
    image, text = features.image, features.text
    wanted = -kl(Gaussian(image.mean[:, None], image.log_var[:, None]), Gaussian(text.mean[None], text.log_var[None]))
    got = evaluate_dataset(features.dataset, features, "kl", confusion=True).info["confusion"]
    np.testing.assert_array_equal(got, sk.confusion_matrix(features.labels, wanted.argmax(1), labels=range(7)))


def dense(features, relevant, similarity="csd"):
    """`dense_ranking.retrieval` on whole matrices."""
    return dense_ranking.retrieval(similarity_scores(features.image, features.text, similarity), relevant)


@pytest.mark.parametrize("similarity", ["csd", "inclusion_test"])
def test_retrieval_equals_the_dense_ranking(ours, sets, similarity):
    features = compute_features(open_wds(sets["pairs"]), ours)
    relevant = torch.arange(12)[:, None] == features.owners
    got = evaluate_dataset(features.dataset, features, similarity).metrics
    wanted = dense(features, relevant, similarity)
    assert {name: got[name] for name in wanted} == pytest.approx(wanted)
    assert set(got) - set(wanted) == {"mean_recall@1"}


def test_further_pairs_count_beside_the_own_captions(ours, sets):
    features = compute_features(open_wds(sets["pairs"]), ours)
    further = [("s0000000", 35), ("s0000000", 3), ("s0000007", 0)]
    labelled = replace(features, dataset=replace(features.dataset, relevance=frozenset(further)))
    own = torch.arange(12)[:, None] == features.owners
    complete = own.clone()
    complete[[0, 0, 7], [35, 3, 0]] = True
    got = evaluate_dataset(labelled.dataset, labelled).metrics
    for prefix, relevant in (("", complete), ("own/", own)):
        wanted = {f"{prefix}{name}": value for name, value in dense(features, relevant).items()}
        assert {name: got[name] for name in wanted} == pytest.approx(wanted)
    for pair in (("s0000099", 0), ("s0000000", 36)):
        strange = replace(features, dataset=replace(features.dataset, relevance=frozenset([pair])))
        with pytest.raises(DamagedData, match="1 relevant pairs of .* name no image or none of its 36 captions"):
            evaluate_dataset(strange.dataset, strange)


def test_a_sentence_on_a_bird_is_true_of_its_species(tmp_path, ours):
    features = compute_features(open_dataset("cub:{},{}".format(*mini.cub(tmp_path))), ours)
    species = torch.tensor([int(key[:3]) for key in features.keys])
    relevant = species[:, None] == species[features.owners]
    got = evaluate_dataset(features.dataset, features).metrics
    wanted = dense(features, relevant)
    assert {name: got[name] for name in wanted} == pytest.approx(wanted)
    own = dense(features, torch.arange(len(species))[:, None] == features.owners)
    assert got["own/t2i/R@1"] == pytest.approx(own["t2i/R@1"]) and got["t2i/R-Precision"] != got["own/t2i/R-Precision"]


def test_fewer_images_than_ranks_asked_for_are_no_trouble(tmp_path, ours):
    got = evaluate_dataset(open_wds(mini.wds_retrieval(tmp_path, images=2, captions=4)), ours)
    absent = ["i2t/R@10", "t2i/R@5", "t2i/R@10", "rsum"]
    assert got.info["too_small_for"] == absent and not set(absent) & got.metrics.keys() and "i2t/R@5" in got.metrics
    assert f"  ! too small for {', '.join(absent)}" in format_table([got])
    dataset = open_wds(mini.wds_classification(tmp_path / "few", classes=mini.CLASSES[:4], images=9))
    assert set(evaluate_dataset(dataset, ours).metrics) == {"acc1", "mean_per_class_recall"}
    # --best-metric asks before the first step.
    names = TASKS["retrieval"].names(open_caption_table(mini.caption_table(tmp_path / "table")))
    assert "t2i/R@5" in names and "i2t/R@10" in names and not {"t2i/R@10", "rsum"} & set(names)


@pytest.mark.parametrize("metric, size", [("acc1", {"classes": 5}), ("i2t/R@1", {"texts": 50})])
def test_a_model_at_chance_is_remarked_in_the_table(ours, tmp_path, metric, size):
    got = evaluate_dataset(open_wds(mini.wds_retrieval(tmp_path, images=2, captions=4)), ours)
    info = {"model": got.info["model"], "similarity": "csd", "task": "t", "images": 25} | size
    for share, remark in ((1 / (size.get("classes") or 25), True), (0.9, False)):
        table = format_table([replace(got, metrics={metric: share}, info=info)])
        assert (f"  ! {chance_remark(size.get('classes', 25))}" in table) == remark


def test_cues_pick_as_many_candidates_as_belong_to_them(tmp_path, ours):
    features = compute_features(open_winogavil(mini.winogavil(tmp_path)), ours)
    row = {key: i for i, key in enumerate(features.keys)}
    prompts = ["An ocean", "A music", "An egypt", "A run", "A tree"]
    values = []
    for instance, prompt in zip(features.dataset.associations, prompts):
        cue = ours.embed_texts([prompt])
        score = {k: float(similarity_scores(features.image.select([row[k]]), cue)) for k in instance.images}
        chosen = set(sorted(score, key=score.get, reverse=True)[: len(instance.associated)])
        values.append(len(chosen & instance.associated) / len(chosen | instance.associated))
    got = evaluate_dataset(features.dataset, features)
    assert got.main_metric == "jaccard_score_10-12" and got.value == pytest.approx(np.mean(values[2:]))
    assert got.metrics["avg_jaccard_score"] == pytest.approx(np.mean(values))
    assert got.metrics["jaccard_score_5-6"] == pytest.approx(np.mean(values[:2]))
    with pytest.raises(DamagedData, match="the cue .* has candidates that were left out"):
        evaluate_dataset(features.dataset, replace(features, keys=("gone", *features.keys[1:])))


def test_a_deterministic_model_is_scored_by_its_points_alone(theirs, sets):
    features = compute_features(open_wds(sets["single"]), theirs)
    figures = [evaluate_dataset(features.dataset, features, s).metrics for s in ("csd", "mean", "wasserstein2")]
    assert figures[0] == figures[1] == figures[2]
    with pytest.raises(ValueError, match="deterministic, but 'kl' needs variances: use csd"):
        evaluate_dataset(open_wds(sets["single"]), theirs, "kl")
    with pytest.raises(ValueError, match="unknown"):
        evaluate_dataset(open_wds(sets["single"]), theirs, "nearness")


def test_a_result_is_json(ours, sets):
    result = evaluate_dataset(open_wds(sets["pairs"]), ours)
    values = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert values["key"] == "pairs" and values["main_metric"] == "mean_recall@1" and values["metrics"] == result.metrics
    assert values["info"]["model"]["fingerprint"] == ours.fingerprint
    assert TaskResult("a", {"x": float("nan")}, "x").to_dict()["metrics"] == {"x": None}


def test_results_from_python_make_every_table(ours, sets):
    features = [compute_features(open_wds(folder), ours) for folder in sets.values()]
    results = [evaluate_dataset(f.dataset, f, similarity, draws=20) for f in features for similarity in ("csd", "mean")]
    compare_results(results, 20)
    for table in (format_table(results), format_uncertainty(results), format_intervals(results)):
        assert all(result.key in table for result in results) or "refused" in table
    assert harmonic_means(results) == ""
    assert format_intervals([evaluate_dataset(features[0].dataset, features[0])])  # without draws: no columns


def test_a_metric_is_its_function_at_weights_of_one_and_a_study_changes_none(ours, sets):
    for folder in sets.values():
        features = compute_features(open_wds(folder), ours)
        found, plain = (evaluate_dataset(features.dataset, features, study=study) for study in (True, False))
        assert found.metrics == plain.metrics and plain.study is None and found.study.metrics()
        for name, one in found.statistics.items():
            (value,) = one.estimate({queries: np.ones((1, size)) for queries, size in one.sizes.items()})
            assert found.metrics[name] == one.value == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("relevance", [None, frozenset([("s0000000", 35), ("s0000007", 0)])])
def test_intervals_draw_an_image_with_its_own_captions_whatever_else_matches(ours, sets, relevance):
    features = compute_features(open_wds(sets["pairs"]), ours)
    features = replace(features, dataset=replace(features.dataset, relevance=relevance))
    found = evaluate_dataset(features.dataset, features, draws=50)
    hit = found.statistics["t2i/R@5"]
    weights = np.random.default_rng(0).multinomial(12, np.full(12, 1 / 12), 30).astype(float)
    for name in ("t2i/R@1", "t2i/mAP@R", "mean_recall@1", "rsum", *(["own/t2i/R@1"] if relevance else [])):
        statistic = found.statistics[name]
        assert statistic.clusters["texts"].name == "images" and statistic.sizes["images"] == 12
        np.testing.assert_array_equal(statistic.clusters["texts"].of, features.owners)
    own = {"images": weights, "texts": weights[:, hit.clusters["texts"].of]}
    again = [evaluate_rows(features, np.repeat(np.arange(12), row.astype(int))) for row in weights]
    np.testing.assert_allclose(hit.estimate(own), again)


def evaluate_rows(features, rows):
    """t2i/R@5 over the captions of these images, repeats included."""
    relevant = torch.arange(12)[:, None] == features.owners
    for image, text in features.dataset.relevance or ():
        relevant[features.keys.index(image), text] = True
    order = similarity_scores(features.image, features.text).T.argsort(dim=1, descending=True, stable=True)
    hit = relevant.T.gather(1, order)[:, :5].any(1)
    return float(torch.cat([hit[features.owners == row] for row in rows]).double().mean())


def test_every_result_is_compared_with_the_first_of_its_set(ours, sets):
    features = compute_features(open_wds(sets["single"]), ours)
    results = [evaluate_dataset(features.dataset, features, way) for way in ("csd", "kl", "mean")]
    compare_results(results, 20)
    assert "difference" not in results[0].info
    for result in results[1:]:
        change = result.info["difference"]
        assert change["to"]["similarity"] == "csd"
        assert change["metrics"]["acc1"][0] == pytest.approx(result.value - results[0].value)
