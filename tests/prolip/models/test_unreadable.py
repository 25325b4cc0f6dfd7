"""Files that hold no weights and folders that hold no model: one line says what is there and what to give.

The files are generated, of every kind that is given for weights by mistake. None of them may run code, bring torch's
advice to do so, or a line that does not name the file's kind.
"""

import argparse
import collections
import io
import json
import os
import random
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import prolip
from prolip.embedder import Embedder
from prolip.models.checkpoint import CheckpointError, read_state_dict, save_pretrained
from prolip.models.diagnose import is_run
from prolip.models.registry import find_weights, get_model_config
from prolip.models.tokenizer import get_tokenizer
from prolip.utils.flags import FlagError
from prolip.utils.messages import naming
from training.checkpoint.files import check_checkpoint
from training.checkpoint.files import load_checkpoint as load_run
from training.checkpoint.run_dir import read_status
from training.config import read_config_file
from training.main import main as train

NAME = "ProLIP-ViT-test"
#: Words of torch about a file that it refuses, or a way to run its code.
TORCHS = ("add_safe_globals", "pytorch.org", "Weights only load failed", "WeightsUnpickler", "\n", "miniz", "Traceback")


class Trap:
    """An object whose unpickling makes a folder."""

    def __init__(self, place):
        self.place = str(place)

    def __reduce__(self):
        return os.mkdir, (self.place,)


# --- files ------------------------------------------------------------------------------------------------------------
def saved(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def tensors(rng):
    return {f"visual.{rng.choice('abc')}{i}": torch.zeros(rng.randint(1, 4)) for i in range(rng.randint(1, 5))}


def foreign(rng, trap):
    """Write a checkpoint with objects in addition to its tensors, in torch's present or its old format."""
    things = [(argparse.Namespace(lr=0.1), "argparse.Namespace"), (Path("x"), "pathlib."), (Trap(trap), ".mkdir")]
    things += [(np.float64(3), "numpy"), (collections.deque([1]), "collections.deque")]
    thing, name = rng.choice(things)
    state = {rng.choice(["state_dict", "model"]): tensors(rng), rng.choice(["args", "epoch", "best"]): thing}
    data = saved(state, _use_new_zipfile_serialization=rng.random() < 0.7)
    return data, ["Python objects other than tensors", name, "runs code", "torch.save", "weights_only=False"]


def script(rng, trap):
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(rng.randint(1, 3), 2)), buffer)
    return buffer.getvalue(), ["TorchScript archive", "weights_only=False"]


def no_weights(rng, trap):
    rest = " ".join(str(rng.random()) for _ in range(rng.randint(1, 200)))
    np.savez(array := io.BytesIO(), a=np.zeros(3))
    kinds = [
        (f"<!doctype html><html>{rest}".encode(), ["an HTML page", "fetch it again"]),
        (f"version https://git-lfs.github.com/spec/v1\noid sha256:{rest}".encode(), ["Git LFS", "git lfs pull"]),
        (b"", ["an empty file"]),
        (bytes(rng.randint(1, 999)), ["only zeros"]),
        (f"weights {rest}".encode(), ["text ('weights"]),
        (b"\x89HDF\r\n\x1a\n" + rng.randbytes(99), ["HDF5", ".safetensors, .pt"]),
        (array.getvalue(), ["may be incomplete"]),
        (b"\x1f\x8b" + rng.randbytes(99), ["gzip", "unpack it"]),
    ]
    return rng.choice(kinds)


def cut(rng, trap):
    data = saved({"state_dict": tensors(rng)})
    return data[: rng.randrange(len(data) // 4, len(data) - 30)], ["may be incomplete"]


def no_state(rng, trap):
    inside = rng.choice(["ema", "net", "model_state_dict", "params"])
    nested = {inside: tensors(rng), "epoch": 3}
    kinds = [
        ([1, 2], ["got list"]),
        (torch.zeros(3), ["got Tensor"]),
        ({}, ["holds no state dict"]),
        (nested, [f"got ['epoch', {inside!r}]", "under objective or state_dict or model"]),
        ({"a": 1, "b": "x"}, ["holds no state dict", "'a', 'b'"]),
    ]
    value, words = rng.choice(kinds)
    return saved(value), words


FILES = (foreign, foreign, script, no_weights, no_weights, no_weights, cut, no_state)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(40))
def test_a_file_without_weights_is_reported_by_its_kind_and_its_code_is_not_run(tmp_path, seed):
    """Each as weights to start from, and as a checkpoint to resume."""
    rng = random.Random(seed)
    kind, trap = FILES[seed % len(FILES)], tmp_path / f"trap{seed}"
    data, words = kind(rng, trap)
    suffix = rng.choice([".pt", ".bin", ".safetensors"] if kind is no_weights else [".pt", ".pth", ".bin", ".ckpt"])
    path = tmp_path / f"{seed}{suffix}"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as first:
        read_state_dict(path)
    with pytest.raises(FlagError) as second:
        check_checkpoint(str(path))
        load_run(str(path))
    for said, most in ((str(first.value), 700), (str(second.value), 400)):
        own = said.replace(str(tmp_path), "")
        assert str(path) in said and len(own) < most and not any(word in own for word in TORCHS), said
    assert all(word in str(first.value) for word in words), (words, first.value)
    assert kind is cut or "--pretrained for weights to start from" in said
    assert not trap.exists()


@pytest.mark.parametrize("container", ["state_dict", "model"])
def test_the_command_for_a_checkpoint_with_foreign_objects_makes_a_file_that_loads(tmp_path, container):
    state = {"visual.a": torch.ones(2), "text.b": torch.zeros(3)}
    torch.save({container: state, "args": argparse.Namespace(a=1)}, tmp_path / "theirs.pt")
    with pytest.raises(CheckpointError) as refused:
        read_state_dict(tmp_path / "theirs.pt")
    command, plain = re.search(r'python -c "(.*?)" and give (\S+) ', str(refused.value)).groups()
    exec(command, {})
    assert all(torch.equal(value, state[name]) for name, value in read_state_dict(plain).items())
    assert read_state_dict(tmp_path / "theirs.pt", weights_only=False).keys() == state.keys()


def test_an_error_gets_the_flag_of_its_value_once_and_keeps_its_kind():
    makes = {b"\xff".decode: ValueError, Path("nowhere").read_text: OSError, partial(json.loads, "{"): ValueError}
    for make, kind in makes.items():
        with pytest.raises(kind, match="^--val-data: .+"), naming("--val-data"):
            make()
    with pytest.raises(FileNotFoundError, match="^--data 'x': is gone"), naming("--data"):
        raise FileNotFoundError("'x': is gone")
    with pytest.raises(ValueError, match="^--select is"), naming("--data"):
        raise ValueError("--select is wrong")


# --- folders ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A small run with all that it may leave."""
    folder = tmp_path_factory.mktemp("runs")
    flags = f"--model {NAME} --dataset-type synthetic --train-num-samples 8 --batch-size 4 --workers 0 --epochs 1"
    flags += f" --warmup 0 --ema-decay 0.9 --output {folder} --name r"
    assert train(flags.split()) == 0
    shutil.copytree(folder / "r/model", folder / "r/best")
    return folder / "r"


ENTRIES = (prolip.create_model, partial(find_weights, NAME), get_model_config, get_tokenizer, Embedder.load)


@pytest.mark.parametrize("parts", ["", "model checkpoints", "model_ema checkpoints", "best", "checkpoints"])
def test_a_run_given_as_a_model_names_its_model(tmp_path, whole_run, parts):
    """Check every entry, for all the ways to write its path."""
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.json", "status.json", "metrics.jsonl"):
        shutil.copy(whole_run / name, run)
    for part in parts.split():
        shutil.copytree(whole_run / part, run / part)
    for enter in ENTRIES:
        for spelling in (f"local-dir:{run}", str(run)):
            with pytest.raises((ValueError, OSError)) as refused:
                enter(spelling)
            said = str(refused.value)
            assert said.startswith(f"{run} is the folder of a run: ") and "\n" not in said, said
            whole = next((part for part in ("model", "model_ema", "best") if part in parts.split()), None)
            if whole:
                assert f"local-dir:{run / whole}" in said
                assert get_model_config(re.search(r"local-dir:[^\s):]+", said)[0])
            elif parts:
                assert f"--model {NAME} --pretrained {run}/checkpoints/step_2.pt" in said
                assert find_weights(NAME, f"{run}/checkpoints/step_2.pt")
            else:
                assert "no model or checkpoint" in said


@pytest.mark.parametrize(
    "given, expected",
    [
        ("https://huggingface.co/org/name/tree/main", "is an address: give hf-hub:org/name"),
        ("s3://bucket/model", "is an address: download its folder, and give local-dir:FOLDER"),
        ("local-dir:{run}/checkpoints", "holds the checkpoints of a run: use local-dir:{run}/model"),
        ("local-dir:{run}/checkpoints/step_2.pt", "is a checkpoint of a run: use local-dir:{run}/model"),
        ("{run}/checkpoints/step_2.pt", f"--model {NAME} --pretrained {{run}}/checkpoints/step_2.pt"),
        ("local-dir:{run}/model/model.safetensors", "is a file: give its folder, local-dir:{run}/model"),
        ("{run}/model", "is a folder: give it as local-dir:{run}/model"),
        ("{run}/modle", "Did you mean model"),
        ("local-dir:{run}/modle", "Did you mean model"),
    ],
)
def test_a_path_that_is_no_model_names_the_one_that_is_meant(whole_run, given, expected):
    for enter in (prolip.create_model, get_tokenizer, Embedder.load):
        with pytest.raises((ValueError, OSError)) as refused:
            enter(given.format(run=whole_run))
        assert expected.format(run=whole_run) in str(refused.value)


def test_weights_that_are_a_folder_or_a_configuration_name_what_is_meant(whole_run):
    expected = re.escape(f"use local-dir:{whole_run}/model")
    with pytest.raises(FileNotFoundError, match=expected):
        find_weights(NAME, str(whole_run / "checkpoints"))
    with pytest.raises(FileNotFoundError, match=expected):
        Embedder.load("ViT-B-32", str(whole_run / "checkpoints"))
    with pytest.raises(CheckpointError, match="config.json is a configuration without weights: give a .safetensors"):
        read_state_dict(whole_run / "model" / "config.json")


def test_what_is_no_config_and_no_checkpoint_of_a_run_names_one(whole_run):
    with pytest.raises(FlagError, match="is a model's config: give RUN/config.json, or --model local-dir:FOLDER"):
        read_config_file(str(whole_run / "model"))
    with pytest.raises(FlagError, match="cannot be read, it is a zip archive"):
        read_config_file(str(whole_run / "checkpoints/step_2.pt"))
    with pytest.raises(FlagError, match=f"is a folder: give a file in it, such as {whole_run}/checkpoints/step_2.pt"):
        check_checkpoint(str(whole_run))


def test_the_log_says_which_weights_were_loaded_and_which_are_new(tmp_path, caplog):
    save_pretrained(prolip.create_model(NAME), tmp_path)
    caplog.set_level("INFO", "prolip.models.checkpoint")
    prolip.create_model(f"local-dir:{tmp_path}")
    file = tmp_path / "model.safetensors"
    assert caplog.messages.pop() == (
        f"{file}: loaded 59 of 59 tensors; new, at their initial values: none; interpolated: none; not used: none"
    )
    prolip.create_model(f"local-dir:{tmp_path}", force_image_size=64)
    assert "interpolated: visual.positional_embedding from 18 to 66 rows" in caplog.messages.pop()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 900])
def test_a_configuration_that_is_nested_too_deeply_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    for enter in (prolip.create_model, get_tokenizer):
        with pytest.raises(ValueError, match=r"config\.json is not valid JSON: ") as reported:
            enter(f"local-dir:{tmp_path}")
        assert "\n" not in str(reported.value)
    assert not is_run(tmp_path) and read_status(tmp_path) == {}
