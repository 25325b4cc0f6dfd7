"""DataComp with re-weighted prompts: a row of its own, and in it the weights of a file for the task of its classes."""

import json

import miniatures
import pytest
from commands import datacomp
from datacomp_suite import Oracle, write_suite

from prolip.evaluation.datasets.wds import open_wds
from prolip.evaluation.suites.datacomp.tasks import select_tasks
from prolip.evaluation.task import compute_features, evaluate_dataset
from prolip.loading import load_embedder
from prolip.prompts.bprw import Reweighing
from prolip.prompts.fitting import fit_prompts
from prolip.prompts.weights import PromptWeights

FEW = select_tasks(["cifar10", "flickr"])


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """A model, the datasets, weights for CIFAR-10 of other images, and of an eighth class more."""
    root = tmp_path_factory.mktemp("datacomp_prompts")
    model = miniatures.prolip_folder(root / "model")
    write_suite(root / "data", FEW, Oracle(model))
    (cifar,) = [root / "data" / name for name in FEW[0].folders if (root / "data" / name).is_dir()]
    scored, embedder = open_wds(cifar), load_embedder(model)
    for name, more in (("pool", ()), ("wide", ("cow",))):
        pool = miniatures.wds_classification(root / name, (*scored.classnames, *more), scored.templates, 24, seed=8)
        fit_prompts(open_wds(pool), embedder, Reweighing(2)).save(root / f"{name}.json")
    return root, model, scored, embedder


def command(suite, *more):
    root, model, *_ = suite
    return [
        "--model",
        model,
        "--data",
        str(root / "data"),
        "--workers",
        "0",
        "--device",
        "cpu",
        "--tasks",
        *(task.key for task in FEW),
        *map(str, more),
    ]


def test_the_task_of_the_file_is_scored_by_its_weights_and_stands_in_a_row_of_its_own(suite, tmp_path, capsys):
    root, _, scored, embedder = suite
    weights = PromptWeights.load(root / "pool.json")
    datacomp(command(suite, "--output", tmp_path))
    outcome = datacomp(command(suite, "--output", tmp_path, "--prompts", root / "pool.json"))
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(lines) == 4 and len(outcome.report.ours) == 2
    plain, weighed = (
        [line for line in lines if (weights.digest in line["identity"]["model"]) is own] for own in (False, True)
    )
    want = evaluate_dataset(scored, compute_features(scored, embedder, prompts=weights)).metrics
    found = {line["key"]: line for line in weighed}
    assert found[FEW[0].key]["metrics"]["acc1"] == want["acc1"]
    assert found[FEW[0].key]["info"]["prompts"] == str(weights) and "prompts" not in found[FEW[1].key]["info"]
    other = {line["key"]: line["metrics"] for line in plain}
    assert found[FEW[1].key]["metrics"] == other[FEW[1].key]
    assert found[FEW[0].key]["metrics"] != other[FEW[0].key]
    assert weights.digest in outcome.report.ours[1].label
    again = datacomp(command(suite, "--output", tmp_path, "--prompts", root / "pool.json"))
    assert "2 of 2 tasks are finished" in capsys.readouterr().out and len(again.report.ours) == 2


def test_weights_of_no_task_of_another_model_and_two_of_one_are_refused(suite, tmp_path, capsys):
    root, *_ = suite

    def refused(*more):
        with pytest.raises(SystemExit) as ended:
            datacomp(command(suite, "--output", tmp_path / "out", *more))
        assert ended.value.code == 2
        return capsys.readouterr().err

    assert "those of no task here" in refused("--prompts", root / "wide.json")
    assert "are both of one task" in refused("--prompts", root / "pool.json", root / "pool.json")
    other = miniatures.prolip_folder(tmp_path / "other", seed=3)
    assert "has other weights" in refused("--prompts", root / "pool.json", "--model", other)
    assert "no file" in refused("--prompts", root / "none.json")
    assert not (tmp_path / "out/results.jsonl").exists()
