"""Configurations of other people: real ones are read, all others end in one line that names the key.

Generated: one key of a real configuration gets a strange value, or the file is damaged as text. Either the model builds
(on the meta device) as asked, or a ValueError or OSError names the wrong key in one line.
"""

import copy
import json
from pathlib import Path

import open_clip
import pytest
import torch

import prolip
from prolip import factory
from prolip.models import config as module
from prolip.models.checkpoint import save_pretrained
from prolip.models.config import check_openclip, complete, override
from prolip.models.prolip import ProLIP

PACKAGED = sorted(Path(open_clip.__file__).parent.glob("model_configs/*.json"))


# --- real ones
@pytest.mark.parametrize("path", PACKAGED, ids=lambda path: path.stem)
def test_openclips_own_configurations_pass_and_its_plain_transformers_become_ours(path):
    config = json.loads(path.read_text())
    check_openclip(config)
    vision, text = config["vision_cfg"], config["text_cfg"]
    plain = not ({"timm_model_name", "attentional_pool"} & vision.keys() or isinstance(vision["layers"], list))
    if plain and not {"hf_model_name"} & text.keys() and text.get("proj_type") != "none":
        wanted = {"no_causal_mask": True, "embed_cls": True, "pool_type": "last"}
        own = {"mask_token_id": 5, "special_token_ids": [1]}
        ours = {key: value for key, value in config.items() if key != "multimodal_cfg"}
        made = complete({**ours, "text_cfg": {**text, **wanted}, "prolip_cfg": own})
        assert made["embed_dim"] == config["embed_dim"]


def test_whole_numbers_stand_for_fractions_lists_for_pairs_and_null_for_what_is_optional(tmp_path):
    config = copy.deepcopy(factory.get_model_config("ProLIP-ViT-test")[0])
    config["vision_cfg"] |= {"mlp_ratio": 4, "image_size": [32, 16], "ls_init_value": None, "norm_kwargs": None}
    config |= {"quick_gelu": None, "init_logit_bias": None, "custom_text": True}
    wrapped = {"model_cfg": config, "preprocess_cfg": {"mean": [0.5] * 3, "std": None, "interpolation": "bilinear"}}
    (tmp_path / "config.json").write_text(json.dumps(wrapped))
    model = prolip.create_model(f"local-dir:{tmp_path}", load_weights=False)
    assert tuple(model.visual.image_size) == (32, 16) and model.visual.preprocess_cfg["interpolation"] == "bilinear"
    assert model.logit_bias.item() == -10 and model.pixel_mean.flatten().tolist() == [0.5] * 3


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"vision_cfg": {"layers": 10**9}}, "vision_cfg.layers is 1000000000: it should be less than or equal to 1000"),
        (
            {"text_cfg": {"width": 2**16, "heads": 1024, "layers": 1000}},
            "has 5.2e+13 parameters, but the limit is 2e+10",
        ),
        ({"text_cfg": {"vocab_size": 2**22, "width": 2**16}}, "text_cfg has"),
        ({"vision_cfg": {"image_size": 2**14, "patch_size": 8}}, "4,194,304 patches, but the limit is 65,536"),
        ({"vision_cfg": {"patch_size": 2**14, "image_size": 2**14, "width": 2**15}}, "vision_cfg has"),
        ({"vision_cfg": {"mlp_ratio": 0.01}}, "mlp_ratio 0.01 gives no hidden unit"),
        ({"vision_cfg": {"pos_embed_type": "sin_cos_2d", "image_size": [32, 16]}}, "needs a square grid"),
        ({"text_cfg": {"tokenizer_mode": "clips"}}, "text_cfg.tokenizer_mode"),
        ({"embed_dim": {}}, "embed_dim is {}: it should be a valid integer"),
    ],
)
def test_a_model_that_cannot_be_is_refused_before_it_is_built(monkeypatch, changes, named):
    monkeypatch.setattr(factory, "ProLIP", lambda *args, **kwargs: pytest.fail("built a model first"))
    with pytest.raises(ValueError) as caught:
        prolip.create_model("ProLIP-ViT-test", **changes)
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_the_bound_counts_parameters_to_a_twentieth(monkeypatch):
    config, _ = factory.get_model_config("ProLIP-ViT-B-16")
    with torch.device("meta"):
        model = ProLIP(config)
    for block, tower in (("vision_cfg", model.visual), ("text_cfg", model.text)):
        count = sum(parameter.numel() for parameter in tower.parameters())
        monkeypatch.setattr(module, "MAX_PARAMETERS", 0.95 * count)
        with pytest.raises(ValueError, match=f"{block if block == 'text_cfg' else '_cfg'} has .* parameters"):
            complete(config)
        monkeypatch.setattr(module, "MAX_PARAMETERS", 1.05 * count)
        if block == "text_cfg":  # the larger one
            complete(config)


# --- generated ones
@pytest.mark.parametrize(
    "preprocess, message",
    [
        ({"mean": ["a", 1, 2]}, "preprocess_cfg.mean is .*: it should be a valid number"),
        ({"std": [0, 1, 1]}, "preprocess_cfg.std is .*: it should be greater than or equal to 0.000001"),
        ({"mode": "CMYK"}, "preprocess_cfg.mode is 'CMYK': it should be 'RGB'"),
        ({"meen": [1, 1, 1]}, "unknown key 'meen' in preprocess_cfg: did you mean mean"),
    ],
)
def test_preprocessing_is_checked_wherever_it_comes_from(tmp_path, preprocess, message):
    with pytest.raises(ValueError, match=message):
        prolip.create_model("ProLIP-ViT-test", force_preprocess_cfg=preprocess)
    config = factory.get_model_config("ProLIP-ViT-test")[0]
    (tmp_path / "config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": preprocess}))
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        prolip.create_model(f"local-dir:{tmp_path}")


def test_a_damaged_configuration_beside_weights_is_refused_with_its_name(tmp_path):
    save_pretrained(prolip.create_model("ProLIP-ViT-test"), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written["model_cfg"]["vision_cfg"] = "none"
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(
        ValueError, match="config.json, next to the weights: vision_cfg is 'none': it should be a valid"
    ):
        prolip.create_model("ProLIP-ViT-test", pretrained=str(tmp_path / "model.safetensors"))


def test_a_model_with_parts_of_one_method_is_none_of_another():
    config = {"method_cfg": {"name": "likelihood", "config": {"bank": 8}}, "prolip_cfg": {}}
    with pytest.raises(ValueError, match="give --method likelihood, or a method with adapts=True$"):
        override(config, method_cfg={"name": "prolip"})
    kept = override(config, method_cfg={"name": "likelihood", "config": {"bank": 9}})
    assert kept["method_cfg"]["config"] == {"bank": 9}
