"""Every combination of OpenCLIP's towers with readers: its means, variances that learn, weights in both directions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from small_towers import NAMES, inputs, small_folder, small_towers
from torch import Tensor

import prolip
from prolip.models import readers
from prolip.models.checkpoint import CheckpointError, save_pretrained
from prolip.models.readers import Reader, openclip_model

LABELS = 100
#: Image towers that take long.
HEAVY = ("ViTamin-B", "MobileCLIP2-B", "EVA02-B-16", "PE-Core-B-16")
EACH = [pytest.param(name, marks=pytest.mark.slow) if name in HEAVY else name for name in NAMES]


@pytest.fixture(scope="module", params=EACH)
def folder(request, tmp_path_factory):
    """A small model of every combination, in OpenCLIP's format."""
    place = tmp_path_factory.mktemp("small")
    with small_towers(place / "transformers"):
        yield small_folder(request.param, place / request.param)


def openclip(folder: Path):
    """OpenCLIP's own model of a folder."""
    model = openclip_model(json.loads((folder / "open_clip_config.json").read_text())["model_cfg"])
    model.load_state_dict(load_file(folder / "open_clip_model.safetensors"), strict=False)
    return model.eval()


def features(found: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Unit embeddings of what a tower of OpenCLIP's gives."""
    return F.normalize(found[0] if isinstance(found, tuple) else found, dim=-1)


def test_means_are_those_of_openclips_own_model(folder):
    model, theirs = prolip.create_model(f"local-dir:{folder}").eval(), openclip(folder)
    images, texts = inputs(model)
    with torch.no_grad():
        torch.testing.assert_close(model.encode_image(images).mean, features(theirs.visual(images)), rtol=0, atol=1e-5)
        torch.testing.assert_close(model.encode_text(texts).mean, features(theirs.text(texts)), rtol=0, atol=1e-5)
        _, classes = inputs(model, LABELS)
        own, other = model.encode_text(classes).mean, features(theirs.text(classes))
        image = model.encode_image(images).mean
        assert torch.equal((image @ own.T).argsort(1), (image @ other.T).argsort(1))
        cost = 100 * (model.encode_image(images).trace + model.encode_text(texts).trace) / 2
        assert cost.max() < 0.1
    assert model.logit_scale.item() == pytest.approx(theirs.logit_scale.item())


def test_reader_and_towers_get_gradients(folder):
    model = prolip.create_model(f"local-dir:{folder}")
    images, texts = inputs(model)
    image, text = model.encode_image(images), model.encode_text(texts)
    (image.log_var.sum() + text.log_var.sum() + image.mean[:, 0].sum() + text.mean[:, 0].sum()).backward()
    still = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert set(still) <= {"logit_scale", "logit_bias"}


def test_masked_views_see_what_is_kept_and_nothing_else(folder):
    model = prolip.create_model(f"local-dir:{folder}").eval()
    images, _ = inputs(model)
    keep = torch.arange(2).expand(len(images), -1)
    side, width = model.visual.square, model.image_size[1]
    assert width // side >= 2
    other = images.clone()
    other[:, :, side:] = torch.randn_like(other[:, :, side:])  # below the first row of squares
    with torch.no_grad():
        seen = model.encode_image(images, keep=keep)
        assert torch.equal(seen.mean, model.encode_image(other, keep=keep).mean)
        assert not torch.equal(seen.mean, model.encode_image(images).mean)


def test_locked_towers_keep_their_means_bit_for_bit(folder):
    model = prolip.create_model(f"local-dir:{folder}")
    model.lock_image_tower()
    model.lock_text_tower()
    images, texts = inputs(model)
    with torch.no_grad():
        before = model.eval().encode_image(images).mean, model.encode_text(texts).mean
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(8):
        optimizer.zero_grad()
        (model.encode_image(images).log_var.mean() + model.encode_text(texts).log_var.mean()).backward()
        optimizer.step()
    with torch.no_grad():
        after = model.eval().encode_image(images), model.encode_text(texts)
    assert torch.equal(before[0], after[0].mean) and torch.equal(before[1], after[1].mean)
    assert max(z.log_var.mean() for z in after) < model.config["prolip_cfg"]["init_unc_bias"] - 0.5


def test_a_saved_folder_opens_here_and_in_plain_openclip(folder, tmp_path):
    model = prolip.create_model(f"local-dir:{folder}").eval()
    images, texts = inputs(model)
    with torch.no_grad():
        model.text.reader.unc.add_(1.0)
        want = model.encode_image(images), model.encode_text(texts)
        again = prolip.create_model(f"local-dir:{save_pretrained(model, tmp_path / 'saved')}").eval()
        for own, other in zip(want, (again.encode_image(images), again.encode_text(texts))):
            assert torch.equal(own.mean, other.mean) and torch.equal(own.log_var, other.log_var)
        config = tmp_path / "saved/open_clip_config.json"
        if name := model.config["text_cfg"].get("hf_model_name"):  # which OpenCLIP would ask the hub for
            config.write_text(config.read_text().replace(f'"{name}"', f'"{readers.TRANSFORMERS / Path(name).name}"'))
        theirs, _, _ = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'saved'}", pretrained_text=False)
        assert torch.equal(features(theirs.eval().visual(images)), want[0].mean)


def big_vision(model) -> dict[str, np.ndarray]:
    """The weights of a SigLIP of ours under the names and in the shapes of big_vision, whose kernels are (in, out)."""
    trunk, text = model.visual.tower.trunk, model.text.tower
    found = {"b": model.logit_bias.reshape(1), "t": model.logit_scale.reshape(1)}

    def put(place: str, weight: Tensor, bias: Tensor, heads: int = 0) -> None:
        kernel = weight.mT
        if heads > 0:  # (in, heads, width of a head), and what joins heads
            kernel, bias = kernel.unflatten(1, (heads, -1)), bias.view(heads, -1)
        found[f"{place}/kernel"] = kernel.unflatten(0, (-heads, -1)) if heads < 0 else kernel
        found[f"{place}/bias"] = bias

    def norm(place: str, layer) -> None:
        found[f"{place}/scale"], found[f"{place}/bias"] = layer.weight, layer.bias

    def block(place: str, norms, qkv, out, mlp, heads: int) -> None:
        for number, layer in enumerate(norms):
            norm(f"{place}/LayerNorm_{number}", layer)
        for name, (weight, bias) in qkv.items():
            put(f"{place}/MultiHeadDotProductAttention_0/{name}", weight, bias, heads)
        put(f"{place}/MultiHeadDotProductAttention_0/out", out.weight, out.bias, -heads)
        for number, layer in enumerate(mlp):
            put(f"{place}/MlpBlock_0/Dense_{number}", layer.weight, layer.bias)

    def split(weight: Tensor, bias: Tensor, names: tuple[str, ...]) -> dict[str, tuple[Tensor, Tensor]]:
        return dict(zip(names, zip(weight.chunk(len(names)), bias.chunk(len(names)))))

    found["img/embedding/kernel"] = trunk.patch_embed.proj.weight.permute(2, 3, 1, 0)
    found["img/embedding/bias"] = trunk.patch_embed.proj.bias
    found["img/pos_embedding"] = trunk.pos_embed
    three = ("query", "key", "value")
    for i, one in enumerate(trunk.blocks):
        qkv = split(one.attn.qkv.weight, one.attn.qkv.bias, three)
        mlp, place = (one.mlp.fc1, one.mlp.fc2), f"img/Transformer/encoderblock_{i}"
        block(place, (one.norm1, one.norm2), qkv, one.attn.proj, mlp, one.attn.num_heads)
    norm("img/Transformer/encoder_norm", trunk.norm)
    pool = trunk.attn_pool
    found["img/MAPHead_0/probe"] = pool.latent
    qkv = {"query": (pool.q.weight, pool.q.bias)} | split(pool.kv.weight, pool.kv.bias, three[1:])
    block("img/MAPHead_0", (pool.norm,), qkv, pool.proj, (pool.mlp.fc1, pool.mlp.fc2), pool.num_heads)
    found["txt/Embed_0/embedding"] = text.token_embedding.weight
    found["txt/pos_embedding"] = text.positional_embedding[None]
    for i, one in enumerate(text.transformer.resblocks):
        qkv = split(one.attn.in_proj_weight, one.attn.in_proj_bias, three)
        mlp, place = (one.mlp.c_fc, one.mlp.c_proj), f"txt/Encoder_0/encoderblock_{i}"
        block(place, (one.ln_1, one.ln_2), qkv, one.attn.out_proj, mlp, one.attn.num_heads)
    norm("txt/Encoder_0/encoder_norm", text.ln_final)
    put("txt/head", text.text_projection.weight, text.text_projection.bias)
    return {f"params/{name}": value.detach().numpy() for name, value in found.items()}


@pytest.mark.parametrize("width", [48, 200])
def test_a_reader_is_cross_attention_whose_query_is_unc(width):
    reader = Reader(width, 32, -10.0, 1.0)
    tokens, mean = torch.randn(3, 7, width, requires_grad=True), torch.randn(3, 32, requires_grad=True)
    valid = torch.arange(7) < torch.tensor([[7], [3], [1]])

    def plain() -> Tensor:
        kv = torch.cat([reader.mean_kv(mean)[:, None], reader.kv(reader.norm_kv(tokens))], 1)
        key, value = kv.unflatten(2, (2, reader.heads, -1)).permute(2, 0, 3, 1, 4)
        query = reader.q(reader.norm_q(reader.unc)).view(reader.heads, 1, -1).expand(3, -1, -1, -1)
        mask = torch.cat([torch.ones(3, 1, dtype=torch.bool), valid], 1)[:, None, None]
        u = reader.unc + reader.out(F.scaled_dot_product_attention(query, key, value, mask).flatten(1))
        return reader.log_var(reader.norm(u + reader.mlp(reader.norm_mlp(u))))

    got, wanted = reader(tokens, mean, valid), plain()
    torch.testing.assert_close(got, wanted)
    asked = [tokens, mean, *reader.parameters()]
    for one, other in zip(*(torch.autograd.grad(found.square().sum(), asked) for found in (got, wanted))):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(reader(tokens[:1], mean[:1]), got[:1])  # all of its tokens count


def test_siglips_published_archives_load(tmp_path):
    with small_towers(tmp_path / "transformers"):
        folder = small_folder("ViT-B-16-SigLIP", tmp_path / "siglip")
        model = prolip.create_model(f"local-dir:{folder}").eval()
        np.savez(tmp_path / "siglip.npz", **big_vision(model))
        (folder / "open_clip_model.safetensors").unlink()
        again = prolip.create_model(f"local-dir:{folder}", pretrained=str(tmp_path / "siglip.npz")).eval()
        images, texts = inputs(model)
        with torch.no_grad():
            assert torch.equal(again.encode_image(images).mean, model.encode_image(images).mean)
            assert torch.equal(again.encode_text(texts).mean, model.encode_text(texts).mean)
        assert again.logit_bias.item() == model.logit_bias.item()
        np.savez(tmp_path / "other.npz", weights=np.zeros(3))
        with pytest.raises(CheckpointError, match="other.npz is not a big_vision archive .*of the same size"):
            prolip.create_model(f"local-dir:{folder}", pretrained=str(tmp_path / "other.npz"))
