"""A look at the whole data before epochs: adaptation without pairs, on ranks as by one process, resumed, refused."""

from __future__ import annotations

import io
import json
import shlex
import tarfile
from pathlib import Path

import pytest
import torch
from commands import evaluate_corpus
from safetensors.torch import load_file
from training_runs import start as begin
from training_runs import stop_after

from drawings import UNSEEN
from training.checkpoint.files import load_checkpoint
from training.main import main

PLAIN = shlex.split(
    f"--train-data {UNSEEN} --caption-sampling name:2,keywords --precision fp32 --device cpu --warmup 1 "
    "--log-every-n-steps 1 --lr 1e-3"
)
ADAPT = [*PLAIN, "--method", "source-free", "--neighbours", "20"]
EPOCH = ["--train-num-samples", "32"]  # two steps of 16


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A model by SigLIP, barely trained."""
    folder = tmp_path_factory.mktemp("source")
    return begin(folder, "siglip", "--method", "siglip", "--max-steps", "4", "--save-frequency", "0") / "model"


def line(source: Path, folder: Path, steps: int, size: int = 16, workers: int = 0) -> list[str]:
    place = f"--model local-dir:{source} --batch-size {size} --workers {workers} --max-steps {steps} --output {folder}"
    return [*ADAPT, *place.split()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model/model.safetensors")


def memory_of(folder: Path) -> dict[str, torch.Tensor]:
    newest = max((folder / "checkpoints").glob("*.pt"), key=lambda path: path.stat().st_mtime_ns)
    return load_checkpoint(str(newest))["memory"]


def test_the_adapted_model_stays_one_of_its_method_and_no_pair_is_read(source, tmp_path, capsys):
    words = line(source, tmp_path, 3)
    assert main([*words, "--name", "one"]) == 0
    said = capsys.readouterr().out
    assert "epoch 0: read the whole data" in said and "\neach query retrieves 20 of " in said
    assert json.loads((tmp_path / "one/model/config.json").read_text())["model_cfg"]["method_cfg"] == {"name": "siglip"}
    before, after = load_file(source / "model.safetensors"), weights(tmp_path / "one")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert "visual.proj" in moved and not moved & {"logit_scale", "logit_bias"}
    found = evaluate_corpus(["--model", f"local-dir:{tmp_path}/one/model", "--data", UNSEEN])
    assert found.info["similarity"] == "mean"
    # the texts of other images, at the same places: nothing that is trained on changes
    shards = turned(tmp_path)
    assert main([*words, "--name", "turned", "--train-data", str(shards)]) == 0
    assert all(torch.equal(x, after[name]) for name, x in weights(tmp_path / "turned").items())


def turned(folder: Path) -> Path:
    """The shard of UNSEEN with the json of every sample at its neighbour."""
    out = folder / "turned.tar"
    with tarfile.open(UNSEEN) as old, tarfile.open(out, "w") as new:
        members = old.getmembers()
        texts = [old.extractfile(member).read() for member in members if member.name.endswith(".json")]
        texts = iter([*texts[1:], texts[0]])
        for member in members:
            data = next(texts) if member.name.endswith(".json") else old.extractfile(member).read()
            member.size = len(data)
            new.addfile(member, io.BytesIO(data))
    return out


def test_ranks_adapt_as_one_process_does(source, tmp_path, forked):
    ways = {"one": (1, 16, 2), "two": (2, 8, 1)}
    for name, (ranks, size, workers) in ways.items():
        # by SGD: Adam makes whole steps of gradients that are rounding errors
        words = [*EPOCH, *shlex.split("--renew-pairs --opt sgd --lr 0.1 --save-every-steps 1"), "--name", name]
        assert forked.run(*line(source, tmp_path, 4, size, workers), *words, ranks=ranks) == 0, forked.err
    one, two = (weights(tmp_path / name) for name in ways)
    for name, x in one.items():
        torch.testing.assert_close(two[name], x, rtol=1e-4, atol=1e-5)
    kept = [memory_of(tmp_path / name) for name in ways]
    assert kept[0].keys() == kept[1].keys() and torch.equal(kept[0]["text"], kept[1]["text"])


@pytest.mark.parametrize("renew, stop", [(True, 2), pytest.param(False, 3, marks=pytest.mark.slow)])
def test_a_run_goes_on_bit_for_bit(source, tmp_path, capsys, renew, stop):
    """Stopped at the end of an epoch, and within one; pairs are found again where that is asked for."""
    words = [*line(source, tmp_path, 5), *EPOCH, *(["--renew-pairs"] if renew else [])]
    assert main([*words, "--name", "whole"]) == 0
    assert capsys.readouterr().out.count("read the whole data") == (3 if renew else 1)
    assert stop_after(stop, [*words, "--name", "halves"]) != 0
    assert main([*words, "--name", "halves", "--resume", "latest"]) == 0
    whole = weights(tmp_path / "whole")
    assert all(torch.equal(x, whole[name]) for name, x in weights(tmp_path / "halves").items())


def test_texts_come_from_a_file_and_images_need_none(source, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    with tarfile.open(UNSEEN) as tar:
        for member in [one for one in tar.getmembers() if one.name.endswith(".webp")][:20]:
            (images / Path(member.name).name).write_bytes(tar.extractfile(member).read())
    texts = tmp_path / "texts.txt"
    texts.write_text("a cat\na red rose\n\na cat\nhouse\n")
    words = [w for w in line(source, tmp_path, 2, 8) if w not in ("--caption-sampling", "name:2,keywords")]
    words += ["--save-every-steps", "1", "--train-data", str(images), "--target-texts", str(texts), "--name", "files"]
    assert main(words) == 0
    memory = memory_of(tmp_path / "files")
    assert len(memory["text_ids"]) == 3 and len(memory["keys"]) == 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "ProLIP-ViT-test"], "needs a trained model"),
        (["--pair-weight", "novelty"], "needs a novelty of images"),
        (["--pair-weight", "trace"], "all have the same trace"),
        (["--dataset-resampled"], "has no end"),
        (["--target-texts", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_what_cannot_be_adapted_is_refused_before_the_first_step(source, tmp_path, capsys, words, message):
    given = [*line(source, tmp_path, 3), "--name", "no", *words]
    assert main(given) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "no/metrics.jsonl").exists() or not (tmp_path / "no/metrics.jsonl").read_text()
