"""Published ProLIP weights: the tiny fixture offline, the real ones where there is a network."""

import io
import json
import shutil
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

import prolip
from prolip.measures import csd_similarity
from prolip.models.config import complete
from prolip.models.prolip import ProLIP
from prolip.models.registry import reachable

TINY = Path(__file__).parents[2] / "fixtures" / "released_prolip_tiny"
UNCERTAIN = {"embed_unc": True, "init_unc_bias": -10}
TEXT = {"context_length": 64, "vocab_size": 32100, "hf_tokenizer_name": "timm/ViT-B-16-SigLIP", "width": 768}
TEXT |= {"heads": 12, "layers": 12, "no_causal_mask": True, "proj_bias": True, "pool_type": "last", "embed_cls": True}
RELEASED_B16 = {
    "embed_dim": 768,
    "init_logit_bias": -10,
    "vision_cfg": {"image_size": 224, "layers": 12, "width": 768, "patch_size": 16} | UNCERTAIN,
    "text_cfg": TEXT | {"norm_kwargs": {"eps": 1e-6}} | UNCERTAIN,
}


@pytest.fixture(scope="module")
def expected():
    return {key: torch.from_numpy(np.array(value)) for key, value in np.load(TINY / "io.npz").items()}


@pytest.mark.parametrize("training", [True, False])
def test_outputs_equal_the_fixtures(expected, training):
    model = prolip.create_model(f"local-dir:{TINY}").train(training)
    with torch.set_grad_enabled(training):
        image, text, scale, bias = model(expected["image"], expected["text"])
    for side, z in (("image", image), ("text", text)):
        torch.testing.assert_close(z.mean, expected[f"{side}_mean"], atol=1e-5, rtol=0)
        torch.testing.assert_close(z.log_var, expected[f"{side}_log_var"], atol=1e-5, rtol=0)
    torch.testing.assert_close(scale, expected["logit_scale"], atol=1e-5, rtol=0)
    torch.testing.assert_close(bias, expected["logit_bias"])


@pytest.mark.parametrize("wrong", ["paper", "causal order of the special rows"])
def test_the_fixture_can_tell_a_wrong_forward_pass(expected, wrong):
    model = prolip.create_model(f"local-dir:{TINY}")
    if wrong == "paper":
        model.visual.form = model.text.form = "paper"
    else:
        with torch.no_grad():
            model.text.positional_embedding.copy_(model.text.positional_embedding.roll(2, 0))
    with torch.no_grad():
        image, text, *_ = model(expected["image"], expected["text"])
    apart = [image.mean - expected["image_mean"], text.log_var - expected["text_log_var"]]
    assert max(x.abs().max() for x in apart) > 1e-3


def test_released_weights_in_a_model_of_ours_are_refused_although_they_fit(expected, tmp_path, monkeypatch):
    """B-16 has equal widths, so that `pretrained` alone would load the published file into the other forward pass."""
    config = json.loads((TINY / "config.json").read_text())
    same = {
        "embed_dim": 64,
        "vision_cfg": {key: config["vision_cfg"][key] for key in ("layers", "width", "head_width")},
        "text_cfg": {key: config["text_cfg"][key] for key in ("context_length", "vocab_size", "width", "layers")},
        "pad_token_id": 1,
        "mask_token_id": None,
        "special_token_ids": [1],
    }
    for pretrained in (TINY, TINY / "model.safetensors"):
        with pytest.raises(ValueError, match="forward='released', but the model has forward='paper'.*local-dir:"):
            prolip.create_model("ProLIP-ViT-test", str(pretrained), **same)

    def hub_file(repo, names, cache):
        """A hub gives one file at a time."""
        return next(Path(shutil.copy(TINY / name, tmp_path)) for name in names if (TINY / name).is_file())

    monkeypatch.setattr("prolip.models.registry.hub_file", hub_file)
    with pytest.raises(ValueError, match="forward='released', but the model has forward='paper'"):
        prolip.create_model("ProLIP-ViT-test", "hf-hub:org/released", **same)
    model = prolip.create_model("ProLIP-ViT-test", str(TINY), forward="released", **same)
    with torch.no_grad():
        z = model.encode_text(expected["text"])
    torch.testing.assert_close(z.log_var, expected["text_log_var"], atol=1e-5, rtol=0)
    assert prolip.create_model("ProLIP-ViT-test", str(TINY), forward="paper", **same).text.form == "paper"


def test_the_released_configuration_is_recognised_and_converted():
    config = complete(json.loads((TINY / "config.json").read_text()))
    assert config["prolip_cfg"]["forward"] == "released"
    assert config["prolip_cfg"]["pad_token_id"] == 1 and config["prolip_cfg"]["mask_token_id"] is None
    assert "embed_unc" not in config["vision_cfg"] and "init_unc_bias" not in config["text_cfg"]
    assert complete(config) == config


def shapes(model):
    return {name: x.shape for name, x in model.state_dict().items()}


def test_what_a_released_configuration_leaves_out_is_the_released_codes_default_and_ours_has_its_shapes():
    """OpenCLIP's 8 heads instead of 12 would give correct shapes and wrong outputs."""
    text = {"norm_kwargs": {"eps": 1e-6}, "pool_type": "argmax", "pad_id": 0}
    bare = {**RELEASED_B16, "text_cfg": text, "output_dict": True, "cast_dtype": None}
    with torch.device("meta"):
        model, whole = ProLIP(bare), ProLIP(RELEASED_B16)
        ours = ProLIP(prolip.models.registry.get_model_config("ProLIP-ViT-B-16")[0])
    assert model.text.heads == whole.text.heads == 12 and model.context_length == 64
    assert shapes(model) == shapes(whole) == shapes(ours)


@pytest.mark.network
def test_golden_values_of_the_published_b16():
    """COCO val2017 image 39769 with the three captions of the model card; measured with the released code."""
    from PIL import Image

    if not reachable():
        pytest.skip("needs the public model hub")
    name = "hf-hub:SanghyukChun/ProLIP-ViT-B-16-DC-1B-12_8B"
    model, _, preprocess = prolip.create_model_and_transforms(name)
    tokenizer = prolip.get_tokenizer(name)
    with urllib.request.urlopen("http://images.cocodataset.org/val2017/000000039769.jpg", timeout=60) as response:
        picture = preprocess(Image.open(io.BytesIO(response.read())))
    captions = [
        "A couple of cats laying on top of a pink couch.",
        "A man walks through the flooded road during a rainstorm",
        "photo",
    ]
    with torch.no_grad():
        image, text, *_ = model.eval()(picture[None], tokenizer(captions))
    cosine = (text.mean @ image.mean[0]).tolist()
    assert cosine == pytest.approx([0.2314, -0.2199, 0.1002], abs=2e-3)
    assert image.trace.item() == pytest.approx(0.0145, abs=5e-4)
    assert text.trace.tolist() == pytest.approx([0.0419, 0.0398, 0.0599], abs=5e-4)
    assert csd_similarity(image, text).argmax() == 0
