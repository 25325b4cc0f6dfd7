"""Embedders: our models and OpenCLIP's give what they give elsewhere; what cannot be loaded is refused by name."""

import json
from functools import reduce
from pathlib import Path

import miniatures as mini
import open_clip
import pytest
import torch
import torch.nn.functional as F
from embedding import changed, embed_texts, similarity_scores
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import prolip
from prolip import embedder as evaluated
from prolip.embedder import Embedder
from prolip.gaussian import Gaussian

TEXTS = ["a dog", "two cats on a boat", "", "sky"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_a_model_of_ours_gives_its_gaussians(folder, ours):
    model = prolip.create_model(folder).eval()
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    ids = prolip.get_tokenizer(folder)(TEXTS)
    with torch.no_grad():
        wanted = model.encode_image(pixels), model.encode_text(ids)
    got = ours.encode_image(pixels), ours.encode_text(ids)
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a.mean, b.mean)
        torch.testing.assert_close(a.log_var, b.log_var)
        assert a.mean.dtype == torch.float32 and not a.mean.requires_grad and not a.mean.is_inference()
    assert ours.probabilistic and (got[0].trace > 0).all()
    assert ours.logit_scale == pytest.approx(10) and ours.logit_bias == -10
    assert torch.equal(ours.tokenizer(TEXTS), ids)


def test_an_openclip_model_gives_points_whose_csd_is_the_cosine(theirs, tmp_path):
    model, _, preprocess = open_clip.create_model_and_transforms("ViT-mini", theirs.name.removeprefix("ViT-mini:"))
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    ids = open_clip.get_tokenizer("ViT-mini")(TEXTS)
    with torch.no_grad():
        image, text = model.eval().encode_image(pixels), model.encode_text(ids)
    got = theirs.encode_image(pixels), theirs.encode_text(theirs.tokenizer(TEXTS))
    for a, b in zip(got, (image, text)):
        torch.testing.assert_close(a.mean, F.normalize(b, dim=-1))
        assert a.log_var.isneginf().all() and (a.trace == 0).all()
    assert not theirs.probabilistic and theirs.logit_scale == pytest.approx(1 / 0.07) and theirs.logit_bias is None
    torch.testing.assert_close(similarity_scores(*got), F.normalize(image) @ F.normalize(text).mT)


def test_units_of_a_model_without_a_fit_are_refused_with_the_command_that_fits_them(folder, ours, theirs):
    for model, words in (
        (ours, f"--model {folder}"),
        (theirs, f"--model {theirs.name.replace(':', ' --pretrained ', 1)}"),
    ):
        with pytest.raises(ValueError, match="has no units of traces: expected variances fitted to data") as refused:
            _ = model.units
        assert str(refused.value).endswith(f": prolip uncertainty {words} --data captions.csv --output fitted")


def test_autocast_is_used_only_where_it_is_asked_for(folder, ours):
    half = Embedder.load(folder, precision="amp_bf16")
    pixels = torch.randn(2, 3, 32, 32)
    a, b = ours.encode_image(pixels), half.encode_image(pixels)
    assert not torch.equal(a.mean, b.mean) and b.mean.dtype == torch.float32
    torch.testing.assert_close(a.mean, b.mean, atol=0.05, rtol=0)
    assert half.fingerprint == ours.fingerprint and (ours.precision, half.precision) == ("fp32", "amp_bf16")


def test_the_fingerprint_follows_weights_and_every_setting(folder, ours, theirs, tmp_path):
    source, weights = Path(folder.removeprefix("local-dir:")), theirs.name.removeprefix("ViT-mini:")
    config, ids = json.loads((source / "config.json").read_text()), ours.tokenizer(TEXTS)
    found = [ours.fingerprint, mini.small_prolip(tmp_path / "other", seed=1).fingerprint]
    for place, value in (
        ("preprocess_cfg mean", [0.5, 0.5, 0.5]),
        ("model_cfg text_cfg tokenizer_kwargs", {"clean": "canonicalize"}),
        ("model_cfg prolip_cfg mask_padding", True),  # this and the next leave the weights alone
        ("model_cfg text_cfg heads", 1),
    ):
        changed, other = json.loads(json.dumps(config)), tmp_path / str(len(found))
        *sections, key = place.split()
        reduce(dict.__getitem__, sections, changed)[key] = value
        other.mkdir()
        (other / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
        (other / "config.json").write_text(json.dumps(changed))
        model = Embedder.load(f"local-dir:{other}")
        same = torch.allclose(model.encode_text(ids).mean, ours.encode_text(ids).mean, atol=1e-3)
        assert same is (key not in ("mask_padding", "heads"))
        found.append(model.fingerprint)
    assert len(set(found)) == len(found) and Embedder.load(folder).fingerprint == ours.fingerprint
    (tmp_path / "ViT-mini-quick.json").write_text(json.dumps({**mini.TINY_CLIP, "quick_gelu": True}))
    open_clip.add_model_config(tmp_path / "ViT-mini-quick.json")
    assert Embedder.load("ViT-mini-quick", weights).fingerprint != theirs.fingerprint
    assert Embedder.load("ViT-mini", weights).fingerprint == theirs.fingerprint


def test_a_folder_in_openclips_layout_is_an_openclip_model(tmp_path, theirs):
    model = open_clip.create_model("ViT-mini", theirs.name.removeprefix("ViT-mini:"))
    config = {"model_cfg": mini.TINY_CLIP, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))  # of another library
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "open_clip_model.safetensors")
    local = Embedder.load(f"local-dir:{tmp_path}")
    pixels = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(local.encode_image(pixels).mean, theirs.encode_image(pixels).mean)
    assert not local.probabilistic and local.fingerprint != theirs.fingerprint  # the pixels' mean is another one


@pytest.mark.parametrize(
    "model, pretrained, error, message",
    [
        ("ProLIP-ViT-test", None, ValueError, "an architecture, but no weights are given: use local-dir:<run>/model"),
        ("ViT-B-32", None, ValueError, "--pretrained with one of openai, laion400m_e31.*--pretrained random"),
        ("ViT-B-32", "laion3b", FileNotFoundError, "'laion3b' are neither a file nor a tag; tags of ViT-B-32: openai"),
        ("ViT-B32", "openai", ValueError, "unknown model 'ViT-B32': did you mean .*ViT-B-32"),
        ("ProLIP-ViT-tst", None, ValueError, "did you mean ProLIP-ViT-test"),
        ("local-dir:/nowhere/model", None, FileNotFoundError, "/nowhere/model does not exist"),
        ("ViT-B-16-SigLIP", "random", FileNotFoundError, "not on this machine.*hf download .*--tokenizer <folder>"),
    ],
)
def test_what_cannot_be_loaded_says_what_to_give(model, pretrained, error, message):
    with pytest.raises(error, match=message):
        Embedder.load(model, pretrained)


def test_weights_precisions_and_devices_that_are_none_are_refused(tmp_path, theirs, folder, monkeypatch):
    (tmp_path / "weights.pt").write_bytes(b"nothing")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for given, options, message in (
        (("ViT-mini", str(tmp_path / "weights.pt")), {}, "OpenCLIP cannot load ViT-mini with the weights"),
        ((folder, "random"), {}, "has its own weights, so pretrained='random' would be ignored"),
        ((folder,), {"precision": "int8"}, "precision 'int8' is unknown: use one of fp32"),
        ((folder,), {"device": "cuda"}, "no CUDA device; use cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            Embedder.load(*given, **options)


def test_images_are_streamed_in_order_with_their_novelty_and_lost_ones_are_named(ours, tmp_path):
    colours = ["red", "green", "blue", "white", "black"]
    paths = [tmp_path / f"{colour}.png" for colour in colours]
    for path, colour in zip(paths, colours):
        Image.new("RGB", (40, 40), colour).save(path)
    images = [Image.open(path) for path in paths]
    wanted = ours.encode_image(torch.stack([ours.preprocess(image.convert("RGB")) for image in images]))
    for given, workers in ((paths, 0), ([str(path) for path in paths], 3), (images, 2)):
        got = ours.embed_images(given, batch_size=2, workers=workers)
        torch.testing.assert_close(got.mean, wanted.mean)
        torch.testing.assert_close(got.log_var, wanted.log_var)
    knowing = changed(ours, novelty=lambda encoded: {"mean": encoded.z.mean[:, 0]})
    found = knowing.embed(paths, "image", batch_size=3)
    torch.testing.assert_close(found.novelty["mean"], wanted.mean[:, 0])
    assert ours.embed(["a", "b"], "text").novelty == {}
    paths[2].write_bytes(b"no image")
    lost = []
    parts = list(ours.stream(paths, prolip.open_image, ours.encode_image, 2, 2, lambda path, error: lost.append(path)))
    assert [path for batch, _ in parts for path in batch] == [*paths[:2], *paths[3:]] and lost == [paths[2]]
    with pytest.raises(ValueError, match="blue.png"):
        ours.embed_images(paths)
    with pytest.raises(ValueError, match="no image to embed"):
        ours.embed_images([])


class Stub(nn.Module):
    """Dropout betrays a wrong mode."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop, self.frozen = nn.Linear(12, 5), nn.Dropout(0.5), nn.Dropout(0.5).eval()

    def encode_text(self, ids):
        out = self.drop(self.linear(ids.float()))
        return Gaussian(nn.functional.normalize(out, dim=-1), out)


def tokenize(texts):
    rows = torch.zeros(len(texts), 12, dtype=torch.long)
    for i, text in enumerate(texts):
        codes = [99, *(ord(c) for c in text), 98][:12]
        rows[i, : len(codes)] = torch.tensor(codes)
    return rows


def test_every_module_gets_its_own_mode_back_and_no_graph_is_left():
    model = Stub()
    got = embed_texts(model, tokenize, ["a"])
    assert model.training and model.drop.training and not model.frozen.training
    assert not got.mean.requires_grad and not got.mean.is_inference()
    with pytest.raises(RuntimeError), evaluated.evaluating(model, "cpu"):
        raise RuntimeError
    assert model.drop.training


def test_token_lengths_leave_out_the_padding_only():
    lengths = evaluated.token_lengths(tokenize, ["", "a", "abc", "a" * 40, "a\0b"], batch_size=2)
    assert lengths.tolist() == [2, 3, 5, 12, 5]  # an id of padding inside a text is a token of it
