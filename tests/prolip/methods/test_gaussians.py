"""Heads of a method's own on both kinds of towers: their width, what they begin with, and models without them."""

from __future__ import annotations

import json
from pathlib import Path

import open_clip
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import prolip
from prolip.models.checkpoint import load_checkpoint, save_pretrained
from prolip.models.readers import openclip_model

METHODS, OURS, WIDE = ("pcme", "pcmepp", "vacsr"), "ProLIP-ViT-test", 48
CLIP = {
    "embed_dim": 32,
    "custom_text": True,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16},
    "text_cfg": {"context_length": 12, "vocab_size": 1000, "width": 32, "heads": 2, "layers": 2},
}
EXTRA = {"vacsr": {"adapter_hidden": 8}, "pcme": {"match_samples": 2}}


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    """A small CLIP in OpenCLIP's format."""
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    save_file(openclip_model(CLIP).state_dict(), folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": CLIP, "preprocess_cfg": {}}))
    return folder


@pytest.fixture(params=["ours", "OpenCLIP's"])
def name(request, clip) -> str:
    return OURS if request.param == "ours" else f"local-dir:{clip}"


def build(name: str, method: str, **own):
    torch.manual_seed(0)
    return prolip.create_model(name, method_cfg={"name": method, "config": EXTRA.get(method, {}) | own})


def make_batch(model, rows: int = 4) -> dict:
    g = torch.Generator().manual_seed(1)
    text = torch.randint(3, 900, (rows, model.context_length), generator=g)
    text[:, 6], text[:, 7:] = 999, model.pad_token_id
    sides = open_clip.transformer.to_2tuple(model.image_size)
    return {"image": torch.randn(rows, 3, *sides, generator=g), "text": text}


def embeddings(model, batch: dict) -> dict:
    with torch.no_grad():
        z = {"image": model.encode_image(batch["image"]), "text": model.encode_text(batch["text"])}
    return {f"{side}_{part}": value for side, one in z.items() for part, value in one._asdict().items()}


@pytest.mark.parametrize("method", METHODS)
def test_heads_give_gaussians_of_a_width_of_their_own_that_a_saved_folder_keeps(name, method, tmp_path):
    model, towers = build(name, method, head_dim=WIDE).eval(), prolip.create_model(name).embed_dim
    found = embeddings(model, batch := make_batch(model))
    assert WIDE != towers == model.config["embed_dim"] and model.embed_dim == WIDE
    assert {tuple(value.shape) for value in found.values()} == {(4, WIDE)}
    again = prolip.create_model(f"local-dir:{save_pretrained(model, tmp_path / 'saved')}").eval()
    assert again.embed_dim == WIDE
    for part, value in embeddings(again, batch).items():
        assert torch.equal(value, found[part]), part
    twin = model.twin()
    assert {k: v.shape for k, v in twin.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}


@pytest.mark.parametrize("method", METHODS)
def test_the_trained_weights_of_another_method_go_into_wider_heads(name, method, tmp_path):
    given = build(name, "siglip")
    with torch.no_grad():
        for parameter in given.parameters():
            parameter.add_(0.1)
    save_pretrained(given, tmp_path)
    model = build(name, method, head_dim=WIDE)
    fresh = {key: value.clone() for key, value in model.state_dict().items()}
    report, theirs = load_checkpoint(model, next(tmp_path.glob("*model.safetensors"))), given.state_dict()
    layers = {
        f"{side}.{getattr(model, side).unc_head_name}.{part}"
        for side in ("visual", "text")
        for part in ("weight", "bias")
    }
    logit = set() if method == "vacsr" else {"logit_scale", "logit_bias"}  # which the others start themselves
    assert set(report.kept) == layers | logit | model.added_names
    for key, value in model.state_dict().items():
        if key not in model.added_names:
            assert torch.equal(value, fresh[key] if key in report.kept else theirs[key]), key


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_its_own_start_from_openclips_weights(clip, method):
    model, fresh = build(f"local-dir:{clip}", method, head_dim=WIDE), prolip.create_model(f"local-dir:{clip}")
    start = {"pcme": (15.0, 15.0), "pcmepp": (10.0, -5.0)}.get(method, (fresh.logit_scale.exp().item(), -10.0))
    assert (model.logit_scale.exp().item(), model.logit_bias.item()) == pytest.approx(start)
    if method == "pcme":
        weight = model.visual.head.globals["mean"].weight
        assert torch.equal(weight, torch.eye(*weight.shape))  # W g begins with the embedding


@pytest.mark.parametrize("method", METHODS)
def test_without_heads_the_means_are_openclips(clip, method):
    model = build(f"local-dir:{clip}", method, pooled_heads=False, head_dim=WIDE).eval()
    theirs = openclip_model(json.loads((clip / "open_clip_config.json").read_text())["model_cfg"]).eval()
    theirs.load_state_dict(load_file(clip / "open_clip_model.safetensors"))
    found = embeddings(model, batch := make_batch(model))
    with torch.no_grad():
        for side, tower in (("image", theirs.visual), ("text", theirs.text)):
            want = F.normalize(tower(batch[side]), dim=-1)
            torch.testing.assert_close(found[f"{side}_mean"], want, rtol=0, atol=1e-5)
    kept = {"pcme": 15.0}.get(method, theirs.logit_scale.exp().item())
    assert model.logit_scale.exp().item() == pytest.approx(kept)
