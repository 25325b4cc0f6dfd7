"""Commands, given a model whose configuration cannot be: one line that names the key, exit code 2, no trace."""

import copy
import json

import miniatures
import pytest
from commands import evaluate

from prolip import factory
from training import main as training

RUN = "--dataset-type synthetic --max-steps 1 --warmup 0 --batch-size 2 --workers 0 --train-num-samples 8 --name x"
# (block or "", key, value): where a number stands for any value of another kind, JSON gives the rest.
WRONG = [("vision_cfg", "layers", 10**9), ("", "quick_gelu", "false"), ("text_cfg", "mlp_ratio", float("nan"))]


@pytest.mark.parametrize("command", ["training", "evaluation"])
@pytest.mark.parametrize(("block", "key", "value"), WRONG, ids=lambda value: str(value))
def test_a_command_ends_in_one_line_that_names_the_key(tmp_path, capsys, monkeypatch, command, block, key, value):
    monkeypatch.setattr(factory, "ProLIP", lambda *args, **kwargs: pytest.fail("built a model"))
    config = copy.deepcopy(factory.get_model_config("ProLIP-ViT-test")[0])
    (config[block] if block else config)[key] = value
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    (tmp_path / "open_clip_model.safetensors").write_bytes(b"\xff" * 64)
    miniatures.wds_classification(tmp_path / "wds_cifar10_test", images=4, shards=1)
    run, words = training.main, f"{RUN} --device cpu --output {tmp_path}/runs"
    if command == "evaluation":
        run, words = evaluate, f"--data wds:{tmp_path}/wds_cifar10_test"
    try:
        code = run(["--model", f"local-dir:{tmp_path}", *words.split()])
    except SystemExit as end:
        code = end.code
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2 and "error: " in line and f"{key} is " in line and "config.json" in line, line
