"""The papers' tables as copied: what one prints twice, in two ways or in two papers, agrees, but where we say so."""

from __future__ import annotations

import json

import pytest

from prolip.evaluation.datasets.coco_labels import names_of_labels
from prolip.evaluation.evaluate import TaskResult
from prolip.evaluation.metrics.ranking import retrieval_names
from studies.papers.papers import PRINTED, find_printed, format_printed, main, own_value, read_printed

WAYS = ("i2t", "t2i")
KS = (1, 5, 10)
#: Where the means of Tables C.8 to C.11 are not what Table 1 prints: printed and mean.
UNLIKE_TABLE_1 = {
    ("ViT-B/32, VSE∞", "eccv/R@1"): (83.1, 82.9),
    ("ViT-B/32, VSE∞", "cxc/R@1"): (57.1, 56.4),
    ("ViT-B/32, VSE∞", "coco_1k/R@1"): (75.5, 74.95),
    ("ViT-B/32, VSE∞", "coco_5k/R@1"): (55.2, 54.6),
    ("ViT-B/32, VSE∞", "coco_1k/rsum"): (536.5, 534.3),
    ("ViT-B/32, P2RM", "eccv/R@1"): (82.0, 80.85),
    ("ViT-B/32, P2RM", "cxc/R@1"): (53.6, 53.25),
    ("ViT-B/32, P2RM", "coco_1k/R@1"): (73.3, 73.05),
    ("ViT-B/32, P2RM", "coco_5k/R@1"): (51.7, 51.45),
    ("ViT-B/32, PCME++ (mean only)", "cxc/R@1"): (57.0, 57.25),
    ("ViT-B/32, PCME++ (mean only)", "coco_1k/R@1"): (75.3, 75.65),
    ("ViT-B/32, PCME++ (mean only)", "coco_5k/R@1"): (55.2, 55.45),
    ("ViT-L/14, PCME++", "eccv/R@1"): (88.8, 88.25),
    ("ViT-L/14, PCME++", "cxc/R@1"): (65.9, 66.1),
    ("ViT-L/14, PCME++", "coco_5k/R@1"): (64.3, 64.45),
}
#: Sums of Table I that are not those of their row's six figures.
WRONG_SUMS = {"VSE++ source-free, flickr": (108.1, 111.9), "SCAN, coco": (181.6, 184.3)}


def table(file: str) -> dict[str, dict[str, float]]:
    """Row -> metric -> value."""
    rows = read_printed(file, "", "").rows
    found = {label: {name: float(value) for name, value in values.items()} for label, values in rows}
    assert len(found) == len(rows)
    return found


def recalls(row: dict[str, float], prefix: str) -> list[float]:
    return [row[name] for name in (f"{prefix}{way}/R@{k}" for way in WAYS for k in KS) if name in row]


def test_table_1_is_the_mean_of_the_tables_of_both_directions_but_where_we_say_so():
    full, unlike = table("pcmepp-c8-c11.csv"), {}
    means = {label: row for label, row in table("pcmepp-1.csv").items() if "zero-shot" not in label}
    assert means.keys() == full.keys()
    for label, row in means.items():
        for name, value in row.items():
            own = {key: entry / 100 for key, entry in full[label].items()}
            found, slack = own_value(own, name), 0.1
            if name == "coco_1k/rsum":
                parts = recalls(full[label], "coco_1k/")
                found, slack = sum(parts) if len(parts) == 6 else value, 0.35
            assert found is not None
            if abs(found - value) > slack + 1e-6:
                unlike[label, name] = (value, pytest.approx(found))
    assert unlike == UNLIKE_TABLE_1


def test_the_sums_of_source_free_matching_follow_but_for_two():
    wrong = {}
    for data in ("coco", "flickr"):
        for label, row in table(f"source-free-1-{data}.csv").items():
            if abs(sum(recalls(row, "")) - row["rsum"]) > 0.3501:
                wrong[f"{label}, {data}"] = (row["rsum"], pytest.approx(sum(recalls(row, ""))))
    assert wrong == WRONG_SUMS


def test_recalls_rise_with_k_and_names_are_those_of_our_metrics():
    known = {
        *names_of_labels({"caption_ids": range(25_000)}),
        *retrieval_names(),
        "coco_1k/R@1",
        "coco_5k/R@1",
        "cxc/R@1",
    }
    known |= {f"{place}/{way}/PMRP" for place in ("coco_1k", "coco_5k") for way in WAYS}
    for printed in PRINTED:
        assert set(printed.metrics) <= known and printed.rows
        for label, values in printed.rows:
            row = {name: float(value) for name, value in values.items()}
            assert all(0 <= value <= (600 if name.endswith("rsum") else 100) for name, value in row.items())
            for prefix in ("", "cxc/", "coco_1k/", "coco_5k/"):
                for way in WAYS:
                    rising = [row[name] for name in (f"{prefix}{way}/R@{k}" for k in KS) if name in row]
                    assert rising == sorted(rising), (label, prefix, way)


def result(key: str, **metrics: float) -> TaskResult:
    info = {"model": {"name": "mine", "precision": "fp32"}, "task": "abc", "similarity": "csd", "images": 5000}
    return TaskResult(key, metrics, "x", info)


def test_results_stand_above_the_rows_of_their_own_data_in_their_columns_alone():
    own = result(
        "coco_karpathy_test",
        **{"cxc/i2t/R@1": 0.6, "cxc/t2i/R@1": 0.5, "coco_1k/rsum": 512.3, "coco_5k/i2t/R@1": 0.4, "i2t/PMRP": 0.31},
    )
    lines = format_printed(find_printed(["Table 1, coco", "Table II", "E.5"]), [own]).splitlines()
    assert lines[0].startswith("PCME++ Table 1, coco") and lines[1].split() == ["cxc/R@1", "coco_1k/rsum"]
    assert lines[2].split() == ["coco_karpathy_test", "csd", "55.00", "512.30"]
    assert lines[3].split() == ["ViT-B/32,", "CLIP", "zero-shot", "42.0", "471.9"]
    assert lines.count("") == 1 and lines[-1].split()[-2:] == ["34.1", "44.2"]  # E.5, no Table II: no plain figure
    mine = next(line for line in lines[3:] if line.startswith("coco_karpathy_test"))
    assert mine.split()[2:] == ["31.00", "40.00"]
    assert format_printed(PRINTED, [result("flowers", **{"i2t/R@1": 0.5})]) == ""


def test_results_are_read_from_the_file_of_an_evaluation(tmp_path, capsys):
    own = result("coco_karpathy_test", **{"cxc/i2t/R@1": 0.6, "cxc/t2i/R@1": 0.5, "eccv/R@1": float("nan")})
    for name, found in (("coco", own), ("pairs", result("pairs", **{"i2t/R@1": 0.5}))):
        (tmp_path / f"{name}.json").write_text(json.dumps([found.to_dict()]))
    main(["Table 1, coco", "--results", str(tmp_path / "pairs.json"), str(tmp_path / "coco.json")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["cxc/R@1"] and lines[2].split() == ["coco_karpathy_test", "csd", "55.00"]
    main(["all", "--results", str(tmp_path / "pairs.json")])
    assert capsys.readouterr().out == "no published row has a figure of these test sets\n"
