"""The command around the tasks: what is missing, what is damaged, shards, tables of several runs."""

import csv
import json
import shutil
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import miniatures
import pytest
import torch
from commands import datacomp, returned
from datacomp_suite import Oracle, write_suite

from prolip import loading
from prolip.data.faults import ShardFault
from prolip.embedder import check_device
from prolip.evaluation.datasets.base import DamagedData
from prolip.evaluation.datasets.wds import open_wds
from prolip.evaluation.suites.datacomp import places, run
from prolip.evaluation.suites.datacomp.tables import build_report
from prolip.evaluation.suites.datacomp.tasks import TASKS, select_tasks

FEW = select_tasks(["cifar10", "mnist", "retrieval", "geode", "utkface"])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """(model, folder with all datasets)."""
    root = tmp_path_factory.mktemp("datacomp")
    model = miniatures.prolip_folder(root / "model")
    write_suite(root / "data", TASKS, Oracle(model))
    return model, root / "data"


def command(data, out, *arguments):
    model, folder = data
    return [
        "--model",
        model,
        "--data",
        str(folder),
        "--output",
        str(out),
        "--workers",
        "0",
        "--device",
        "cpu",
        *arguments,
    ]


def keys(out):
    return [json.loads(line)["key"] for line in (out / "results.jsonl").read_text().splitlines()]


def copy(data, to):
    """The datasets of FEW elsewhere."""
    names = [name for task in FEW for name in task.folders if (data[1] / name).is_dir()]
    for name in names:
        shutil.copytree(data[1] / name, to / name)
    return data[0], to


NAMES = [task.key for task in FEW]


def test_missing_datasets_are_named_with_the_command_that_fetches_them_before_anything_runs(data, tmp_path, capsys):
    model, folder = copy(data, tmp_path / "data")
    shutil.rmtree(folder / "wds_mnist_test")
    (folder / "wds_geode_test" / "test" / "0.tar").unlink()
    with pytest.raises(SystemExit) as stop:
        datacomp(command((model, folder), tmp_path / "out", "--tasks", *NAMES))
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert f"2 of {len(FEW)} datasets cannot be read" in out
    assert f"hf download --repo-type dataset djghosh/wds_mnist_test --local-dir {folder}/wds_mnist_test" in out
    assert "MNIST: no folder wds_mnist_test" in out and "GeoDE:" in out and "0.tar" in out
    assert "--allow-missing" in err and not (tmp_path / "out").exists()


def test_the_rest_is_evaluated_where_missing_ones_are_allowed(data, tmp_path, capsys):
    model, folder = copy(data, tmp_path / "data")
    shutil.rmtree(folder / "winogavil")
    outcome = datacomp(command((model, folder), tmp_path / "out", "--allow-missing", "--tasks", *NAMES))
    assert sorted(keys(tmp_path / "out")) == sorted(set(NAMES) - {"misc/winogavil"})
    assert list(outcome.missing) == ["misc/winogavil"]
    assert outcome.report.ours[0].averages == {}
    assert "no Retrieval, 2 of 3 tasks are there; missing: WinoGAViL." in capsys.readouterr().out


def test_a_damaged_dataset_fails_alone_and_is_taken_up_when_it_is_mended(data, tmp_path, capsys):
    model, folder = copy(data, tmp_path / "data")
    shard = folder / "wds_cifar10_test" / "test" / "0.tar"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    arguments = command((model, folder), tmp_path / "out", "--tasks", *NAMES)
    with pytest.raises(SystemExit) as stop:
        datacomp(arguments)
    assert stop.value.code == 1
    assert "CIFAR-10 failed" in capsys.readouterr().err
    assert "cifar10" not in keys(tmp_path / "out") and len(keys(tmp_path / "out")) == len(FEW) - 1
    shard.write_bytes(whole)
    datacomp(arguments)
    assert keys(tmp_path / "out").count("cifar10") == 1 and len(keys(tmp_path / "out")) == len(FEW)


def test_what_was_finished_before_is_said(data, tmp_path, capsys):
    datacomp(command(data, tmp_path / "out", "--tasks", "mnist"))
    assert "are finished" not in capsys.readouterr().out
    datacomp(command(data, tmp_path / "out", "--tasks", "mnist", "cifar10", "--plots"))
    assert f"1 of 2 tasks are finished and get no plots: their results in {tmp_path}" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "out" / "plots").iterdir()] == ["cifar10-csd"]


def test_tables_of_processes_that_end_together_hold_the_results_of_all(data, tmp_path, monkeypatch):
    for name, task in (("out", "mnist"), ("other", "cifar10")):
        datacomp(command(data, tmp_path / name, "--tasks", task))
    late = (tmp_path / "other" / "results.jsonl").read_text()
    read, seconds = threading.Event(), []

    def slow(*arguments):  # between what the first one has read and what it writes, the second one ends
        report = build_report(*arguments)
        if not read.is_set():
            read.set()
            time.sleep(0.3)
        return report

    monkeypatch.setattr(run, "build_report", slow)
    folder = tmp_path / "out"
    first = threading.Thread(target=run.write_tables, args=([folder], folder, (), seconds.append))
    first.start()
    assert read.wait(10)
    with open(folder / "results.jsonl", "a") as file:
        file.write(late)
    run.write_tables([folder], folder, (), seconds.append)
    first.join()
    (row,) = csv.DictReader((folder / "tables.csv").read_text().splitlines())
    assert row["MNIST"] and row["CIFAR-10"]


def test_changed_data_is_evaluated_again(data, tmp_path):
    model, folder = copy(data, tmp_path / "data")
    arguments = command((model, folder), tmp_path / "out", "--tasks", "mnist", "cifar10")
    datacomp(arguments)
    templates = folder / "wds_mnist_test" / "zeroshot_classification_templates.txt"
    templates.write_text("a drawing of {c}\n")
    datacomp(arguments)
    assert sorted(keys(tmp_path / "out")) == ["cifar10", "mnist", "mnist"]


def test_shards_of_the_suite_make_the_whole_together(data, tmp_path):
    datacomp(command(data, tmp_path / "out", "--tasks", *NAMES, "--part", "0/2", "--no-uncertainty"))
    first = keys(tmp_path / "out")
    assert 0 < len(first) < len(FEW)
    datacomp(command(data, tmp_path / "out", "--tasks", *NAMES, "--part", "1/2", "--no-uncertainty"))
    assert sorted(keys(tmp_path / "out")) == sorted(NAMES)


def test_saved_embeddings_serve_a_later_similarity(data, tmp_path):
    features = ["--save-features", str(tmp_path / "features"), "--tasks", "mnist", "utkface"]
    datacomp(command(data, tmp_path / "out", *features))
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / "features").rglob("*.safetensors")}
    datacomp(command(data, tmp_path / "out", *features, "--similarity", "csd", "wasserstein2"))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "features").rglob("*.safetensors")} == stored
    assert sorted(keys(tmp_path / "out")) == ["fairness/utkface"] * 2 + ["mnist"] * 2


def test_a_place_for_embeddings_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    data, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(loading, "load_embedder", lambda *_: pytest.fail("loaded"))
    (tmp_path / "features").touch()
    with pytest.raises(SystemExit) as stop:
        datacomp(command(data, tmp_path / "out", "--save-features", str(tmp_path / "features")))
    assert stop.value.code == 2 and "features is a file: give a folder" in capsys.readouterr().err


def test_plots_of_a_task_lie_beside_the_tables(data, tmp_path):
    datacomp(command(data, tmp_path / "out", "--tasks", "renderedsst2", "--plots"))
    plots = sorted(path.name for path in (tmp_path / "out" / "plots" / "renderedsst2-csd").iterdir())
    assert {"risk_coverage.png", "by_decile.png"} <= set(plots)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "out" / "plots").rglob("*.png"))


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        """Nothing."""


def test_datasets_are_read_over_the_network(data, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(data[1])))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tasks = ["--tasks", "mnist", "mscoco_2014_5k_test_image_text_retrieval"]
    try:
        for place, out in ((f"http://127.0.0.1:{server.server_port}", "far"), (str(data[1]), "near")):
            datacomp(command((data[0], place), tmp_path / out, *tasks))
    finally:
        server.shutdown()
        server.server_close()
    far, near = (
        [json.loads(line)["metrics"] for line in (tmp_path / out / "results.jsonl").read_text().splitlines()]
        for out in ("far", "near")
    )
    assert len(far) == 2 and far == near


def test_an_address_that_does_not_answer_is_waited_for_once_and_not_for_every_task(data, monkeypatch):
    asked, answers = [], iter([False, False, True, True, False])

    def open_somewhere(source, name, damage, policy):
        asked.append((name, policy))
        if not next(answers):
            raise DamagedData("cannot be read") from ShardFault("unreadable", "refused")
        return open_wds(str(data[1] / "wds_mnist_test"), name=name, damage=damage)

    monkeypatch.setattr(places, "open_wds", open_somewhere)
    found = places.find_datasets(select_tasks(["cifar10", "gtsrb", "mnist", "cars"]), "http://127.0.0.1:9")
    assert asked == [
        ("CIFAR-10", None),
        ("GTSRB", places.PROBE),
        ("MNIST", places.PROBE),
        ("MNIST", None),
        ("Stanford Cars", None),
    ]
    assert list(found.missing) == ["cifar10", "gtsrb", "cars"] and list(found.datasets) == ["mnist"]


def test_tables_of_several_runs_stand_side_by_side(data, tmp_path, capsys):
    for name, similarity in (("a", "csd"), ("b", "mean")):
        datacomp(command(data, tmp_path / name, "--tasks", "imagenet", "--similarity", similarity))
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    words = ["--tables-of", *folders, "--output", str(tmp_path / "c"), "--published", "openai"]
    report = returned("prolip.evaluation.suites.datacomp.run.write_tables", "eval", "datacomp", *words)
    assert [row.label.split()[-1] for row in report.ours] == ["(csd)", "(mean)"]
    assert "OpenCLIP ViT-B-16, openai" in (tmp_path / "c" / "tables.md").read_text()
    with pytest.raises(SystemExit):
        datacomp(["--tables-of", str(tmp_path / "none"), "--output", str(tmp_path / "d")])
    assert "no result in" in capsys.readouterr().err


def test_an_openclip_model_runs_beside_ours_without_uncertainty(data, tmp_path):
    small = miniatures.small_openclip(tmp_path / "clip")
    arguments = command(data, tmp_path / "out", "--tasks", *NAMES)
    arguments[1:2] = ["ViT-mini", "--pretrained", str(tmp_path / "clip" / "weights.pt")]
    outcome = datacomp(arguments)
    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert sorted(line["key"] for line in lines) == sorted(NAMES)
    assert {line["identity"]["fingerprint"] for line in lines} == {small.fingerprint}
    assert not any("trace" in key for line in lines for key in line["info"])
    assert all("refusal/image/aurc" not in line["metrics"] for line in lines)
    assert outcome.report.ours[0].label.startswith("ViT-mini:")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tasks", "imagenett"], "no task 'imagenett'"),
        (["--similarity", "dot"], "dot"),
        (["--part", "2/2"], "from 0"),
        (["--published", "gpt"], "no published row"),
        (["--data", "nowhere"], "nowhere is no folder"),
        (["--output", __file__], __file__),
        (["--batch-size", "0"], "give 1 or more"),
        (["--workers", "-1"], "give 0 or"),
    ],
)
def test_mistakes_end_in_one_line_before_the_model_is_loaded(data, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        datacomp(command(("ViT-does-not-exist", data[1]), tmp_path / "out", *arguments))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error


def test_weights_that_broke_off_end_in_one_line(data, tmp_path, capsys):
    shutil.copytree(data[0].removeprefix("local-dir:"), tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(b"cut")
    with pytest.raises(SystemExit) as stop:
        datacomp(command((f"local-dir:{tmp_path}/model", data[1]), tmp_path / "out", "--tasks", "mnist"))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and "model.safetensors cannot be read" in error


@pytest.mark.parametrize("rank", ["LOCAL_RANK", "SLURM_LOCALID"])
def test_processes_of_one_machine_take_a_gpu_each(monkeypatch, rank):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv(rank, "3")
    assert [str(check_device(name)) for name in ("auto", "cuda", "cuda:0")] == ["cuda:1", "cuda:1", "cuda:0"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="no CUDA device"):
        check_device("cuda")


def test_published_rows_are_listed_with_the_averages_that_do_not_follow(capsys):
    datacomp(["--list-published"])
    reported = capsys.readouterr().out.splitlines()
    assert "ProLIP ViT-B/16, 12.8B: all 6 printed averages follow from its 38 values" in reported
    assert sum("ProLIP ViT-B/16, 1.28B: " in line and "is printed as" in line for line in reported) == 5


def test_the_list_shows_every_task_and_what_to_fetch(capsys):
    datacomp(["--list"])
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 41 and "djghosh/wds_wilds-fmow_test" in out and "nlphuji/winogavil" in out


def test_a_model_and_data_are_asked_for(capsys):
    with pytest.raises(SystemExit):
        datacomp(["--model", "x"])
    assert "--data" in capsys.readouterr().err
