"""Runs that began with the flag --init-uncertainty, which is gone: OpenCLIP's weights in towers of ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import open_clip
import pytest
import torch
from training_runs import assert_same_state, newest, stop_after, words

import prolip
from prolip.models.checkpoint import save_pretrained
from prolip.utils.flags import FlagError
from training.health.signals import EXIT_STOPPED
from training.main import main, parse

STEPS = ("--max-steps", 4, "--seed", 5)


@pytest.fixture
def stopped(tmp_path) -> Path:
    """A run behind its second step, whose settings say that it began from CLIP's weights and a bare configuration."""
    model = prolip.create_model("ProLIP-ViT-test")
    save_pretrained(model, tmp_path / "bare")
    (tmp_path / "bare/model.safetensors").unlink()
    vision = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16}
    text = {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
    clip = open_clip.CLIP(embed_dim=32, vision_cfg=vision, text_cfg=text)
    torch.save(clip.state_dict(), tmp_path / "clip.pt")
    assert stop_after(2, words(tmp_path, "old", *STEPS)) == EXIT_STOPPED
    began(tmp_path / "old", f"local-dir:{tmp_path / 'bare'}", str(tmp_path / "clip.pt"))
    return tmp_path / "old"


def began(run: Path, model: str, pretrained: str) -> None:
    """Write settings as an earlier version saved them."""
    config = json.loads((run / "config.json").read_text())
    config["model"] |= {"model": model, "pretrained": pretrained, "init_uncertainty": True}
    config["model"].pop("image_resize_mode", None)  # which is newer
    (run / "config.json").write_text(json.dumps(config))


def resume(run: Path, *more: object) -> int:
    return main(["--resume", "latest", "--output", str(run.parent), "--name", run.name, *map(str, more)])


def test_such_a_run_goes_on_from_its_checkpoint_as_its_error_says(stopped, capsys):
    assert main(words(stopped.parent, "whole", *STEPS)) == 0
    assert resume(stopped) == 2
    assert "goes on with --pretrained RUN/checkpoints/step_N.pt" in capsys.readouterr().err
    assert resume(stopped, "--pretrained", stopped / "checkpoints/step_2.pt") == 0
    assert_same_state(newest(stopped), newest(stopped.parent / "whole"))


def test_such_a_run_of_a_recipe_goes_on_with_its_best_model(stopped, monkeypatch):
    gone = "local-dir:scripts/recipes/clip-vit-b-16"
    monkeypatch.chdir(stopped.parent)
    began(stopped, gone, "hf-hub:timm/vit_base_patch16_clip_224.openai")
    with pytest.raises(FlagError, match="begin with --model ViT-B-16 --pretrained openai; .*/best --pretrained none"):
        parse(["--resume", "latest", "--output", str(stopped.parent), "--name", "old"])
    save_pretrained(prolip.create_model("ProLIP-ViT-test"), stopped / "best")
    assert main(words(stopped.parent, "whole", *STEPS)) == 0
    assert resume(stopped, "--model", f"local-dir:{stopped / 'best'}", "--pretrained", "none") == 0
    assert_same_state(newest(stopped), newest(stopped.parent / "whole"))
    shutil.copytree(stopped.parent / "bare", gone.partition(":")[2])  # of one's own
    assert parse(words(stopped.parent, "new", "--model", gone)).model.model == gone


def test_the_flag_says_what_to_type():
    with pytest.raises(FlagError, match="--init-uncertainty.*--model ViT-B-16 --pretrained openai, or a file"):
        parse(["--init-uncertainty", "--pretrained", "clip.pt"])


def test_settings_without_it_are_read_as_they_were(stopped, tmp_path):
    config = json.loads((stopped / "config.json").read_text())
    config["model"] |= {"model": "ProLIP-ViT-test", "pretrained": None, "init_uncertainty": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert parse(["--config", str(tmp_path / "config.json"), "--name", "new"]).model.model == "ProLIP-ViT-test"


def test_a_scale_and_bias_that_are_asked_for_hold_against_those_of_trained_weights(tmp_path):
    model = prolip.create_model("ProLIP-ViT-test", init_logit_scale=1.0, init_logit_bias=-7.0)
    save_pretrained(model, tmp_path)
    wanted = parse(words(tmp_path, "new", "--model", f"local-dir:{tmp_path}", "--init-logit-scale", 20)).model
    own, _, _ = wanted.create(torch.device("cpu"), {})
    assert (own.logit_scale.exp().item(), own.logit_bias.item()) == (pytest.approx(20), -7)
    wanted = parse(words(tmp_path, "new", "--model", f"local-dir:{tmp_path}", "--init-logit-bias", -3)).model
    own, _, _ = wanted.create(torch.device("cpu"), {}, method_cfg={"name": "pcmepp"})
    assert (own.logit_scale.exp().item(), own.logit_bias.item()) == (pytest.approx(10), -3)
