"""Every command and public function that takes a path or a URL, with addresses that run commands where fsspec, a shell
or webdataset gets them: no command runs, and the refusal is one line that names the address.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

import prolip
from drawings import FOLDER
from prolip.classifiers import ZeroShotClassifier
from prolip.cli.main import main
from prolip.corpora.emoji import corpus as emoji
from prolip.data.faults import ShardFault
from prolip.data.reading.shard_index import read_index
from prolip.data.reading.shards import expand_shards
from prolip.data.reading.stream import open_stream
from prolip.data.reading.tar import ShardReader
from prolip.evaluation.datasets.registry import open_dataset
from prolip.evaluation.datasets.webdataset import open_wds
from prolip.search.query import Query, embed
from prolip.utils.secrecy import redacted
from training.checkpoint.files import Storage

MODEL = ["--model", "ProLIP-ViT-test", "--pretrained", "random"]
TRAIN = ["train", *MODEL[:2], "--method", "prolip", "--device", "cpu", "--precision", "fp32", "--workers", "0"]
TRAIN += ["--batch-size", "4", "--max-steps", "1", "--warmup", "0"]
DRAWINGS = f"{FOLDER}/noto.tar"
ALLOWED = "a URL of file, http, https, s3, gs or hf"
#: What runs a command, writes a file or leaves the machine, where {} is a file that must not be there afterwards.
PIPE = "pipe:touch {} #://0.tar"
HOSTILE = (
    PIPE,
    "PIPE:touch {}",
    "|touch {}",
    "shell:touch {}",
    "zip://0.tar#://{}",
    "ftp://host/{}",
    "memory://{}",
    "github://org:name@main/{}",
    "data:image/png;base64,{}",
    "ssh://host/{}",
    "local://{}",
    "hf-hub:org/name",
    "local-dir:runs/demo",
    "unknown://{}",
)

BUILD = ["search", "build", "out", "--data", f"shards:{DRAWINGS}"]
#: Commands that read URLs.
OPEN = {
    "train": [*TRAIN, "--train-data", "ADDRESS"],
    "shard index": [*TRAIN, "--train-data", DRAWINGS, "--shard-index", "ADDRESS"],
    "checkpoints": [*TRAIN, "--train-data", DRAWINGS, "--checkpoint-dir", "ADDRESS"],
    "resume": [*TRAIN, "--train-data", DRAWINGS, "--name", "x", "--resume", "ADDRESS/step_1.pt"],
    "index": ["data", "index", "ADDRESS"],
    "index output": ["data", "index", DRAWINGS, "--output", "ADDRESS"],
    "uncertainty": ["uncertainty", *MODEL, "--output", "out", "--data", "ADDRESS"],
    "curate": ["curate", "score", *MODEL, "--output", "out", "--data", "ADDRESS"],
    "search": ["search", "build", "out", *MODEL, "--data", "shards:ADDRESS"],
    "explore": ["explore", "ProLIP-ViT-test", "--pretrained", "random", "--data", "shards:ADDRESS", "--port", "0"],
    "corpus": ["eval", "emoji", *MODEL[:2], "--data", "ADDRESS"],
    "corpus names": ["eval", "emoji", *MODEL[:2], "--data", DRAWINGS, "--names", "ADDRESS"],
    "evaluate": ["eval", "tasks", *MODEL, "--data", "wds:ADDRESS"],
    "prompts": ["prompts", "fit", *MODEL, "--output", "out.json", "--data", "wds:ADDRESS"],
    "datacomp": ["eval", "datacomp", *MODEL, "--device", "cpu", "--data", "ADDRESS"],
    "traverse": ["hierarchy", "traverse", *MODEL, "--data", "ADDRESS"],
    "figures": ["figures", *MODEL, "--output", "out", "--data", "ADDRESS"],
}
#: Commands and flags that read files of this machine alone.
LOCAL = {
    "search images": ["search", "build", "out", *MODEL, "--data", "images:ADDRESS"],
    "search texts": ["search", "build", "out", *MODEL, "--data", "texts:ADDRESS"],
    "search features": ["search", "build", "out", *MODEL, "--data", "features:ADDRESS"],
    "search index": ["search", "query", "ADDRESS", "--text", "a"],
    "explore source": ["explore", "ADDRESS", "--data", "images:ADDRESS"],
    "curate select": ["curate", "select", "ADDRESS"],
    "curate write": ["curate", "write", "ADDRESS", "--output", "out"],
    "curate report": ["curate", "report", "ADDRESS"],
    "evaluate folder": ["eval", "tasks", *MODEL, "--data", "imagenet:ADDRESS"],
    "evaluate coco": ["eval", "tasks", *MODEL, "--data", "coco:ADDRESS,ADDRESS"],
    "evaluate captions": ["eval", "tasks", *MODEL, "--data", "captions:ADDRESS"],
    "evaluate winogavil": ["eval", "tasks", *MODEL, "--data", "winogavil:ADDRESS"],
    "evaluate features": ["eval", "tasks", "--features", "ADDRESS"],
    "templates": ["prompts", "fit", *MODEL, "--output", "o.json", "--data", "wds:x", "--templates", "ADDRESS"],
    "prompts show": ["prompts", "show", "ADDRESS"],
    "hierarcaps": ["hierarchy", "hierarcaps", *MODEL, "--captions", "ADDRESS", "--images", "ADDRESS"],
    "hierarimgs": ["hierarchy", "hierarimgs", "--instances", "ADDRESS", "--images", "ADDRESS", "--output", "o"],
    "levels": ["hierarchy", "levels", *MODEL, "--images", "ADDRESS", "--output", "out"],
    "report": ["report", "ADDRESS"],
    "export": ["export", "graph", "--model", "ADDRESS", "--output", "out"],
    "export weights": ["export", "graph", *MODEL[:3], "ADDRESS", "--output", "out"],
    "hub": ["hub", "save", "ADDRESS", "--output", "out"],
    "pairs": ["uncertainty", *MODEL, "--output", "out", "--pairs", "ADDRESS"],
    "model folder": [*BUILD, "--model", "local-dir:ADDRESS"],
    "model of the hub": [*BUILD, "--model", "hf-hub:ADDRESS"],
    "weights": [*BUILD, *MODEL[:3], "ADDRESS"],
    "tokenizer": [*BUILD, *MODEL, "--tokenizer", "ADDRESS"],
    "train csv": [*TRAIN, "--dataset-type", "csv", "--train-data", "ADDRESS"],
    "train folder": [*TRAIN, "--dataset-type", "folder", "--train-data", "ADDRESS"],
    "train coco": [*TRAIN, "--train-data", "coco:ADDRESS,ADDRESS"],
    "train config": ["train", "--config", "ADDRESS"],
    "train weights": [*TRAIN, "--train-data", DRAWINGS, "--pretrained", "ADDRESS"],
}


def refusal_of(command, address, capsys):
    """The last line of stderr of a command that must end with 2 and one line."""
    try:
        code = main([word.replace("ADDRESS", address) for word in command])
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2 and "Traceback" not in error, error
    return error


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """The file that hostile addresses would write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "canary"


@pytest.mark.parametrize("name", OPEN)
def test_commands_open_no_hostile_url(name, canary, capsys):
    for hostile in (PIPE, "PIPE:touch {}", "zip://0.tar#://{}", "hf-hub:org/name"):
        if hostile == PIPE and name in ("train", "index", "uncertainty"):
            continue  # the shards that are trained on
        if hostile.startswith("hf-hub:") and name in ("evaluate", "prompts"):
            continue  # data sets of the hub
        address = hostile.format(canary)
        error = refusal_of(OPEN[name], address, capsys)
        assert redacted(address) in error and ALLOWED in error, error
    assert not canary.exists()


@pytest.mark.parametrize("name", LOCAL)
def test_commands_take_a_hostile_address_for_a_path(name, canary, capsys):
    for hostile in (PIPE, "|touch {}"):
        address = hostile.format(canary)
        error = refusal_of(LOCAL[name], address, capsys)
        assert Path(address).name in error or "pipe:sha256=" in error, error
    assert not canary.exists()


@pytest.fixture(scope="module")
def classifier():
    return ZeroShotClassifier("ProLIP-ViT-test", ["a", "b"], pretrained="random").fit()


#: Functions that read URLs.
FUNCTIONS = {
    "open_image": prolip.open_image,
    "question": lambda address: embed([Query(None, address)], Namespace(embed=lambda x, *_: list(x))),
    "expand_shards": expand_shards,
    "corpus": emoji.read,
    "open_wds": open_wds,
    "open_dataset": lambda address: open_dataset(f"wds:{address}"),
    "Storage": Storage,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_open_no_hostile_url(name, canary):
    for address in (hostile.format(canary) for hostile in HOSTILE):
        if name in ("open_wds", "open_dataset") and address.startswith("hf-hub:"):
            continue  # data sets of the hub
        with pytest.raises(ValueError, match=ALLOWED) as refusal:
            FUNCTIONS[name](address)
        assert repr(redacted(address)) in str(refusal.value)
    assert not canary.exists()


@pytest.mark.parametrize("read", [open_stream, read_index, lambda address: next(ShardReader()(address))])
def test_readers_of_shards_open_no_hostile_url_without_leave(read, canary):
    for address in (hostile.format(canary) for hostile in HOSTILE):
        with pytest.raises(ShardFault, match=f"unreadable shard: ValueError: .*{ALLOWED}"):
            read(address)
    assert not canary.exists()


def test_classifiers_open_no_hostile_url(classifier, canary):
    for address in (hostile.format(canary) for hostile in HOSTILE):
        with pytest.raises(ValueError, match=ALLOWED):
            classifier.predict([address])
    assert not canary.exists()


def test_names_of_models_and_tokenizers_run_nothing(canary):
    for address in (hostile.format(canary) for hostile in HOSTILE[:4]):
        for name in (address, f"local-dir:{address}", f"hf-hub:{address}"):
            for load in (prolip.create_model, prolip.get_tokenizer):
                with pytest.raises((OSError, ValueError)):
                    load(name)
        with pytest.raises((OSError, ValueError)):
            prolip.create_model("ProLIP-ViT-test", pretrained=address)
        with pytest.raises((OSError, ValueError)):
            prolip.get_tokenizer("ProLIP-ViT-test", tokenizer=address)
    assert not canary.exists()
