"""Prompts of a class: rules by hand, mixtures by the command, a choice that no image makes for itself."""

from __future__ import annotations

import statistics
from dataclasses import replace

import miniatures as mini
import pytest
import torch
from commands import evaluate, refusal

from prolip.evaluation import prompts as best_prompts
from prolip.evaluation.datasets.webdataset import open_wds
from prolip.evaluation.evaluate import compute_features, evaluate_dataset, study_features
from prolip.gaussian import Gaussian
from prolip.methods import find_score
from prolip.prompts.templates import PromptRule

TRACES = [[5.0, 1.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0], [1.0, 2.0, 3.0, 40.0]]
#: Prompts that differ in length, and so in what a random model makes of them.
TEMPLATES = ("{c}", "a photo of a {c}.", "this is the {c} of a friend of mine", "{c} {c}")


def kept(word: str, traces=TRACES) -> list[list[int]]:
    """Return the prompts that count, and check that they count equally."""
    weights = PromptRule.parse(word).weights(torch.tensor(traces))
    rows = [row.nonzero().flatten().tolist() for row in weights]
    for row, chosen in zip(weights, rows):
        torch.testing.assert_close(row[chosen], torch.full((len(chosen),), 1 / len(chosen)))
    return rows


def test_rules_keep_the_prompts_that_they_say():
    everything = [[0, 1, 2, 3]] * 3
    assert kept("all") == kept("certain:4") == everything
    assert kept("certain:1") == [[1], [0], [0]]
    assert kept("certain:2") == [[1, 2], [0, 1], [0, 1]]  # of equal ones the first
    assert kept("certain:3") == [[1, 2, 3], [0, 1, 2], [0, 1, 2]]
    for k in (-0.5, 0.0, 1.0, 1.5):
        want = []
        for row in TRACES:
            bound = statistics.fmean(row) + k * statistics.pstdev(row)
            want.append([i for i, x in enumerate(row) if x <= bound])
        assert kept(f"below:{k}") == want
    assert kept("below:-9") == [[1], [0, 1, 2, 3], [0]]  # never none
    for word in ("", "some", "all:1", "certain", "certain:0", "certain:1.5", "below:x", "below:nan", "best:3"):
        with pytest.raises(ValueError, match="is not a rule for prompts"):
            PromptRule.parse(word)
    thirds = [[0.1, 0.1, 0.1]]
    assert kept("below:0", thirds) == [[0, 1, 2]]  # whose mean in float32 is less than each


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return mini.wds_classification(tmp_path_factory.mktemp("prompts") / "wds_birds", templates=TEMPLATES, images=42)


@pytest.mark.parametrize("word", ["certain:2", "below:0.3"])
def test_features_hold_the_mixture_of_the_kept_prompts(data, ours, word):
    dataset = open_wds(data)
    got = compute_features(dataset, ours, prompts=PromptRule.parse(word))
    plain = compute_features(dataset, ours)
    assert got.text_key != plain.text_key and got.dataset.info["prompts"] == word
    assert torch.equal(got.image.mean, plain.image.mean) and not torch.allclose(got.text.mean, plain.text.mean)
    for row, name in enumerate(mini.CLASSES):
        z = ours.embed_texts([template.replace("{c}", name) for template in TEMPLATES])
        traces = z.trace.tolist()
        bound = sorted(traces)[1] if word == "certain:2" else statistics.fmean(traces) + 0.3 * statistics.pstdev(traces)
        chosen = [i for i, trace in enumerate(traces) if trace <= bound]
        assert 0 < len(chosen) < 4
        mean = z.mean[chosen].mean(0)
        torch.testing.assert_close(got.text.mean[row], mean / mean.norm(), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(got.text.var[row], z.var[chosen].mean(0))


def by_hand(features, prompts, labels):
    """Best counts on each half in loops, and the prediction of every image by the choice of the half it is not in."""
    score, classes, count = find_score("csd")(), len(prompts.mean), prompts.mean.shape[1]
    order = [sorted(range(count), key=lambda i: prompts.trace[c, i].item()) for c in range(classes)]

    def mixed(counts):
        rows = [order[c][: counts[c]] for c in range(classes)]
        mean = torch.stack([prompts.mean[c, rows[c]].mean(0) for c in range(classes)])
        var = torch.stack([prompts.var[c, rows[c]].mean(0) for c in range(classes)])
        return Gaussian(mean / mean.norm(dim=1, keepdim=True), var.log())

    first = best_prompts.halves(features.keys, labels).tolist()
    nearest = {k: score.pairwise(features.image, mixed([k] * classes)).argmax(1).tolist() for k in range(1, count + 1)}
    predicted = [None] * len(labels)
    for own in (True, False):
        best = []
        for c in range(classes):
            judges = [i for i, label in enumerate(labels.tolist()) if label == c and first[i] != own]
            best.append(max(range(1, count + 1), key=lambda k: (sum(nearest[k][i] == c for i in judges), k)))
        scores = score.pairwise(features.image, mixed(best))
        for i in range(len(labels)):
            if first[i] == own:
                predicted[i] = int(scores[i].argmax())
    return torch.tensor(predicted)


@pytest.fixture
def features(data, ours):
    """Return random features, so that every number of prompts classifies different images correctly."""
    found = compute_features(open_wds(data), ours, prompts=PromptRule.parse("best"))
    assert found.prompts.mean.shape == (7, 4, 32) and found.image.mean.shape == (42, 32)
    g = torch.Generator().manual_seed(0)

    def anywhere(*shape):
        points, spread = (torch.randn(*shape, 32, generator=g) for _ in range(2))
        return Gaussian(torch.nn.functional.normalize(points, dim=-1), 0.1 * spread - 6)

    return replace(found, image=anywhere(42), prompts=anywhere(7, 9))


def test_the_best_prompts_of_a_class_are_chosen_by_the_images_that_are_not_scored_by_them(features):
    result = evaluate_dataset(features.dataset, features, "csd", confusion=True)
    predicted = by_hand(features, features.prompts, features.labels)
    assert result.metrics["acc1"] == pytest.approx((predicted == features.labels).double().mean().item())
    confusion = torch.zeros(len(mini.CLASSES), len(mini.CLASSES), dtype=torch.long)
    for label, guess in zip(features.labels.tolist(), predicted.tolist()):
        confusion[label, guess] += 1
    assert result.info["confusion"] == confusion.tolist()
    assert result.info["prompts"] == best_prompts.CHOSEN
    turned = best_prompts.halves(features.keys[::-1], features.labels.flip(0)).flip(0)
    assert torch.equal(turned, best_prompts.halves(features.keys, features.labels))  # for any order of images
    with pytest.raises(ValueError, match="use other prompts"):
        study_features(features)


def test_what_has_no_prompts_to_choose_from_is_refused(tmp_path, data, folder, theirs, capsys):
    def refused(*words):
        return refusal(capsys, evaluate, *words)

    words = ["--model", folder, "--data", f"wds:{data}"]
    assert "certain:9 exceeds the 4 prompts" in refused(*words, "--prompts", "certain:9")
    assert "remove --uncertainty" in refused(*words, "--prompts", "best", "--uncertainty")
    assert "remove --prompts" in refused("--features", str(tmp_path), "--prompts", "certain:1")
    pairs, many = mini.wds_retrieval(tmp_path / "wds_pairs"), mini.wds_multilabel(tmp_path / "wds_many")
    assert "retrieval set, which has no prompts" in refused(*words, f"wds:{pairs}", "--prompts", "below:0")
    assert "multilabel set" in refused(*words, f"wds:{many}", "--prompts", "best")
    result = evaluate(["--model", folder, "--data", f"wds:{many}", "--prompts", "certain:1"])[0]
    assert result.info["prompts"] == "certain:1" and "prompts: certain:1" in capsys.readouterr().out
    with pytest.raises(ValueError, match="gives points"):
        compute_features(open_wds(data), theirs, prompts=PromptRule.parse("certain:1"))
