"""The command around the tasks: what is missing, damaged, killed, weighed, fitted; what is refused."""

import json
import shutil

import miniatures
import pytest
import torch
from commands import datacomp, refusal
from faulty_servers import FaultyServer

from prolip import loading
from prolip.data.faults import DamagedData, ShardFault
from prolip.embedder import Embedder, check_device
from prolip.evaluation.datasets.webdataset import open_wds
from prolip.evaluation.evaluate import compute_features, evaluate_dataset
from prolip.evaluation.prompts import fit_prompts
from prolip.evaluation.suites.datacomp import catalogue
from prolip.evaluation.suites.datacomp.catalogue import select_tasks
from prolip.prompts.bprw import Reweighing
from prolip.prompts.weights import PromptWeights

FEW = select_tasks(["mnist", "retrieval", "geode", "utkface"])
NAMES = [task.key for task in FEW]


@pytest.fixture
def copied(suite, tmp_path):
    """The data sets of FEW elsewhere, where they can be changed."""
    for task in FEW:
        shutil.copytree(suite.folders[task.key], tmp_path / "data" / suite.folders[task.key].name)
    return suite._replace(data=tmp_path / "data")


def lines_of(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def keys(out):
    return [line["key"] for line in lines_of(out)]


def ended(code, words):
    with pytest.raises(SystemExit) as stop:
        datacomp(words)
    assert stop.value.code == code


def test_missing_datasets_are_named_with_the_command_that_fetches_them_and_may_be_left_out(copied, tmp_path, capsys):
    folder, out = copied.data, tmp_path / "out"
    shutil.rmtree(folder / "winogavil")
    (folder / "wds_geode_test" / "test" / "0.tar").unlink()
    ended(2, copied.words(out, "--tasks", *NAMES))
    said, error = capsys.readouterr()
    assert f"2 of {len(FEW)} data sets cannot be read" in said
    assert f"hf download --repo-type dataset nlphuji/winogavil --local-dir {folder}/winogavil" in said
    assert "WinoGAViL: no folder winogavil" in said and "GeoDE:" in said and "0.tar" in said
    assert "--allow-missing" in error and not out.exists()
    outcome = copied.run(out, "--allow-missing", "--tasks", *NAMES)
    assert sorted(keys(out)) == sorted(set(NAMES) - {"misc/winogavil", "fairness/geode"})
    assert set(outcome.missing) == {"misc/winogavil", "fairness/geode"}
    assert outcome.rows[0].averages == {}
    assert "no Retrieval, 2 of 3 tasks are available; missing: WinoGAViL." in capsys.readouterr().out


def test_the_wrong_folder_is_said_to_be_one(suite, tmp_path, capsys):
    for wrong in (suite.data.parent, suite.data / "wds_mnist_test"):
        ended(2, suite.words(tmp_path / "out", "--tasks", "mnist", "--data", wrong))
        assert f"{wrong} has" in (said := capsys.readouterr().out) and "give --data the folder directly above" in said


def test_a_damaged_dataset_fails_alone_and_is_evaluated_when_it_is_repaired(copied, tmp_path, capsys):
    shard, out = copied.data / "wds_mnist_test" / "test" / "0.tar", tmp_path / "out"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    words = copied.words(out, "--tasks", *NAMES)
    ended(1, words)
    assert "MNIST failed" in capsys.readouterr().err
    assert "mnist" not in keys(out) and len(keys(out)) == len(FEW) - 1
    shard.write_bytes(whole)
    datacomp(words)
    assert sorted(keys(out)) == sorted(NAMES)
    (copied.data / "wds_mnist_test" / "zeroshot_classification_templates.txt").write_text("a drawing of {c}\n")
    datacomp(words)  # data that changed are evaluated again
    assert sorted(keys(out)) == sorted([*NAMES, "mnist"])


def test_what_was_finished_before_is_said_and_gets_no_plots(suite, tmp_path, capsys):
    out = tmp_path / "out"
    suite.run(out, "--tasks", "mnist")
    assert "are finished" not in capsys.readouterr().out
    suite.run(out, "--tasks", "mnist", "cifar10", "--plots")
    assert f"1 of 2 tasks are finished and get no plots: their results stay in {tmp_path}" in capsys.readouterr().out
    (plots,) = (out / "plots").iterdir()
    assert plots.name == "cifar10-csd" and {"risk_coverage.png", "by_decile.png"} <= {x.name for x in plots.iterdir()}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots.iterdir())


def test_shards_of_the_suite_make_the_whole_together(suite, tmp_path):
    for part in ("0/2", "1/2"):
        suite.run(tmp_path, "--tasks", *NAMES, "--part", part, "--no-uncertainty")
        assert (part == "1/2") == (sorted(keys(tmp_path)) == sorted(NAMES)) and keys(tmp_path)
    assert not any("refusal" in name for line in lines_of(tmp_path) for name in line["metrics"])


def test_saved_embeddings_serve_a_later_similarity(suite, tmp_path):
    features = ["--save-features", tmp_path / "features", "--tasks", "mnist", "utkface"]

    def stored():
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "features").rglob("*.safetensors")}

    suite.run(tmp_path / "out", *features)
    before = stored()
    suite.run(tmp_path / "out", *features, "--similarity", "csd", "wasserstein2")
    assert stored() == before != {}
    assert sorted(keys(tmp_path / "out")) == ["fairness/utkface"] * 2 + ["mnist"] * 2


def test_datasets_are_read_over_the_network(suite, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    tasks = ["--tasks", "mnist", "mscoco_2014_5k_test_image_text_retrieval"]
    with FaultyServer.of_folder(suite.data) as server:
        suite.run(tmp_path / "far", *tasks, "--data", server.root)
    suite.run(tmp_path / "near", *tasks)
    far, near = ([line["metrics"] for line in lines_of(tmp_path / out)] for out in ("far", "near"))
    assert len(far) == 2 and far == near


def test_an_address_that_does_not_answer_is_waited_for_once_and_not_for_every_task(suite, monkeypatch):
    asked, faults = [], {"GTSRB": "HTTP 403", "Stanford Cars": "no answer"}

    def open_somewhere(source, name, damage):
        asked.append(name)
        if name in faults:
            raise DamagedData("cannot be read") from ShardFault("unreadable", faults[name])
        return open_wds(suite.folders["mnist"], name=name, damage=damage)

    monkeypatch.setattr(catalogue, "open_wds", open_somewhere)
    found = catalogue.find_datasets(select_tasks(["gtsrb", "mnist", "cars", "stl10"]), "http://127.0.0.1:9")
    assert asked == ["GTSRB", "MNIST", "Stanford Cars"] and list(found.datasets) == ["mnist"]
    assert list(found.missing) == ["gtsrb", "cars", "stl10"] and "not tried" in found.missing["stl10"]


def test_an_openclip_model_runs_beside_ours_without_uncertainty(suite, tmp_path):
    small, out = miniatures.small_openclip(tmp_path / "clip"), tmp_path / "out"
    words = ["--model", "ViT-mini", "--pretrained", tmp_path / "clip" / "weights.pt"]
    assert suite.run(out, *words, "--tasks", *NAMES).rows[0].label.startswith("ViT-mini:")
    lines = lines_of(out)
    assert sorted(line["key"] for line in lines) == sorted(NAMES)
    assert {line["identity"]["fingerprint"] for line in lines} == {small.fingerprint}
    assert not any("trace" in key for line in lines for key in line["info"])
    assert all("refusal/image/aurc" not in line["metrics"] for line in lines)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tasks", "imagenett"], "no task 'imagenett'"),
        (["--similarity", "dot"], "dot"),
        (["--part", "2/2"], "from 0"),
        (["--published", "none"], "published_datacomp.py"),
        (["--data", "nowhere"], "nowhere is not a folder"),
        (["--output", __file__], __file__),
        (["--save-features", __file__], "is a file: give a folder"),
        (["--prompts", "none.json"], "no file"),
    ],
)
def test_mistakes_end_in_one_line_before_the_model_is_loaded(suite, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("loaded"))
    error = refusal(capsys, datacomp, *suite.words(tmp_path / "out", *arguments))
    assert error.startswith("error: ") and message in error


def test_processes_of_one_machine_take_a_gpu_each(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("SLURM_LOCALID", "3")
    for count, found in ((2, ["cuda:1", "cuda:1", "cuda:0"]), (0, ["cpu"])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda count=count: count > 0)
        assert [str(check_device(name)) for name in ("auto", "cuda", "cuda:0")[: len(found)]] == found
    with pytest.raises(ValueError, match="no CUDA device"):
        check_device("cuda")


def test_the_list_shows_every_task_and_what_to_fetch(capsys):
    assert "give --model and --data, or --list" in refusal(capsys, datacomp, "--model", "x")
    datacomp(["--list"])
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 41 and "djghosh/wds_wilds-fmow_test" in out and "nlphuji/winogavil" in out


def test_weights_of_prompts_score_the_task_of_their_classes_in_a_row_of_its_own(suite, tmp_path, capsys):
    embedder, scored = Embedder.load(suite.model), open_wds(suite.folders["cifar10"])
    for name, more in (("pool", ()), ("wide", ("cow",))):
        classes = (*scored.classnames, *more)
        pool = miniatures.wds_classification(tmp_path / name, classes, scored.templates, 24, seed=8)
        fit_prompts(open_wds(pool), embedder, Reweighing(2)).save(tmp_path / f"{name}.json")
    weights, out = PromptWeights.load(tmp_path / "pool.json"), tmp_path / "out"
    flickr = "retrieval/flickr_1k_test_image_text_retrieval"
    words, pool, wide = ["--tasks", "cifar10", flickr], tmp_path / "pool.json", tmp_path / "wide.json"
    other = miniatures.prolip_folder(tmp_path / "other", seed=3)
    for message, *given in (
        ("belong to no task here", wide),
        ("are of the same task", pool, pool),
        ("has other weights", pool, "--model", other),
    ):
        assert message in refusal(capsys, datacomp, *suite.words(out, *words, "--prompts", *given))
    suite.run(out, *words)
    outcome = suite.run(out, *words, "--prompts", pool)
    plain, weighed = ({line["key"]: line for line in lines} for lines in (lines_of(out)[:2], lines_of(out)[2:]))
    want = evaluate_dataset(scored, compute_features(scored, embedder, prompts=weights)).metrics
    assert weighed["cifar10"]["metrics"]["acc1"] == want["acc1"]
    assert weighed["cifar10"]["metrics"] != plain["cifar10"]["metrics"]
    assert weighed["cifar10"]["info"]["prompts"] == str(weights) and "prompts" not in weighed[flickr]["info"]
    assert weighed[flickr]["metrics"] == plain[flickr]["metrics"] and weights.digest in outcome.rows[1].label
    capsys.readouterr()
    suite.run(out, *words, "--prompts", pool)
    assert "2 of 2 tasks are finished" in capsys.readouterr().out
