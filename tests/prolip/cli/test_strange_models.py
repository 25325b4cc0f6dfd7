"""Every command, given a model whose configuration cannot be: one line that names the key, exit code 2, no trace."""

import copy
import json
from pathlib import Path

import pytest
import wds_folders
from commands import evaluate

from prolip import factory
from training import main as training

CORPUS = Path(__file__).parents[3] / "data" / "emoji" / "noto.tar"
OURS = factory.get_model_config("ProLIP-ViT-test")[0]
PLAIN = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "width": 32, "heads": 2, "layers": 1},
}
# (block or "", key, value): where a number stands for any value of another kind, JSON gives the rest.
WRONG = [("vision_cfg", "layers", 10**9), ("", "quick_gelu", "false"), ("text_cfg", "mlp_ratio", float("nan"))]


def model_folder(folder, config, block, key, value):
    config = copy.deepcopy(config)
    (config[block] if block else config)[key] = value
    folder.mkdir(exist_ok=True)
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    (folder / "open_clip_model.safetensors").write_bytes(b"\xff" * 64)
    return f"local-dir:{folder}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    wds_folders.classification(folder / "wds_cifar10_test", 4, 1)
    return folder


def arguments(name, model, data, out):
    """(what runs, its words) of each command."""
    task = data / "wds_cifar10_test"
    run = "--dataset-type synthetic --max-steps 1 --warmup 0 --batch-size 2 --workers 0 --train-num-samples 8 --name x"
    return {
        "training": (training.main, f"--model {model} {run} --device cpu --output {out}/runs"),
        "evaluation": (evaluate, f"--model {model} --data wds:{task}"),
    }[name]


@pytest.mark.parametrize("command", ["training", "evaluation"])
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong[1])
def test_a_command_ends_in_one_line_that_names_the_key(tmp_path, capsys, monkeypatch, data, command, wrong):
    monkeypatch.setattr(factory, "ProLIP", lambda *args, **kwargs: pytest.fail("built a model"))
    run, words = arguments(command, model_folder(tmp_path / "model", OURS, *wrong), data, tmp_path)
    try:
        code = run(words.split())
    except SystemExit as end:
        code = end.code
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2 and "error: " in line and f"{wrong[1]} is " in line and "config.json" in line, line
