"""Every one of the 40 entries, run by the command on a miniature of its true format, against a few lines of NumPy."""

import json
import time

import miniatures
import pytest
import torch
from commands import datacomp
from datacomp_suite import SIMILARITIES, Oracle, write_suite

from prolip.evaluation.suites.datacomp.tables import uncertainty_table
from prolip.evaluation.suites.datacomp.tasks import AGGREGATES, BY_KEY, COUNTED, TASKS


class Suite:
    """The data, the model, what the command left, and the seconds of processor time it took."""

    def __init__(self, root):
        self.root, self.data, self.out = root, root / "data", root / "out"
        self.model = miniatures.prolip_folder(root / "model")
        self.oracle = Oracle(self.model)
        self.folders = write_suite(self.data, TASKS, self.oracle)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # threads that wait for one another take processor time too, and all on a busy machine
        started = time.process_time()
        self.outcome = datacomp(
            [
                "--model",
                self.model,
                "--data",
                str(self.data),
                "--output",
                str(self.out),
                "--similarity",
                *SIMILARITIES,
                "--workers",
                "0",
                "--device",
                "cpu",
                "--published",
                "12.8B",
            ]
        )
        self.seconds = time.process_time() - started
        torch.set_num_threads(threads)
        lines = [json.loads(line) for line in (self.out / "results.jsonl").read_text().splitlines()]
        self.results = {(line["key"], line["identity"]["similarity"]): line for line in lines}
        assert len(self.results) == len(lines)


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return Suite(tmp_path_factory.mktemp("datacomp"))


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("key", [task.key for task in TASKS])
def test_an_entry_gives_what_a_few_lines_of_numpy_give(suite, key, similarity):
    expected = suite.oracle.expect(BY_KEY[key], suite.folders[key], similarity)
    metrics = suite.results[key, similarity]["metrics"]
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-9)
    main_metric = BY_KEY[key].main_metric
    assert metrics["main_metric"] == (metrics[main_metric] if main_metric else None)
    assert main_metric is None or main_metric in expected


def test_the_figures_differ_from_task_to_task_and_from_chance(suite):
    values = [suite.results[task.key, "csd"]["metrics"]["main_metric"] for task in COUNTED]
    assert len({round(value, 6) for value in values}) > 10
    assert sum(0 < value < 1 for value in values) > 30


def test_the_two_similarities_are_not_the_same_on_every_task(suite):
    both = [[suite.results[task.key, name]["metrics"] for name in SIMILARITIES] for task in TASKS]
    main_ones = [{k: v for k, v in m.items() if "/" not in k} for pair in both for m in pair]
    assert any(a != b for a, b in zip(main_ones[::2], main_ones[1::2]))


def test_the_averages_are_the_means_of_the_oracles_values(suite):
    expected = {}
    for task in COUNTED:
        expected[task.key] = 100 * suite.oracle.expect(task, suite.folders[task.key], "csd")[task.main_metric]
    row = next(row for row in suite.outcome.report.ours if "(csd)" in row.label)
    for name, keys in AGGREGATES.items():
        assert row.averages[name] == pytest.approx(sum(expected[key] for key in keys) / len(keys), abs=1e-6)
        assert name in row.marked  # a dozen images are not the test set


def test_every_result_says_on_what_it_was_measured_and_how_uncertain_the_model_was(suite):
    for task in TASKS:
        line = suite.results[task.key, "csd"]
        assert line["dataset"] == task.name
        assert 0 < line["info"]["image_trace"] < 100
        assert any(name.startswith("refusal/") for name in line["metrics"])
    assert suite.results["cars", "csd"]["info"]["size"] == 12
    assert suite.results["misc/winogavil", "csd"]["info"]["size"] == 5
    for key in ("cars", "retrieval/flickr_1k_test_image_text_retrieval", "misc/winogavil"):
        assert "calibration/match/ece" in suite.results[key, "csd"]["metrics"]
        assert not any(name.startswith("calibration/") for name in suite.results[key, "mean"]["metrics"])


def test_tables_lie_beside_the_results(suite):
    text = (suite.out / "tables.md").read_text()
    assert "ProLIP ViT-B/16, 12.8B" in text and f"{suite.model} (csd)" in text
    assert "FairFace" in text and "UTKFace" in text
    assert (suite.out / "tables.csv").read_text().count("\n") == 1 + 2 + 1 + 2
    assert len(json.loads((suite.out / "tables.json").read_text())["rows"]) == 3
    assert (suite.out / "tables.tex").read_text().count(r"\begin{table}") == 5


def test_fmow_without_its_tiny_region_stands_below_the_tables(suite):
    value = suite.oracle.expect(BY_KEY["wilds/fmow"], suite.folders["wilds/fmow"], "csd")
    text = f"(csd): FMoW is {100 * value['acc_worst_region_without_other']:.2f} without the region Other"
    assert text in (suite.out / "tables.md").read_text() and text in (suite.out / "tables.tex").read_text()


def test_the_table_of_uncertainty_has_a_line_per_query_and_its_figures(suite):
    grid = uncertainty_table(suite.outcome.report)
    assert len(grid.rows) == len(SIMILARITIES) * (len(TASKS) + 2)  # retrieval has two directions
    metrics = suite.results["wilds/fmow", "csd"]["metrics"]
    cells = dict(zip(grid.header, next(cells for label, cells in grid.rows if label.endswith("(csd), FMoW"))))
    assert cells["Error"].value == pytest.approx(1 - metrics["acc1"])
    assert cells["AURC"].value == metrics["refusal/image/aurc"] != metrics["refusal/score/aurc"]
    assert cells["R-AUROC"].value == pytest.approx(metrics["refusal/R-AUROC"])
    assert cells["ECE of matches"].value == metrics["calibration/match/ece"]
    tenths = [cells[f"Error, {which} tenth"].value for which in ("surest", "least sure")]
    assert tenths == [metrics["refusal/image/error_decile1"], metrics["refusal/image/error_decile10"]]
    label = next(label for label, _ in grid.rows if label.endswith("(csd), Flickr t2i"))
    cells = dict(zip(grid.header, dict(grid.rows)[label]))
    found = suite.results["retrieval/flickr_1k_test_image_text_retrieval", "csd"]["metrics"]["image_retrieval_recall@1"]
    assert cells["Error"].value == pytest.approx(1 - found)


def test_all_forty_take_less_than_a_minute_of_one_core(suite):
    assert suite.seconds < 60


def test_a_finished_run_repeats_nothing(suite, capsys):
    before = (suite.out / "results.jsonl").read_bytes()
    datacomp(["--model", suite.model, "--data", str(suite.data), "--output", str(suite.out), "--device", "cpu"])
    assert (suite.out / "results.jsonl").read_bytes() == before
    assert not any(line.startswith("[") for line in capsys.readouterr().out.splitlines())
