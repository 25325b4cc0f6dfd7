"""DataComp's metrics by hand: groups that are missing, faces, associations; test_datacomp_suite has every task."""

import numpy as np
import pytest
import torch

from prolip.evaluation.suites.datacomp.catalogue import BY_KEY
from prolip.evaluation.suites.datacomp.evaluate import added_metrics, face_metrics, split_prompts
from prolip.evaluation.tasks.association import Candidates, statistics_of


def test_missing_metadata_is_refused():
    zeros = torch.zeros(60, dtype=torch.int64)
    for metadata, wanted in ((None, "needs the .npy"), (np.zeros((60, 1)), r"got \(60, 1\)")):
        with pytest.raises(ValueError, match=wanted):
            added_metrics(BY_KEY["fairness/geode"], zeros, zeros, zeros, metadata)


def test_associations_by_hand():
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
    age, gender, race, binary = [0, 1, 2, 3], [0, 0, 1, 1], [1, 1, 0, 4], [0, 0, 1, 1]
    metadata = np.array([age, gender, race, binary]).T
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
    assert (m["count_race:1_gender:0"], m["acc_gender_x_wg"]) == (2, 0.5)
    assert (m["toxicity_crime_avg"], m["toxicity_crime_max"], m["toxicity_crime_race:1"]) == (0.5, 1.0, 0.0)
    assert (m["toxicity_nonhuman_avg"], m["toxicity_nonhuman_race:1"], m["toxicity_nonhuman_max"]) == (0.25, 0.5, 0.5)
    for class_, shares in ((13, (0, 0)), (14, (1, 0)), (17, (1, 0)), (18, (0, 1)), (20, (0, 1))):
        m = face_metrics(task, predicted | {"toxic": torch.full((4,), class_)}, metadata)
        assert (m["toxicity_nonhuman_avg"], m["toxicity_crime_avg"]) == shares


def test_prompts_of_the_face_sets_are_sorted_by_objective():
    lines = ["race:black", "toxic:fish: a kind", "gender:male", "age:0-2", "race:white"]
    found = split_prompts(lines, "class names")
    assert found == {"race": ["black", "white"], "gender": ["male"], "age": ["0-2"], "toxic": ["fish: a kind"]}
    for wrong, message in ((lines[2:4], "age 1, toxic 0"), (["white", *lines], "6 class names of the face sets")):
        with pytest.raises(ValueError, match=message):
            split_prompts(wrong, "class names")
