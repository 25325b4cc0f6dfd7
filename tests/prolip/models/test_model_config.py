"""Configurations of other people: real ones are read, all others end in one line that names the key.

Generated: one key of a real configuration gets a strange value, or the file is damaged as text. Either the model builds
(on the meta device) as asked, or a ValueError or OSError names the wrong key in one line.
"""

import copy
import json
import random
from collections import Counter
from pathlib import Path

import open_clip
import pytest
import torch

import prolip
from prolip import factory
from prolip.models import config as module
from prolip.models.checkpoint import save_pretrained
from prolip.models.config import PreprocessRules, ProLIPRules, check_openclip, complete, override
from prolip.models.prolip import ProLIP

TINY = Path(__file__).parents[2] / "fixtures" / "released_prolip_tiny" / "config.json"
PACKAGED = sorted(Path(open_clip.__file__).parent.glob("model_configs/*.json"))
NUMBERS = [0, -1, 1, 3, 7, 48, 1.5, -0.5, 10**9, 2**31, 2**63, 10**30, 10**400, 1e300, 1e-300]
STRANGE = (
    [None, True, False, *NUMBERS, float("nan"), float("inf"), -float("inf"), "", "false", "12", "x" * 10**5, "a\nb"]
    + [[], [1], [16, 16], [0, 0], [1, 2, 3], ["a"], [[]], {}, {"a": 1}, {"eps": float("nan")}, {"eps": "1"}]
    + [{"clean": 3}, {"bpe_path": "/dev/zero"}, {"trust_remote_code": True}, {"approximate": "tan"}]
)
SOUND = [
    ("vision_cfg", {"layers": 3, "mlp_ratio": 2, "norm_kwargs": {"eps": 1e-6}, "ls_init_value": 1e-5, "qk_norm": True}),
    ("vision_cfg", {"pool_type": "avg", "no_ln_pre": True, "timm_model_name": None}),
    ("text_cfg", {"mlp_ratio": 3.7362, "act_kwargs": {"approximate": "tanh"}, "norm_kwargs": None}),
    ("text_cfg", {"context_length": 300}),
    ("", {"embed_dim": 7, "custom_text": True, "quick_gelu": True, "init_logit_bias": -5}),
]
KEYS = {
    block: list(rules.annotation.model_fields)
    for block, rules in ProLIPRules.model_fields.items()
    if block in ("vision_cfg", "text_cfg", "prolip_cfg")
}
KEYS |= {"": list(ProLIPRules.model_fields), "preprocess_cfg": list(PreprocessRules.model_fields)}


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
        ({"text_cfg": {"width": 2**16, "heads": 1024, "layers": 1000}}, "of 5.2e+13 parameters, at most 2e+10"),
        ({"text_cfg": {"vocab_size": 2**22, "width": 2**16}}, "text_cfg is a tower of"),
        ({"vision_cfg": {"image_size": 2**14, "patch_size": 8}}, "4,194,304 patches, at most 65,536"),
        ({"vision_cfg": {"patch_size": 2**14, "image_size": 2**14, "width": 2**15}}, "vision_cfg is a tower of"),
        ({"vision_cfg": {"mlp_ratio": 0.01}}, "mlp_ratio 0.01 leaves no hidden unit"),
        ({"vision_cfg": {"pos_embed_type": "sin_cos_2d", "image_size": [32, 16]}}, "needs a square of patches"),
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
        with pytest.raises(ValueError, match=f"{block if block == 'text_cfg' else '_cfg'} is a tower of"):
            complete(config)
        monkeypatch.setattr(module, "MAX_PARAMETERS", 1.05 * count)
        if block == "text_cfg":  # the larger one
            complete(config)


# --- generated ones
def base(rng):
    """A wrapped configuration of the released layout or of ours, with all rules' blocks."""
    if rng.random() < 0.2:
        return {"model_cfg": json.loads(TINY.read_text())}
    config = copy.deepcopy(factory.get_model_config(rng.choice(["ProLIP-ViT-test", "ProLIP-ViT-B-16"]))[0])
    return {"model_cfg": config, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"}}


def change_value(rng):
    """(text of a file, words of which a refusal has one): a strange value somewhere."""
    whole = base(rng)
    model = whole["model_cfg"]
    block = rng.choice(["", "vision_cfg", "vision_cfg", "text_cfg", "text_cfg", "prolip_cfg", "preprocess_cfg", "file"])
    if block == "file":
        place, key = whole, rng.choice([*whole, "preproces_cfg"])
    else:
        above = whole if block == "preprocess_cfg" else model
        place, key = above.setdefault(block, {}) if block else model, rng.choice(KEYS[block])
    key = key + rng.choice("abc") if rng.random() < 0.1 else key
    place[key] = rng.choice(STRANGE)
    text = json.dumps(whole)
    named = [key, block or key, "embed_unc", "[UNC]", "patch"]  # a published model has no prolip_cfg
    named += ["model configuration"] if block == "file" else []
    return text.replace("Infinity", "1e400") if rng.random() < 0.5 else text, named


def change_soundly(rng):
    """A file that a real model may have, which must not be refused."""
    whole = base(rng)
    block, values = rng.choice(SOUND)
    key = rng.choice(list(values))
    (whole["model_cfg"][block] if block else whole["model_cfg"])[key] = values[key]
    return json.dumps(whole), []


def change_text(rng):
    """(bytes of a file, words of a refusal): no JSON, or JSON that traps its reader."""
    text = json.dumps(base(rng)).encode()
    at = rng.randrange(1, len(text))
    others = [text[:at], text[:at] + b"\xff\xfe" + text[at:], b"", text + b"}", b"\x00" * 4096, b"\xef\xbb\xbf" + text]
    others += [b"[" * rng.choice([60, 10_000, 500_000]), b'{"a":' * 300_000, b'{"a": ' + b"9" * 5000 + b"}"]
    traps = [
        (text + b" " * 2**20, "has more than 1,048,576 bytes"),
        (b'{"model_cfg": {"embed_dim": 3}, "model_cfg": ' + text + b"}", "'model_cfg' is there twice"),
        (b'{"a": [' + b"0," * 200_000 + b"0]}", "values"),
    ]
    return rng.choice([*((other, "config.json") for other in others), *traps])


def try_one(folder, seed):
    """The fate of one generated configuration: "built" or "refused"."""
    rng = random.Random(f"config {seed}")
    made, named = rng.choice([change_text, change_value, change_value, change_value, change_soundly])(rng)
    (folder / "config.json").write_bytes(made if isinstance(made, bytes) else made.encode())
    try:
        config, preprocess = factory.get_model_config(f"local-dir:{folder}")
        with torch.device("meta"):
            ProLIP(config)
        json.dumps([config, preprocess], allow_nan=False)
    except (ValueError, OSError) as error:
        line = str(error)
        assert "\n" not in line and len(line) < 1000, line[:2000]
        assert any(name in line for name in ([named] if isinstance(named, str) else named)), (named, line)
        return "refused"
    asked = json.loads(made)
    for key in ("embed_dim", "vision_cfg", "text_cfg"):  # every asked value is there
        given, got = asked["model_cfg"][key], config[key]
        if isinstance(given, dict):
            others = ("embed_unc", "init_unc_bias", "pool_type", "pad_id", "tokenizer_kwargs")
            assert all(got[k] == v for k, v in given.items() if k not in others)
        else:
            assert given == got and type(given) is type(got)
    return "built"


def test_sixty_generated_configurations_build_or_are_refused_in_a_line(tmp_path):
    verdicts = Counter(try_one(tmp_path, seed) for seed in range(60))
    assert verdicts["refused"] > 30 and verdicts["built"] > 5, verdicts


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
    with pytest.raises(ValueError, match="config.json, beside the weights: vision_cfg is 'none': it should be a valid"):
        prolip.create_model("ProLIP-ViT-test", pretrained=str(tmp_path / "model.safetensors"))


def test_a_model_with_parts_of_one_method_is_none_of_another():
    config = {"method_cfg": {"name": "likelihood", "config": {"bank": 8}}, "prolip_cfg": {}}
    with pytest.raises(ValueError, match="give --method likelihood"):
        override(config, method_cfg={"name": "prolip"})
    kept = override(config, method_cfg={"name": "likelihood", "config": {"bank": 9}})
    assert kept["method_cfg"]["config"] == {"bank": 9}
