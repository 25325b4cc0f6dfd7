"""The model as the trainer, the losses and the evaluation see it."""

import json

import pytest
import torch

from prolip.factory import create_model
from prolip.gaussian import Gaussian
from prolip.models.prolip import ProLIP, ProLIPOutput


def build(**kwargs):
    torch.manual_seed(0)
    return create_model("ProLIP-ViT-test", **kwargs)


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(3, 3, 32, 32, generator=generator),
        torch.randint(1, 40000, (3, 12), generator=generator),
        torch.rand(3, 16, generator=generator).argsort(1)[:, :4],
    )


def test_encoders_give_gaussians_with_unit_means(model, batch):
    for z in (model.encode_image(batch[0]), model.encode_text(batch[1]), model.encode_image(batch[0], keep=batch[2])):
        assert isinstance(z, Gaussian)
        assert z.mean.shape == z.log_var.shape == (3, model.embed_dim)
        torch.testing.assert_close(z.mean.norm(dim=-1), torch.ones(3))
    raw = model.encode_image(batch[0], normalize=False).mean
    torch.testing.assert_close(raw / raw.norm(dim=-1, keepdim=True), model.encode_image(batch[0]).mean)


def test_forward_gives_both_gaussians_with_scale_and_bias_as_they_enter_the_logit(model, batch):
    output = model(*batch)
    assert isinstance(output, ProLIPOutput)
    torch.testing.assert_close(output.image.mean, model.encode_image(batch[0], keep=batch[2]).mean)
    torch.testing.assert_close(output.scale, torch.tensor(10.0))
    torch.testing.assert_close(output.bias, torch.tensor(-10.0))
    assert model(text=batch[1]).image is None and model(batch[0]).text is None


def test_every_parameter_is_trained(batch):
    model = build()
    image, text, scale, bias = model(*batch[:2])
    total = scale + bias
    for z in (image, text):
        total = total + (z.mean[:, :3].sum() + z.log_var.sum())
    total.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


def test_uint8_images_are_normalised_by_the_model(model):
    raw = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(model.visual.preprocess_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    torch.testing.assert_close(model.encode_image(raw), model.encode_image((raw.float() / 255 - mean) / std))


def test_the_configuration_recreates_the_model(batch):
    model = build(mask_padding=True, init_unc_bias=-4.0, init_logit_bias=-2.5)
    config = json.loads(json.dumps(model.config))
    again = ProLIP(config)
    assert again.config == model.config
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(*batch[:2]), model(*batch[:2]))
    assert again.text.mask_padding and again.logit_bias.item() == -2.5
    assert again.text.text_uncertainty_projection.bias[0].item() == -4.0


def test_a_twin_of_a_bare_model_has_its_statistics_and_no_values(batch):
    bare = ProLIP(create_model("ProLIP-ViT-test").config)
    bare.set_pixel_statistics((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    other = bare.twin()
    assert torch.equal(other.pixel_mean, bare.pixel_mean) and other.pixel_std.flatten().tolist() != [1, 1, 1]
    assert other.pixel_mean.data_ptr() != bare.pixel_mean.data_ptr()
    other.load_state_dict(bare.state_dict())
    raw = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(other.encode_image(raw).mean, bare.encode_image(raw).mean)


def test_no_weight_decay_names_exist_and_cover_tokens_positions_and_scalars(model):
    names = dict(model.named_parameters())
    image = {f"visual.{name}" for name in ("positional_embedding", "class_embedding", "unc_embedding")}
    text = {f"text.{name}" for name in ("positional_embedding", "cls_emb", "unc_emb")}
    assert model.no_weight_decay() == image | text | {"logit_scale", "logit_bias"}
    assert model.no_weight_decay() <= set(names)


def test_uncertainty_parameters_are_the_unc_tokens_and_heads(model):
    ours = {id(parameter) for parameter in model.uncertainty_parameters()}
    heads = ("visual.uncertainty_proj", "text.text_uncertainty_projection")
    wanted = {f"{head}.{part}" for head in heads for part in ("weight", "bias")}
    wanted |= {"visual.unc_embedding", "text.unc_emb"}
    assert {name for name, parameter in model.named_parameters() if id(parameter) in ours} == wanted
    assert len(model.uncertainty_parameters()) == 6


def test_locking_one_tower_leaves_the_other():
    model = build()
    model.lock_image_tower()
    assert not any(p.requires_grad for p in model.visual.parameters())
    assert all(p.requires_grad for p in model.text.parameters())
    model.lock_text_tower(1)
    assert not model.text.token_embedding.weight.requires_grad and model.text.unc_emb.requires_grad


@pytest.mark.parametrize("precision", ["bf16", "fp16", "pure_bf16", "pure_fp16"])
def test_low_precision_keeps_norms_heads_and_scale_in_float32(precision, batch):
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16
    exact, low = build(), build(precision=precision)
    dtypes = {name: p.dtype for name, p in low.named_parameters()}
    assert dtypes["visual.transformer.resblocks.0.mlp.c_fc.weight"] == dtype
    assert dtypes["text.transformer.resblocks.0.attn.in_proj_weight"] == dtype
    assert dtypes["visual.conv1.weight"] == dtype
    kept = ["logit_scale", "logit_bias", "visual.proj", "visual.uncertainty_proj.weight", "visual.ln_post.weight"]
    kept += ["text.text_projection.weight", "text.text_uncertainty_projection.bias"]
    for name in [*kept, "visual.transformer.resblocks.0.ln_1.bias"]:
        assert dtypes[name] == torch.float32, name
    embedding = dtype if precision.startswith("pure") else torch.float32
    assert dtypes["text.token_embedding.weight"] == dtypes["visual.positional_embedding"] == embedding
    with torch.no_grad():
        for z, w in zip(low.eval()(*batch)[:2], exact.eval()(*batch)[:2]):
            assert z.mean.dtype == z.log_var.dtype == torch.float32
            assert (z.mean * w.mean).sum(-1).min() > 0.995
            torch.testing.assert_close(z.log_var, w.log_var, atol=0.05, rtol=0)


def test_autocast_gives_float32_gaussians_and_gradients(batch):
    model = build(precision="amp_bf16")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        image, text, *_ = model(*batch)
    assert {t.dtype for z in (image, text) for t in z} == {torch.float32}
    (image.mean @ text.mean.t()).sum().backward()
    assert model.visual.conv1.weight.grad.isfinite().all()


def test_the_model_is_one_graph_for_the_compiler(batch):
    model = build()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*batch), model(*batch))
