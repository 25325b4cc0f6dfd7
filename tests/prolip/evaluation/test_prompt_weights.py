"""bprw by the commands: each half by the other, another split, a file; what is scored has no part in its weights."""

from __future__ import annotations

from dataclasses import replace

import miniatures as mini
import numpy as np
import pytest
import torch
from commands import evaluate, refusal, run
from PIL import Image

from prolip.evaluation import prompts as best_prompts
from prolip.evaluation.datasets.base import WHOLE, Sample
from prolip.evaluation.datasets.webdataset import open_wds
from prolip.evaluation.evaluate import compute_features, evaluate_dataset, study_features
from prolip.evaluation.prompts import check_pool, fit_prompts
from prolip.gaussian import Gaussian, mixture
from prolip.prompts.bprw import Reweighing, reweigh
from prolip.prompts.templates import PromptRule
from prolip.prompts.weights import PromptWeights, UnfitPrompts

TEMPLATES = ("{c}", "a photo of a {c}.", "this is the {c} of a friend of mine", "{c} {c}")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two sets of the same classes and prompts: images to fit to, and images to score."""
    root = tmp_path_factory.mktemp("bprw")
    pool = mini.wds_classification(root / "wds_pool", templates=TEMPLATES, images=35, seed=3)
    return pool, mini.wds_classification(root / "wds_scored", templates=TEMPLATES, images=42)


@pytest.fixture(scope="module")
def kept(data, folder, tmp_path_factory):
    """A file of weights by the command."""
    path = tmp_path_factory.mktemp("kept") / "w.json"
    rule = ["--rule", "bprw:3,alpha=1.5"]
    prompts(["fit", "--model", folder, "--data", f"wds:{data[0]}", *rule, "--output", str(path)])
    return path


@pytest.mark.parametrize("word", ["bprw", "bprw:2,prior=trace"])
def test_each_half_is_scored_by_the_weights_of_the_other(data, ours, word):
    features = compute_features(open_wds(data[1]), ours, prompts=PromptRule.parse(word))
    score, fit, labels = features.model.scored_by(), features.rule.fit, features.labels
    first = best_prompts.halves(features.keys, labels if fit.shots else torch.zeros_like(labels))
    predicted = torch.empty_like(labels)
    for own in (first, ~first):
        others = (~own).nonzero().squeeze(1)
        keys, shown = [features.keys[row] for row in others.tolist()], labels[others] if fit.shots else None
        weights = reweigh(fit, features.image.select(others), keys, features.prompts, score, shown).weights
        assert not torch.allclose(weights, torch.full_like(weights, 0.25), atol=0.02)
        classes = mixture(features.prompts, weights)
        predicted[own] = score.pairwise(features.image.select(own), classes).argmax(1)
    result = evaluate_dataset(features.dataset, features)
    assert result.metrics["acc1"] == pytest.approx((predicted == labels).double().mean().item())
    halves = "one half of the labelled images" if fit.shots else "one half of the images"
    assert result.info["prompts"] == f"{word}, fitted to {halves} for the other"
    with pytest.raises(ValueError, match="use other prompts"):
        study_features(features)


def test_a_file_has_the_weights_of_its_images_and_classes_are_mixed_by_them(data, folder, ours, kept, tmp_path, capsys):
    pool, scored = map(open_wds, data)
    found = PromptWeights.load(kept)
    images = compute_features(pool, ours, prompts=PromptRule.parse("bprw"))
    score = images.model.scored_by()
    want = reweigh(Reweighing(3, 1.5), images.image, images.keys, images.prompts, score, images.labels)
    assert torch.equal(found.table, want.weights) and found.classnames == mini.CLASSES
    given = compute_features(scored, ours, prompts=found)
    texts = [template.replace("{c}", name) for name in mini.CLASSES for template in TEMPLATES]
    mixed = mixture(Gaussian(*(x.unflatten(0, (7, 4)) for x in ours.embed_texts(texts))), found.table)
    torch.testing.assert_close(given.text.mean, mixed.mean)
    torch.testing.assert_close(given.text.log_var, mixed.log_var)
    words = ["--model", folder, "--data", f"wds:{data[1]}", "--prompts"]
    folders = ["--save-features", str(tmp_path)]
    by_file = evaluate([*words, str(kept), "--uncertainty", *folders])[0]
    want_acc = evaluate_dataset(scored, given).metrics["acc1"]
    assert by_file.metrics["acc1"] == want_acc and "refusal/score/error" in by_file.metrics
    assert by_file.info["prompts"] == str(found) and str(found) in capsys.readouterr().out
    evaluate([*words, "all", *folders])
    results = evaluate(["--features", str(tmp_path)])
    again = {result.info.get("prompts", "all"): result.metrics["acc1"] for result in results}
    assert again.pop("all") != want_acc and again == {str(found): want_acc}  # kept apart
    capsys.readouterr()
    by_fit = evaluate([*words, "bprw:3,alpha=1.5", "--prompts-fit", f"wds:{data[0]}"])[0]
    assert by_fit.metrics["acc1"] == want_acc and by_fit.info["prompts"] == str(found)
    assert f"prompts: bprw:3,alpha=1.5, fitted to wds:{data[0]}" in capsys.readouterr().out


def test_many_classes_get_their_own_weights_some_at_a_time(data, ours, kept, monkeypatch):
    found, scored = PromptWeights.load(kept), open_wds(data[1])
    whole = compute_features(scored, ours, prompts=found).text
    monkeypatch.setattr("prolip.prompts.templates.PROMPTS", 8)
    parts = compute_features(scored, ours, prompts=found).text
    torch.testing.assert_close(parts.mean, whole.mean)


def prompts(words):
    run("prompts", *words)


def test_what_may_not_be_scored_or_fits_nothing_is_refused(data, folder, kept, tmp_path, capsys, theirs):
    words = ["--model", folder, "--data", f"wds:{data[1]}", "--prompts"]

    def refused(*more, command=evaluate):
        return refusal(capsys, command, *more)

    assert "these very images" in refused(*words[:3], f"wds:{data[0]}", "--prompts", str(kept))
    own = ["--prompts-fit", f"wds:{data[1]}"]
    assert "images that are scored" in refused(*words, "bprw:3", *own)
    other = mini.prolip_folder(tmp_path / "other", seed=1)
    assert "has other weights" in refused("--model", other, *words[2:], str(kept))
    few = mini.wds_classification(tmp_path / "wds_few", classes=mini.CLASSES[:3], templates=TEMPLATES)
    assert "weights of 7 classes, these are 3" in refused(*words[:3], f"wds:{few}", "--prompts", str(kept))
    assert "give --prompts bprw" in refused(*words, "certain:1", "--prompts-fit", f"wds:{data[0]}")
    assert "--prompts-split needs --prompts-fit" in refused(*words, "bprw", "--prompts-split", "train")
    assert "or give other images" in refused(*words, "bprw", "--uncertainty")
    assert "not a setting of bprw" in refused(*words, "bprw:x")
    fit = ["fit", "--model", folder, "--data", f"wds:{data[0]}", "--output"]
    assert "ends in .json" in refused(*fit, str(tmp_path / "w"), command=prompts)
    assert "no weights to fit" in refused(*fit, str(tmp_path / "w.json"), "--rule", "best", command=prompts)
    with pytest.raises(ValueError, match="gives points"):
        fit_prompts(open_wds(data[0]), theirs, Reweighing())


def test_the_same_images_by_another_reader_are_refused(data, folder, kept, ours, tmp_path, capsys):
    """All images of the pool with other keys, one of them among new images, and the same in other shards."""
    pool, again = open_wds(data[0]), tmp_path / "folders"
    for sample in pool.samples():
        place = again / mini.CLASSES[sample.label]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{sample.key}.png").write_bytes(sample.image)
    files = [Sample(path.name, path.read_bytes()) for path in sorted(again.rglob("*.png"))]
    copied = replace(open_wds(data[0]), samples=lambda share=WHOLE: iter(files), fingerprint="other")
    with pytest.raises(ValueError, match="images that are scored, 35 of 35 images .s0000"):
        check_pool(pool, copied)
    with pytest.raises(UnfitPrompts, match="were fitted to 35 of 35 images"):
        compute_features(copied, ours, prompts=PromptWeights.load(kept))
    check_pool(pool, replace(copied, samples=lambda share=WHOLE: iter([Sample("s0000000", b"1")])))  # a key is no image
    shards = mini.wds_classification(tmp_path / "wds_again", templates=TEMPLATES, images=35, seed=3, shards=3)
    assert open_wds(shards).fingerprint != pool.fingerprint
    words = ["--model", folder, "--data", f"wds:{shards}", "--prompts"]
    assert "were fitted to 35 of 35 images" in refusal(capsys, evaluate, *words, str(kept))
    own = ["bprw", "--prompts-fit", f"wds:{data[0]}"]
    assert "images that are scored, 35 of 35" in refusal(capsys, evaluate, *words, *own)
    before = replace(PromptWeights.load(kept), contents=frozenset())  # a file from before contents were kept
    assert compute_features(copied, ours, prompts=before).text is not None


def test_prompts_of_a_file_take_the_place_of_the_data_sets_own(data, folder, ours, tmp_path, capsys):
    lines, out = tmp_path / "prompts.txt", tmp_path / "w.json"
    fit = ["fit", "--model", folder, "--data", f"wds:{data[0]}", "--output", str(out), "--templates", str(lines)]
    for text, words in {"": "holds no prompt", "{c}\n\n{c}\n": "is blank", "a\n": "'a' has no {c}"}.items():
        lines.write_text(text)
        assert words in refusal(capsys, prompts, *fit) and not out.exists()
    lines.write_text("the {c}\n{c}\n")
    prompts(fit)
    found = PromptWeights.load(out)
    assert found.templates == ("the {c}", "{c}") and found.rule == "bprw" and found.table.shape == (7, 2)
    assert torch.equal(fit_prompts(open_wds(data[0]), ours, Reweighing(), ["the {}", "{}"]).table, found.table)


def test_the_listing_names_most_and_least_weighted_prompts_and_the_figure_is_drawn(kept, tmp_path, capsys):
    found = PromptWeights.load(kept)
    prompts(["show", str(kept), "--top", "1", "--output", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    nats = -(found.table * found.table.log()).sum(1)
    assert lines[:2] == [str(found), "7 classes, 4 prompts; even weights are 0.2500"]
    spread = f"{nats.mean():.3f} nats on average, {nats.min():.3f} to {nats.max():.3f}"
    assert lines[2] == f"entropy {spread} (even weights: 1.386)"
    means = [float(line.split()[0]) for line in lines[3:7]]
    assert means == sorted(means, reverse=True) and sum(means) == pytest.approx(1, abs=1e-3)
    for name, row, line in zip(mini.CLASSES, found.table, lines[7:14]):
        most, least = (f"{row[i]:.4f} {TEMPLATES[i]!r}" for i in (int(row.argmax()), int(row.argmin())))
        assert line.startswith(f"{name} (entropy ") and line.endswith(f"): most {most}; least {least}")
    pixels = np.asarray(Image.open(tmp_path / "weights.png").convert("RGB"))
    assert (pixels != 255).any(2).mean() > 0.02 and pixels.shape[1] > 800
    assert (tmp_path / "weights.pdf").read_bytes().startswith(b"%PDF")
