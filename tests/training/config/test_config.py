"""A run's config: validated when it is made, saved and read back as it was."""

from __future__ import annotations

import json

import pytest
import torch

from prolip.data.augment.colour import ColourJitter
from prolip.data.augment.crops import RandomCrop
from prolip.random import Draws
from prolip.utils.flags import FlagError
from training.config import (
    Config,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ValidationConfig,
    build_config,
    read_config_file,
)
from training.defaults import rows_per_rank, total_steps
from training.model import build_augment, build_model, check_precision


def config(**sections) -> Config:
    return build_config("prolip", sections)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (OptimConfig, {"opt": "adamww"}, "--opt adamww is not an optimiser of timm: did you mean adamw"),
        (OptimConfig, {"lr": 0.0}, "--lr 0.0: give a finite number above 0"),
        (OptimConfig, {"beta2": 1.0}, "--beta2 1.0: give a number of at least 0 and below 1"),
        (OptimConfig, {"layer_decay": 1.1}, "--layer-decay 1.1: give a number above 0 and at most 1"),
        (OptimConfig, {"image_lr_mult": 0.0}, "--image-lr-mult 0.0: .*; --lock-image and --lock-text freeze a tower"),
        (OptimConfig, {"unfreeze_warmup_epochs": 1.0}, "needs a frozen backbone: give --image-freeze-epochs or"),
        (OptimConfig, {"lr_milestones": (0.6,)}, "--lr-scheduler step and --lr-milestones need each other"),
        (OptimConfig, {"lr_scheduler": "step", "lr_milestones": (0.8, 0.6)}, "0.8 0.6: give increasing shares"),
        (RunConfig, {"epochs": 1, "max_steps": 2}, "--epochs and --max-steps contradict each other"),
        (RunConfig, {"epochs": 0}, "--epochs 0: give a number of at least 1"),
        (RunConfig, {"name": "a/b"}, "is not a folder name: give its parent folder as --output"),
        (RunConfig, {"resume": "latest"}, "--resume latest without --name: give the name"),
        (RunConfig, {"resume": "a.pt", "overwrite": True}, "give one of them"),
        (ValidationConfig, {"val_select": "group=x"}, "--val-select without --val-data emoji:TARS"),
        (ValidationConfig, {"best_lowest": True}, "--best-lowest without --best-metric"),
        (ModelConfig, {"init_logit_scale": 1000.0}, "at most 100.0, the bound on a"),
        (ModelConfig, {"init_unc_bias": float("inf")}, "--init-unc-bias inf: give a finite number"),
        (RunConfig, {"seed": 2**63}, "--seed .*: give a number of at least 0 and below 9223372036854775808"),
        (ModelConfig, {"lock_text_unlocked_layers": 1}, "needs a locked tower: add --lock-text"),
        (ValidationConfig, {"val_split": "val", "coco_test": "a,b"}, "--val-split without --val-data"),
    ],
)
def test_a_wrong_setting_is_refused_when_the_config_is_made(kind, values, message):
    with pytest.raises(ValueError, match=message):
        kind(**values)


def test_augmentation_that_nobody_would_apply_is_refused():
    with pytest.raises(FlagError, match="--rotate without --device-augment"):
        config(augment={"rotate": 10.0})
    assert config(augment={"rotate": 10.0}, model={"device_augment": True}).augment.rotate == 10.0
    for model in ({"openclip_transform": True}, {"aug_cfg": {"use_timm": True}}):
        with pytest.raises(FlagError, match="--cutout needs images that the device normalises"):
            config(augment={"cutout": 0.2}, model=model)
        with pytest.raises(FlagError, match="--erase-prob needs images that the device normalises"):
            config(augment={"erase_prob": 0.2}, model=model)
    assert config(augment={"cutout": 0.2, "text_mask": 0.1}).augment.cutout == 0.2
    with pytest.raises(ValueError, match="text_mask, text_random and text_delete are .* in total more than 1"):
        config(augment={"text_mask": 0.6, "text_random": 0.2, "text_delete": 0.3})


@pytest.mark.parametrize("method", ["prolip", "clip"])
def test_a_saved_config_is_the_same_config(tmp_path, method):
    made = build_config(
        method,
        {
            "model": {"model": "ProLIP-ViT-test", "device_augment": True},
            "augment": {"zoom": [0.8, 1.2]},
            "data": {"train_data": "a.tar", "workers": 2, "batch_size": 8},
            "optim": {"lr": 1e-3, "warmup": 5},
            "run": {"max_steps": 9, "name": "x", "resume": "latest", "seed": 3},
        },
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(made.to_dict()))
    values = read_config_file(str(path))
    again = build_config(values.pop("method"), values)
    assert again.to_dict() == made.to_dict()
    assert again.run.resume is None and again.run.seed == 3
    assert (again.augment, again.data) == (made.augment, made.data)


def test_a_run_folder_or_yaml_is_read_too(tmp_path):
    (tmp_path / "config.json").write_text('{"method": "clip", "optim": {"lr": 0.1}}')
    assert read_config_file(str(tmp_path))["optim"] == {"lr": 0.1}
    (tmp_path / "run.yaml").write_text("method: siglip\noptim:\n  lr: 1e-3\n")
    values = read_config_file(str(tmp_path / "run.yaml"))
    assert build_config(values.pop("method"), values).optim.lr == 1e-3


def test_a_setting_that_an_earlier_version_saved_has_its_name_of_today(tmp_path):
    (tmp_path / "config.json").write_text('{"run": {"output_dir": "there"}}')
    assert read_config_file(str(tmp_path))["run"] == {"output": "there"}
    assert build_config("siglip", {"run": {"output_dir": "there"}}).run.output == "there"


def test_an_unreadable_config_says_why(tmp_path):
    with pytest.raises(FlagError, match="does not exist"):
        read_config_file(str(tmp_path / "no.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(FlagError, match="cannot be read"):
        read_config_file(str(tmp_path / "bad.json"))
    for text in ('{"lr": 1}', '{"method": 3}', '{"run": null}', "[]"):
        (tmp_path / "flat.json").write_text(text)
        with pytest.raises(FlagError, match='give {"method"'):
            read_config_file(str(tmp_path / "flat.json"))


def test_a_batch_that_cannot_be_shared_out_names_the_nearest_that_can():
    made = config(run={"global_batch_size": 100})
    with pytest.raises(FlagError, match="^batch 100 is not divisible by 8 ranks: use 96 or 104$"):
        rows_per_rank(made, 8)
    assert rows_per_rank(made, 4) == 25
    made = config(run={"global_batch_size": 6, "accum_freq": 2})
    with pytest.raises(FlagError, match="batch 6 is not divisible by 4 ranks x 2 micro-batches: use 8"):
        rows_per_rank(made, 4)
    assert rows_per_rank(config(data={"batch_size": 12}, run={"accum_freq": 2}), 4) == 24


def test_two_batch_sizes_contradict_each_other():
    with pytest.raises(FlagError, match="--global-batch-size and --batch-size contradict"):
        config(run={"global_batch_size": 8}, data={"batch_size": 8})
    assert "batch_size" not in config(run={"global_batch_size": 8}).to_dict()["data"]


def test_lengths_are_given_in_epochs_steps_or_samples():
    def steps(**run) -> int:
        return total_steps(config(run=run, optim={"warmup": 0}), steps_per_epoch=10, global_batch=16)

    assert steps(epochs=3) == 30 and steps(max_steps=7) == 7 and steps(max_samples=33) == 3


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(FlagError, match="10000 steps is longer than the run of 100 steps: give --warmup 5%"):
        total_steps(config(run={"max_steps": 100}, optim={"warmup": 10_000}), steps_per_epoch=10, global_batch=16)


def test_precision_that_the_device_lacks_is_refused(monkeypatch):
    with pytest.raises(FlagError, match="amp_fp16 needs CUDA, but the device is cpu: use amp_bf16 or fp32"):
        check_precision("--precision", "amp_fp16", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old")
    with pytest.raises(FlagError, match="is not supported by Old: use amp_fp16 or fp32"):
        check_precision("--precision", "amp_bf16", torch.device("cuda"))
    check_precision("--precision", "amp_fp16", torch.device("cuda"))


def test_the_papers_augmentation_is_shared_by_default():
    made, device = config(model={"model": "ProLIP-ViT-test"}, optim={"warmup": 0}), torch.device("cpu")
    model, transform, _ = build_model(made, device)
    augment = build_augment(made, model, device, Draws())
    assert isinstance(transform, RandomCrop) and transform.scale == (0.8, 1.0) and not transform.dct_scaled
    assert isinstance(augment, ColourJitter) and augment.config.jitter == (0.32, 0.32, 0.32, 0.08)
