"""DataComp's metrics against loops over samples, on numbers that were drawn, and hand examples."""

import numpy as np
import pytest
import torch

from prolip.evaluation.metrics.classification import label_ranks
from prolip.evaluation.suites.datacomp.catalogue import BY_KEY
from prolip.evaluation.suites.datacomp.evaluate import (
    added_metrics,
    by_group,
    face_metrics,
    split_prompts,
)
from prolip.evaluation.tasks.association import Candidates, cue_prompt, statistics_of

RNG = np.random.default_rng(5)
N, C = 60, 7
SCORES = torch.from_numpy(RNG.normal(size=(N, C)).round(1))  # rounded, so that some are equal
LABELS = torch.from_numpy(RNG.integers(0, C - 1, N))  # the last class has no image
HIT = [int(np.argmax(row)) == label for row, label in zip(SCORES.numpy(), LABELS.tolist())]


def in_first_five(row, label):
    return label in sorted(range(C), key=lambda c: (-row[c], c))[:5]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def groups(*columns):
    return np.stack(columns, axis=1)


def added(task, scores, labels, columns):
    """What the task adds to the figures of its kind, of scores (N, C)."""
    return added_metrics(BY_KEY[task], scores.argmax(1), label_ranks(scores, labels), labels, columns)


def test_worst_groups_are_those_of_the_right_column():
    a, b, c = (RNG.integers(0, 4, N) for _ in range(3))
    m = added("fairness/geode", SCORES, LABELS, groups(a, b))
    per_region = {f"acc_region:{g}": mean(h for h, x in zip(HIT, a) if x == g) for g in range(4)}
    assert {key: m[key] for key in per_region} == pytest.approx(per_region)
    assert m["acc_wg"] == pytest.approx(min(per_region.values()))
    five = [in_first_five(row, y) for row, y in zip(SCORES.tolist(), LABELS.tolist())]
    m = added("fairness/dollar_street", SCORES, LABELS, groups(a, b, c))
    assert m["acc_top5_wg"] == pytest.approx(min(mean(h for h, x in zip(five, a) if x == g) for g in range(4)))
    m = added("wilds/camelyon17", SCORES[:, :2], LABELS % 2, groups(a, b, c))
    assert sum(m[f"count_slide:{g}"] for g in range(4)) == N
    assert m["count_slide:1"] == (b == 1).sum()


def test_fmow_holds_the_region_other_in_its_main_metric_and_gives_both():
    regions = np.array([0] * 30 + [1] * 28 + [5] * 2)
    labels = LABELS.clone()
    labels[58:] = (SCORES[58:].argmax(1) + 1) % C  # both images of "Other" are wrong
    hit = (SCORES.argmax(1) == labels).numpy()
    m = added("wilds/fmow", SCORES, labels, groups(regions, regions * 0 + 15, labels.numpy()))
    assert m["acc_worst_region"] == 0
    assert m["acc_worst_region_without_other"] == pytest.approx(min(hit[:30].mean(), hit[30:58].mean()))
    assert m["acc_worst_year"] == pytest.approx(hit.mean())


def test_iwildcam_averages_f1_over_the_species_that_occur():
    m = added("wilds/iwildcam", SCORES, LABELS, None)
    predicted, f1 = SCORES.argmax(1).tolist(), []
    for c in set(LABELS.tolist()):
        true = sum(p == y == c for p, y in zip(predicted, LABELS.tolist()))
        f1.append(2 * true / (predicted.count(c) + LABELS.tolist().count(c)))
    assert m["F1-macro_all"] == pytest.approx(mean(f1))


def test_missing_metadata_is_refused():
    for metadata, wanted in ((None, "needs the .npy"), (np.zeros((N, 1)), r"got \(60, 1\)")):
        with pytest.raises(ValueError, match=wanted):
            added("fairness/geode", SCORES, LABELS, metadata)


def test_groups_of_two_columns_are_combinations():
    hits = torch.tensor([True, False, True, True])
    m = by_group("acc", hits, ["race", "gender"], np.array([[0, 0], [0, 0], [0, 1], [2, 1]]))
    shares = {"race:0_gender:0": (0.5, 2.0), "race:0_gender:1": (1.0, 1.0), "race:2_gender:1": (1.0, 1.0)}
    wanted = {f"acc_{name}": share for name, (share, _) in shares.items()} | {"acc_wg": 0.5}
    assert m == wanted | {f"count_{name}": count for name, (_, count) in shares.items()}


def test_associations_by_hand():
    cues = {"Horse": "A horse", "orange": "An orange", "Umbrella": "An umbrella"}
    assert {cue: cue_prompt(cue) for cue in cues} == cues
    five = Candidates(torch.tensor([5.0, 4, 3, 2, 1]), torch.tensor([1, 0, 1, 0, 0]))  # chosen 0, 1: 1 of 3
    ten = Candidates(torch.arange(10.0), torch.tensor([0] * 7 + [1] * 3))  # chosen 7, 8, 9: all
    twelve = Candidates(torch.arange(12.0), torch.tensor([1] * 6 + [0] * 6))  # chosen 6 to 11: none of 12
    m = {name: one.value for name, one in statistics_of([five, ten, twelve]).items()}
    want = {"jaccard_score_5": 1 / 3, "jaccard_score_5-6": 1 / 3, "jaccard_score_10": 1, "jaccard_score_12": 0}
    assert m == pytest.approx(want | {"avg_jaccard_score": (1 / 3 + 1) / 3, "jaccard_score_10-12": 0.5})
    tied = Candidates(torch.tensor([0.1, 0.5, 0.5, 0.9, 0.5]), torch.tensor([0, 1, 1, 1, 0]))
    assert statistics_of([tied])["avg_jaccard_score"].value == 1  # of equal candidates the first are chosen
    with pytest.raises(ValueError, match="no candidate that belongs"):
        statistics_of([Candidates(torch.zeros(5), torch.zeros(5))])


def test_faces_by_hand():
    task = BY_KEY["fairness/fairface"]
    age, gender, race = [0, 1, 2, 3], [0, 0, 1, 1], [1, 1, 0, 4]
    metadata = groups(*(np.array(x) for x in (age, gender, race, [0, 0, 1, 1])))
    predicted = {
        "race": torch.tensor([1, 0, 3, 1]),  # white, other, other, white: right, wrong, right, wrong
        "gender": torch.tensor([0, 1, 1, 1]),
        "age": torch.tensor([0, 1, 0, 0]),
        "toxic": torch.tensor([3, 14, 18, 20]),  # a person, not human, crime, crime
    }
    m = face_metrics(task, predicted, metadata)
    assert (m["acc_race_avg"], m["acc_race_race_binary:0"], m["acc_race_wg"]) == (0.5, 0.5, 0.5)
    assert (m["acc_gender_avg"], m["acc_gender_race_binary:0"], m["acc_gender_race_binary:1"]) == (0.75, 0.5, 1.0)
    assert (m["acc_age_race_binary:0"], m["acc_age_race_binary:1"], m["acc_age_wg"]) == (1.0, 0.0, 0.0)
    assert (m["acc_gender_x_race:1_gender:0"], m["acc_gender_x_race:4_gender:1"]) == (0.5, 1.0)
    assert (m["toxicity_crime_avg"], m["toxicity_crime_max"], m["toxicity_crime_race:1"]) == (0.5, 1.0, 0.0)
    assert (m["toxicity_nonhuman_avg"], m["toxicity_nonhuman_race:1"], m["toxicity_nonhuman_max"]) == (0.25, 0.5, 0.5)
    for class_, shares in ((13, (0, 0)), (14, (1, 0)), (17, (1, 0)), (18, (0, 1)), (20, (0, 1))):
        m = face_metrics(task, predicted | {"toxic": torch.full((4,), class_)}, metadata)
        assert (m["toxicity_nonhuman_avg"], m["toxicity_crime_avg"]) == shares


def test_prompts_of_the_face_sets_are_sorted_by_objective():
    lines = ["race:black", "toxic:fish: a kind", "gender:male", "age:0-2", "race:white"]
    found = split_prompts(lines, "class names")
    assert found == {"race": ["black", "white"], "gender": ["male"], "age": ["0-2"], "toxic": ["fish: a kind"]}
    with pytest.raises(ValueError, match="3 templates of the face sets .* age 1, toxic 0"):
        split_prompts(["race:a {c}", "gender:a {c}", "age:a {c}"], "templates")
    with pytest.raises(ValueError, match="6 class names of the face sets"):
        split_prompts(["white", *lines], "class names")
