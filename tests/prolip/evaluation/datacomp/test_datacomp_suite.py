"""Every one of the 40 entries, run by the command on a miniature of its true format, against a few lines of NumPy."""

import json
from types import SimpleNamespace

import pytest
from datacomp_suite import SIMILARITIES

from prolip.evaluation.suites.datacomp.catalogue import AGGREGATES, BY_KEY, COUNTED, TASKS
from prolip.evaluation.suites.datacomp.report import grids


@pytest.fixture(scope="module")
def ran(suite, tmp_path_factory):
    """Run the command with two similarities, and return its files."""
    out = tmp_path_factory.mktemp("out")
    outcome = suite.run(out, "--similarity", *SIMILARITIES)
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    results = {(line["key"], line["identity"]["similarity"]): line for line in lines}
    assert len(results) == len(lines) == 80
    return SimpleNamespace(out=out, outcome=outcome, results=results)


@pytest.mark.parametrize("key", [task.key for task in TASKS])
def test_an_entry_gives_what_a_few_lines_of_numpy_give(suite, ran, key):
    main_metric = BY_KEY[key].main_metric
    for similarity in SIMILARITIES:
        expected = suite.oracle.expect(BY_KEY[key], suite.folders[key], similarity)
        metrics = ran.results[key, similarity]["metrics"]
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-9)
        assert metrics["main_metric"] == (metrics[main_metric] if main_metric else None)
        assert main_metric is None or main_metric in expected


def test_the_averages_are_the_means_of_main_metrics_that_differ(ran):
    values, others = (
        [ran.results[task.key, name]["metrics"]["main_metric"] for task in COUNTED] for name in SIMILARITIES
    )
    assert len({round(value, 6) for value in values}) > 10 and values != others
    assert sum(0 < value < 1 for value in values) > 30  # not chance
    expected = {task.key: 100 * value for task, value in zip(COUNTED, values)}
    row = next(row for row in ran.outcome.rows if "(csd)" in row.label)
    for name, keys in AGGREGATES.items():
        assert row.averages[name] == pytest.approx(sum(expected[key] for key in keys) / len(keys), abs=1e-6)
        assert name in row.marked  # a dozen images are not the test set


def test_every_result_says_on_what_it_was_measured_and_how_uncertain_the_model_was(ran):
    for task in TASKS:
        line = ran.results[task.key, "csd"]
        assert line["dataset"] == task.name
        assert 0 < line["info"]["image_trace"] < 100
        assert any(name.startswith("refusal/") for name in line["metrics"])
    assert ran.results["cars", "csd"]["info"]["size"] == 12
    assert ran.results["misc/winogavil", "csd"]["info"]["size"] == 5
    for key in ("cars", "retrieval/flickr_1k_test_image_text_retrieval", "misc/winogavil"):
        assert "calibration/match/ece" in ran.results[key, "csd"]["metrics"]
        assert not any(name.startswith("calibration/") for name in ran.results[key, "mean"]["metrics"])


def test_tables_lie_beside_the_results(suite, ran):
    text, latex = ((ran.out / f"tables.{ending}").read_text() for ending in ("md", "tex"))
    assert f"{suite.model} (csd)" in text and "FairFace" in text and "UTKFace" in text
    assert (ran.out / "tables.csv").read_text().count("\n") == 1 + 2
    assert len(json.loads((ran.out / "tables.json").read_text())["rows"]) == 2
    assert latex.count(r"\begin{table}") == 5
    value = suite.oracle.expect(BY_KEY["wilds/fmow"], suite.folders["wilds/fmow"], "csd")
    note = f"(csd): FMoW is {100 * value['acc_worst_region_without_other']:.2f} without the region Other"
    assert note in text and note in latex


def test_the_table_of_uncertainty_has_a_line_per_query_and_its_values(ran):
    grid = grids(ran.outcome.rows)[-1]
    assert len(grid.rows) == len(SIMILARITIES) * (len(TASKS) + 2)  # retrieval has two directions

    def cells(ending):
        (found,) = (cells for label, cells in grid.rows if label.endswith(f"(csd), {ending}"))
        return dict(zip(grid.header, (cell.removesuffix("*") for cell in found)))

    metrics, found = ran.results["wilds/fmow", "csd"]["metrics"], cells("FMoW")
    wanted = {"Error": 1 - metrics["acc1"], "AURC": metrics["refusal/image/aurc"]}
    wanted |= {"AURC by score": metrics["refusal/score/aurc"], "R-AUROC": metrics["refusal/R-AUROC"]}
    wanted |= {"ECE of matches": metrics["calibration/match/ece"]}
    wanted |= {"Error, most certain tenth": metrics["refusal/image/error_decile1"]}
    wanted |= {"Error, least certain tenth": metrics["refusal/image/error_decile10"]}
    assert {name: found[name] for name in wanted} == {name: f"{value:.3f}" for name, value in wanted.items()}
    flickr = ran.results["retrieval/flickr_1k_test_image_text_retrieval", "csd"]["metrics"]
    assert cells("Flickr t2i")["Error"] == f"{1 - flickr['image_retrieval_recall@1']:.3f}"


def test_a_finished_run_repeats_nothing(suite, ran, capsys):
    before = (ran.out / "results.jsonl").read_bytes()
    suite.run(ran.out)
    assert (ran.out / "results.jsonl").read_bytes() == before
    assert not any(line.startswith("[") for line in capsys.readouterr().out.splitlines())
