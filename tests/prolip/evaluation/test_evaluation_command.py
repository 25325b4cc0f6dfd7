"""prolip eval tasks: figures in a table and in JSON, with the model and without it, and errors in a line."""

import json
import shutil

import miniatures as mini
import pytest
from commands import evaluate, refusal

from prolip import loading


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return mini.prolip_folder(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    root = tmp_path_factory.mktemp("sets")
    classes, pairs = mini.wds_classification(root / "wds_birds"), mini.wds_retrieval(root / "wds_pairs")
    return [f"wds:{classes}", f"wds:{pairs}"]


def without_times(results):
    return [{**r, "info": {k: v for k, v in r["info"].items() if k != "seconds"}} for r in results]


def test_two_sets_by_two_similarities_with_the_model_and_then_without(tmp_path, model, sets, capsys):
    similarities = ["--similarity", "csd", "--similarity", "wasserstein2"]
    kept, out, again = tmp_path / "kept", tmp_path / "a" / "out.json", tmp_path / "again.json"
    options = [*similarities, "--save-features", str(kept), "--output", str(out)]
    results = evaluate(["--model", model, "--data", *sets, *options])
    table = capsys.readouterr().out
    names = [f"{r.key} {r.info['similarity']}" for r in results]
    assert names == ["birds csd", "birds wasserstein2", "pairs csd", "pairs wasserstein2"]
    lines = [line.split() for line in table.splitlines()]
    assert ["images", "acc1", "acc5", "mean_per_class_recall"] in lines
    for result in results:
        row = next(line for line in lines if line[:2] == [result.key, result.info["similarity"]])
        assert row[2] == str(result.info["images"]) and f"{100 * result.value:.2f}" in row[3:]
    assert json.loads(out.read_text()) == [result.to_dict() for result in results]
    evaluate(["--features", str(kept), *similarities, "--output", str(again)])
    assert without_times(json.loads(again.read_text())) == without_times(json.loads(out.read_text()))


def test_uncertainty_of_every_kind_of_task_in_a_table_and_as_plots(tmp_path, model, sets, capsys):
    multi, cues = mini.wds_multilabel(tmp_path / "wds_many"), mini.winogavil(tmp_path / "wino")
    data = ["--data", *sets, f"wds:{multi}", f"winogavil:{cues}"]
    results = evaluate(["--model", model, *data, "--plots", "--output", tmp_path / "x.json"])
    table = capsys.readouterr().out
    for result, places in zip(results, (["image", "pair"], ["i2t by pair", "t2i by text"], ["image"], ["text"])):
        for place in ["score", *places] if "by" not in places[0] else places:
            line = next(line for line in table.splitlines() if line.startswith(f"{result.key}  csd  {place}"))
            key = f"refusal/{place.replace(' by ', '/')}"
            assert f"{result.metrics[key + '/aurc']:.4f}" in line.split()
        assert list((tmp_path / "plots").glob(f"{result.key}-*-csd/risk_coverage*.png"))
    assert "birds  csd  R-AUROC" in table
    for result, key in zip(results, ("match_top1", "match_t2i", "match_top1", "match_top1")):
        line = next(x for x in table.splitlines() if x.startswith(f"{result.key}  csd") and "base rate" in x)
        top, ratio = (result.metrics[f"calibration/{x}"] for x in (f"{key}/ece", "match/probability_over_base_rate"))
        assert "ECE of matches" in line and f"top-1 ECE{' t2i' * (key != 'match_top1')} {top:.4f}" in line
        assert f"probability / base rate {ratio:.4f}" in line
    classes, _, many, _ = (result.metrics for result in results)
    assert classes["refusal/score/error"] == pytest.approx(1 - classes["acc1"])
    assert 0 <= many["refusal/image/aurc_oracle"] <= many["refusal/image/aurc"] <= 1


def test_a_damaged_set_ends_in_a_line_or_in_a_remark(tmp_path, model, capsys):
    folder = mini.wds_classification(tmp_path / "wds_cut")
    shard = folder / "test" / "0.tar"
    shard.write_bytes(shard.read_bytes()[:6000])
    assert "0.tar: broken shard" in refusal(capsys, evaluate, "--model", model, "--data", f"wds:{folder}")
    (result,) = evaluate(["--model", model, "--data", f"wds:{folder}", "--skip-damaged"])
    assert result.info["damaged"]["kinds"]["broken shard"] == 1 and result.info["images"] < 13
    assert "! left out: broken shard 1" in capsys.readouterr().out


def test_models_precisions_and_prompts_are_told_apart(tmp_path, model, sets, capsys):
    kept, other = tmp_path / "kept", mini.prolip_folder(tmp_path / "other", seed=1)
    plots = ["--plots", "--output", str(tmp_path / "x.json")]

    def rows(*flags):
        evaluate([*flags, "--similarity", "mean"])
        shown = [line.split("  ") for line in capsys.readouterr().out.split("refused")[0].splitlines()]
        return [[cell.strip() for cell in line if cell] for line in shown if line[0] == "birds"]

    folder = shutil.copytree(sets[0].removeprefix("wds:"), tmp_path / "wds_birds")
    evaluate(["--model", model, "--data", f"wds:{folder}", "--save-features", str(kept)])
    evaluate(["--model", other, "--data", f"wds:{folder}", "--save-features", str(kept)])
    evaluate(["--model", model, "--data", f"wds:{folder}", "--save-features", str(kept), "--precision", "amp_bf16"])
    capsys.readouterr()
    got = {tuple(row[:4]) for row in rows("--features", str(kept))}
    assert got == {("birds", *way, "mean") for way in ((model, "fp32"), (other, "fp32"), (model, "amp_bf16"))}
    (folder / "zeroshot_classification_templates.txt").write_text("{c}\n")
    evaluate(["--model", other, "--data", f"wds:{folder}", "--save-features", str(kept)])
    capsys.readouterr()
    found = rows("--features", str(kept), *plots)
    names = [path.stem.removeprefix("birds-") for path in (kept / "tasks").iterdir()]
    marks = [row[3] for row in found if row[1] == other and row[3] != "mean"]
    assert len(marks) == len(set(marks)) == 2 and all(any(name.startswith(m) for name in names) for m in marks)
    assert len([row for row in found if row[3] == "mean"]) == 2
    assert len(list((tmp_path / "plots").iterdir())) == 4  # none was drawn over another


def test_what_cannot_be_written_or_read_is_known_before_a_model_is_loaded(tmp_path, model, sets, capsys, monkeypatch):
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("a model was loaded"))
    (tmp_path / "file").write_text("")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "plots").write_text("")
    good = ["--model", model, "--data", sets[0]]
    for flags, message in (
        (["--output", str(tmp_path)], "is a folder: give a file"),
        (["--save-features", str(tmp_path / "file")], "is a file: give a folder"),
        (["--plots", "--output", str(tmp_path / "there" / "out.json")], "plots is a file: give a folder"),
        (["wds:/nowhere", "--save-features", str(tmp_path / "kept")], "no test set at /nowhere"),
    ):
        assert message in refusal(capsys, evaluate, *good, *flags)
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--data", "wds:nowhere"], "give --model and --data, or --features FOLDER"),
        (["--model", "MODEL", "--data", "wds:/nowhere/wds_x"], "no test set at /nowhere/wds_x"),
        (["--model", "ViT-B-32", "--data", "SET"], "no weights are given: use --pretrained"),
        (["--model", "MODEL", "--data", "SET", "--similarity", "nearness"], "'nearness' is unknown"),
        (["--features", "kept", "--model", "MODEL"], "--features evaluates without a model: remove --model"),
        (["--features", "kept", "--instances", "/nowhere.json"], "--instances /nowhere.json does not exist"),
        (["--features", "/nowhere"], "no features in /nowhere"),
        (["--model", "MODEL", "--data", "SET", "--device", "warp"], "device 'warp' is unknown"),
        (["--model", "MODEL", "--data", "SET", "--workers", "-1"], "--workers -1: give 0 or more"),
        (["--model", "MODEL", "--data", "SET", "--confusion"], "--confusion needs --output: also give --output"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(flags, message, model, sets, capsys):
    error = refusal(capsys, evaluate, *({"MODEL": model, "SET": sets[0]}.get(flag, flag) for flag in flags))
    assert error.startswith("error: ") and message in error
