"""Weights in and out: strict both ways, every layout that is promised, and special rows that survive a resize."""

import json
import math
from pathlib import Path

import open_clip
import pytest
import torch
from safetensors.torch import load_file

import prolip
from prolip.models import checkpoint
from prolip.models.checkpoint import (
    CheckpointError,
    load_checkpoint,
    read_state_dict,
    resize_image_positions,
    resize_text_positions,
    save_pretrained,
)
from prolip.models.registry import get_model_config

CONVERTED = Path(__file__).parents[2] / "fixtures" / "converted_clip_tiny"
OPENCLIP = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16},
    "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


def build(seed=0, **kwargs):
    torch.manual_seed(seed)
    return prolip.create_model("ProLIP-ViT-test", **kwargs)


def same(a, b):
    return all(torch.equal(value, b[key]) for key, value in a.items()) and a.keys() == b.keys()


def openclip(kind, seed=7, **text):
    torch.manual_seed(seed)
    config = {**OPENCLIP, "text_cfg": OPENCLIP["text_cfg"] | text}
    return (open_clip.CLIP if kind == "plain" else open_clip.CustomTextCLIP)(**config)


# --- round trips ------------------------------------------------------------------------------------------------------


def test_a_saved_folder_gives_the_same_model(tmp_path):
    model = build(init_unc_bias=-7.0, mask_padding=True, force_preprocess_cfg={"mean": (0.1, 0.2, 0.3)})
    save_pretrained(model, tmp_path / "new" / "folder")
    again, _, val = prolip.create_model_and_transforms(f"local-dir:{tmp_path}/new/folder")
    assert same(model.state_dict(), again.state_dict())
    assert again.config == model.config and again.text.mask_padding
    assert list(again.visual.preprocess_cfg["mean"]) == [0.1, 0.2, 0.3] and "0.1" in repr(val)
    written = json.loads((tmp_path / "new/folder/config.json").read_text())
    assert set(written) == {"model_cfg", "preprocess_cfg"}
    assert sorted(p.name for p in (tmp_path / "new/folder").iterdir()) == ["config.json", "model.safetensors"]


def test_an_interrupted_save_leaves_the_old_folder_whole(tmp_path, monkeypatch):
    old = build()
    save_pretrained(old, tmp_path)

    def killed(tensors, path, **kwargs):
        path.write_bytes(b"half a file")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(build(seed=1), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert same(prolip.create_model(f"local-dir:{tmp_path}").state_dict(), old.state_dict())


def test_a_folder_whose_other_configuration_would_be_read_instead_is_refused(tmp_path):
    (tmp_path / "open_clip_config.json").write_text("{}")
    with pytest.raises(ValueError, match="open_clip_config.json belongs to another model: give another folder"):
        save_pretrained(build(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["open_clip_config.json"]


def test_files_of_a_former_tokenizer_go_with_another_and_all_other_files_stay(tmp_path):
    for name in ("tokenizer.json", "notes.txt"):
        (tmp_path / name).write_text("old")
    save_pretrained(build(), tmp_path)
    assert (tmp_path / "tokenizer.json").exists()
    save_pretrained(build(), tmp_path, tokenizer=prolip.get_tokenizer("ProLIP-ViT-test"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors", "notes.txt"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: s,
        lambda s: {"state_dict": s, "epoch": 3, "name": "run"},
        lambda s: {"model": s, "optimizer": {"lr": 0.1}},
        lambda s: {"state_dict": {f"module.{k}": v for k, v in s.items()}},
        lambda s: {"state_dict": {f"module._orig_mod.{k}": v for k, v in s.items()}},
        lambda s: {"model": {f"module.model.{k}": v for k, v in s.items()}},
    ],
    ids=["bare", "state_dict", "model", "ddp", "compiled", "objective"],
)
def test_checkpoints_of_training_are_unwrapped(tmp_path, wrap):
    model = build()
    torch.save(wrap(model.state_dict()), tmp_path / "epoch_3.pt")
    assert same(build(seed=1, pretrained=str(tmp_path / "epoch_3.pt")).state_dict(), model.state_dict())
    report = load_checkpoint(build(seed=1), wrap(model.state_dict()))
    assert report == ((), ())


def test_a_checkpoint_that_training_wrote_may_be_given_as_pretrained(tmp_path):
    """An interrupted run has no other file to start another method, data or schedule from."""
    from training.main import main

    flags = "--model ProLIP-ViT-test --dataset-type synthetic --train-num-samples 8 --batch-size 4 --epochs 1"
    flags += " --warmup 1 --precision fp32 --workers 0 --output"
    assert main([*flags.split(), str(tmp_path)]) == 0
    (run,) = tmp_path.iterdir()
    (written,) = (run / "checkpoints").glob("*.pt")
    trained = prolip.create_model(f"local-dir:{run}/model").state_dict()
    assert not torch.equal(trained["visual.proj"], build().state_dict()["visual.proj"])
    assert same(build(seed=1, pretrained=str(written)).state_dict(), trained)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_every_mismatch_is_reported_from_both_sides_and_nothing_is_loaded():
    model, state = build(), build(seed=1).state_dict()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state["visual.proj2"] = state.pop("visual.proj")
    state["text.ln_final.weight"] = torch.ones(48)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(model, state)
    for part in (
        "only in the model (1): visual.proj",
        "only in the checkpoint (1): visual.proj2",
        "text.ln_final.weight: checkpoint (48,), model (32,)",
        "local-dir:<folder>",
    ):
        assert part in str(caught.value)
    assert same(before, model.state_dict())


# --- OpenCLIP's weights -----------------------------------------------------------------------------------------------


def bare(folder, **changes):
    """A folder with OpenCLIP's configuration and no weights, as the name of a model."""
    folder.mkdir(exist_ok=True)
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": OPENCLIP | changes}))
    return f"local-dir:{folder}"


@pytest.mark.parametrize("kind", ["plain", "custom"])
def test_openclips_weights_fill_all_of_its_architecture_but_readers_and_bias(kind, tmp_path):
    source = openclip(kind)
    torch.save({"state_dict": source.state_dict()}, tmp_path / "clip.pt")
    model = prolip.create_model(bare(tmp_path / "bare"), load_weights=False)
    report = load_checkpoint(model, tmp_path / "clip.pt")
    own = {name for name in model.state_dict() if name.startswith(("visual.reader.", "text.reader."))}
    assert set(report.kept) == own | {"logit_bias"} and own
    images, texts = torch.randn(2, 3, 32, 32), torch.randint(1, 49408, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(model.encode_image(images).mean, source.encode_image(images, normalize=True))
        torch.testing.assert_close(model.encode_text(texts).mean, source.encode_text(texts, normalize=True))
    assert model.logit_scale.item() == source.logit_scale.item()


@pytest.mark.parametrize("kind", ["plain", "custom"])
def test_openclips_weights_for_an_architecture_of_ours_are_refused_with_what_to_type(kind):
    with pytest.raises(CheckpointError, match="OpenCLIP's weights.*--model ViT-B-16 --pretrained FILE"):
        load_checkpoint(build(), openclip(kind).state_dict())
    timm = {f"visual.trunk.{i}": torch.zeros(1) for i in range(3)} | {"text.cls_emb": torch.zeros(32)}
    with pytest.raises(CheckpointError, match="--model ViT-B-16 --pretrained FILE"):
        load_checkpoint(build(), timm)


def test_weights_of_another_activation_are_refused_unless_it_was_asked_for(tmp_path):
    """OpenAI's models have QuickGELU, OpenCLIP's GELU; a neighbouring config.json of another program says nothing."""
    torch.save(openclip("plain").state_dict(), tmp_path / "clip.pt")
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": OPENCLIP | {"quick_gelu": True}}))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["CLIPModel"], "quick_gelu": False}))
    name, options = bare(tmp_path / "bare"), {"pretrained": str(tmp_path / "clip.pt")}
    with pytest.raises(ValueError, match="quick_gelu=True, but the model has quick_gelu=False.*give quick_gelu=True"):
        prolip.create_model(name, **options)
    assert prolip.create_model(name, quick_gelu=True, **options).config["quick_gelu"]
    assert not prolip.create_model(name, quick_gelu=False, **options).config["quick_gelu"]
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": OPENCLIP}))
    assert prolip.create_model(name, force_quick_gelu=True, **options).config["quick_gelu"]


@pytest.mark.parametrize(
    "name, tag, quick",
    [
        ("ViT-B-16", "openai", True),
        ("ViT-B-16-quickgelu", "openai", True),
        ("ViT-B-16", "laion2b_s34b_b88k", False),
        ("ViT-B-16", None, False),
        ("roberta-ViT-B-32", "laion2b_s12b_b32k", True),
    ],
)
def test_a_tag_brings_the_activation_that_its_weights_were_trained_with(name, tag, quick):
    """OpenCLIP warns of the mismatch for ViT-B-16 and openai, and computes with GELU."""
    assert get_model_config(name, tag=tag)[0]["quick_gelu"] == quick


@pytest.mark.filterwarnings("ignore")  # torch calls TorchScript deprecated
def test_a_torchscript_archive_is_refused_with_what_to_do_and_then_read(tmp_path):
    """OpenAI's weights came as such archives, with sizes among the tensors; OpenCLIP's hold the causal mask as well."""
    source = openclip("plain").eval()
    inputs = {"encode_image": torch.zeros(1, 3, 32, 32), "encode_text": torch.ones(1, 12, dtype=torch.int64)}
    torch.jit.trace_module(source, inputs, check_trace=False).save(str(tmp_path / "clip.pt"))
    with pytest.raises(CheckpointError, match="clip.pt is a TorchScript archive.*weights_only=False"):
        read_state_dict(tmp_path / "clip.pt")
    sizes = {name: torch.tensor(32) for name in ("input_resolution", "context_length", "vocab_size")}
    torch.save(torch.jit.load(str(tmp_path / "clip.pt")).state_dict() | sizes, tmp_path / "plain.pt")
    for name, trusting in (("clip.pt", {"weights_only": False}), ("plain.pt", {})):
        model = prolip.create_model(bare(tmp_path / "bare"), pretrained=str(tmp_path / name), **trusting)
        assert torch.equal(model.visual.tower.proj, source.visual.proj)


def test_a_model_that_was_made_from_clips_weights_for_our_towers_still_loads():
    """A small one, as `--init-uncertainty` of 401ed6ca made and saved it, with what it gave for images and texts."""
    model, stored = prolip.create_model(f"local-dir:{CONVERTED}").eval(), load_file(CONVERTED / "model.safetensors")
    assert same(model.state_dict(), stored) and model.config["prolip_cfg"]["forward"] == "paper"
    assert model.visual.preprocess_cfg["resize_mode"] == "squash" and model.mask_token_id == 48
    given = load_file(CONVERTED / "embeddings.safetensors")
    with torch.no_grad():
        for side in ("image", "text"):
            z = getattr(model, f"encode_{side}")(given[side])
            torch.testing.assert_close(z.mean, given[f"{side}_mean"], rtol=0, atol=1e-6)
            torch.testing.assert_close(z.log_var, given[f"{side}_log_var"], rtol=0, atol=1e-5)


# --- resizing ---------------------------------------------------------------------------------------------------------


def test_another_image_size_interpolates_the_grid_as_openclip_does():
    source = openclip("plain").state_dict()
    positions = source["visual.positional_embedding"].clone()
    torch.manual_seed(0)
    config = {**OPENCLIP, "vision_cfg": OPENCLIP["vision_cfg"] | {"image_size": 48}}
    open_clip.model.resize_pos_embed(source, open_clip.CLIP(**config))
    resized = resize_image_positions(torch.cat([positions[:1], positions]), (6, 6))
    torch.testing.assert_close(resized[2:], source["visual.positional_embedding"][1:])


@pytest.mark.parametrize("size, grid", [((64, 32), (8, 4)), (32, (4, 4)), ((16, 64), (2, 8)), ((32, 64), (4, 8))])
def test_a_grid_that_is_not_square_is_read_as_its_own_configuration_says(tmp_path, size, grid):
    """Also where the new one has as many patches: 4 x 8 positions are not 8 x 4, nor 2 x 16."""
    wide = build(force_image_size=(32, 64))
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(8.0), indexing="ij")
    with torch.no_grad():
        wide.visual.positional_embedding[2:, 0], wide.visual.positional_embedding[2:, 1] = rows.ravel(), columns.ravel()
    save_pretrained(wide, tmp_path)
    old = wide.visual.positional_embedding.detach()
    for options in (
        {"model_name": f"local-dir:{tmp_path}"},
        {"model_name": "ProLIP-ViT-test", "pretrained": str(tmp_path / "model.safetensors")},
    ):
        new = prolip.create_model(force_image_size=size, **options).visual.positional_embedding.detach()
        assert torch.equal(new[:2], old[:2]) and len(new) == 2 + grid[0] * grid[1]
        new_rows, new_columns = new[2:, 0].reshape(grid), new[2:, 1].reshape(grid)
        assert new_rows.std(1).max() < 1e-4 and new_columns.std(0).max() < 1e-4  # rows stay rows
        assert new_rows[-1, 0] - new_rows[0, 0] > 1.5 and new_columns[0, -1] - new_columns[0, 0] > 5
        assert torch.equal(new, old) is (grid == (4, 8))


def test_a_long_context_keeps_the_first_20_and_the_last_2_and_stretches_the_44_between():
    old = torch.arange(66.0)[:, None] * torch.tensor([1.0, -2.0])
    new = resize_text_positions(old, 256)
    assert new.shape == (258, 2)
    assert torch.equal(new[:20], old[:20]) and torch.equal(new[-2:], old[-2:])
    between = new[20:256, 0]
    torch.testing.assert_close(between, torch.linspace(20, 63, 236))  # a linear ramp stays one, with both ends


def test_loading_resizes_and_reports(tmp_path):
    model = build()
    save_pretrained(model, tmp_path)
    again = prolip.create_model(f"local-dir:{tmp_path}", force_image_size=64, force_context_length=40)
    assert again.num_patches == 64 and again.context_length == 40
    assert torch.equal(again.visual.positional_embedding[:2], model.visual.positional_embedding[:2])
    assert torch.equal(again.text.positional_embedding[-2:], model.text.positional_embedding[-2:])
    assert torch.equal(again.text.positional_embedding[:4], model.text.positional_embedding[:4])
    assert again.visual.preprocess_cfg["size"] == (64, 64)
    z = again.encode_image(torch.randn(1, 3, 64, 64))
    assert z.mean.isfinite().all()
    report = load_checkpoint(build(force_image_size=64), model.state_dict())
    assert report.resized == ("visual.positional_embedding from 18 to 66 rows",)


def test_the_long_model_loads_the_short_ones_weights_on_released_layout():
    with torch.device("meta"):
        short, long = (
            prolip.models.prolip.ProLIP(prolip.models.registry.get_model_config(name)[0])
            for name in ("ProLIP-ViT-B-16", "ProLIP-ViT-B-16-long")
        )
    state = {key: value for key, value in short.state_dict().items() if key == "text.positional_embedding"}
    state["text.positional_embedding"] = torch.randn(66, 768)
    checkpoint.fit_positions(state, long.state_dict(), None, long.visual.grid_size, long.context_length)
    assert state["text.positional_embedding"].shape == long.text.positional_embedding.shape == (258, 768)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["logit_scale", "visual.ln_post.weight", "text.token_embedding.weight"])
def test_weights_of_a_training_that_diverged_are_refused(name, value):
    model = prolip.create_model("ProLIP-ViT-test")
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    state[name].view(-1)[-1] = value
    with pytest.raises(CheckpointError, match=rf"NaN or infinite values in 1 of \d+ tensors \({name}\): .* earlier"):
        load_checkpoint(model, state)


@pytest.mark.parametrize("method", ["pcme", "pcmepp"])
def test_scale_and_bias_of_another_method_do_not_replace_a_methods_own_start(method):
    siglip = prolip.create_model("ProLIP-ViT-test", method_cfg={"name": "siglip"}, init_logit_bias=-7.0)
    own = prolip.create_model("ProLIP-ViT-test", method_cfg={"name": method}, init_logit_bias=-5.0)
    start = own.logit_scale.item(), own.logit_bias.item()
    load_checkpoint(own, siglip.state_dict())
    assert (own.logit_scale.item(), own.logit_bias.item()) == start
    assert torch.equal(own.visual.class_embedding, siglip.visual.class_embedding)
    trained = {name: x + 1 for name, x in own.state_dict().items()}
    load_checkpoint(own, trained)
    assert own.logit_bias.item() == start[1] + 1
    clip = prolip.create_model("ProLIP-ViT-test", method_cfg={"name": "clip"})
    load_checkpoint(clip, siglip.state_dict())
    assert clip.logit_bias.item() == -7.0


@pytest.mark.parametrize("method", ["pcme", "pcmepp", "vacsr"])
def test_means_of_another_method_are_what_pooled_heads_begin_with(method):
    given = build(method_cfg={"name": "siglip"})
    own = prolip.create_model("ProLIP-ViT-test", method_cfg={"name": method})
    with torch.no_grad():
        for tower in (given.visual, given.text):
            for parameter in tower.parameters():
                parameter.normal_()
    load_checkpoint(own, given.state_dict())
    x = torch.randn(3, 4, 32)
    wanted = own.visual.ln_post(x) @ own.visual.proj, own.text.text_projection(own.text.ln_final(x))
    for tower, want in zip((own.visual, own.text), wanted):
        head = tower.head
        norm, projection = (
            (head.norm, head.projection)
            if method == "vacsr"
            else (head.norms["mean"], (head.globals if method == "pcme" else head.projections)["mean"])
        )
        torch.testing.assert_close(projection(norm(x)), want, rtol=1e-3, atol=1e-3)  # the norms' eps differ
    trained = {name: x + 1 for name, x in own.state_dict().items()}
    load_checkpoint(own, trained)
    assert all(torch.equal(x, trained[name]) for name, x in own.state_dict().items())


@pytest.mark.parametrize("value", [1e4, -1e4, 21])
def test_a_scale_whose_exponential_is_no_scale_is_refused(value):
    model = prolip.create_model("ProLIP-ViT-test")
    with pytest.raises(CheckpointError, match="logit_scale of"):
        load_checkpoint(model, model.state_dict() | {"logit_scale": torch.tensor(float(value))})


def test_a_bank_that_no_memory_holds_is_refused():
    with pytest.raises(ValueError, match="--bank 1000000000000: give .* at most"):
        prolip.create_model("ProLIP-ViT-test", method_cfg={"name": "likelihood", "config": {"bank": 10**12}})
