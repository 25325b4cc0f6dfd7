"""create_model and its relatives, and OpenCLIP's names: every name builds, and wrong options get the remedy."""

import inspect
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import open_clip
import pytest
import torch
from open_clip.transform import AugmentationCfg
from PIL import Image

import prolip
from prolip import factory, measures
from prolip.gaussian import Gaussian, mixture
from prolip.models import registry as hub
from prolip.models.checkpoint import save_pretrained
from prolip.models.prolip import ProLIP
from prolip.models.registry import own_models

NAMES = [f"ProLIP-ViT-{size}" for size in ("B-16", "B-16-long", "H-14", "L-16", "S-16", "SO400M-14", "test", "XS-16")]
TWO_TEMPLATES = ("a photo of a {}.", lambda name: f"art of {name}.")
CLASSES = ["cat", "dog", "red panda"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return prolip.create_model("ProLIP-ViT-test").eval()


@pytest.fixture(scope="module")
def tokenizer():
    return prolip.get_tokenizer("ProLIP-ViT-test")


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_builds(name):
    config, _ = factory.get_model_config(name)
    with torch.device("meta"):
        model = ProLIP(config)
    size, patch = config["vision_cfg"]["image_size"], config["vision_cfg"]["patch_size"]
    assert size % patch == 0 and model.num_patches == (size // patch) ** 2
    assert model.visual.positional_embedding.shape[0] == model.num_patches + 2
    assert model.text.positional_embedding.shape[0] == model.context_length + 2
    heads = model.visual.transformer.resblocks[0].attn.num_heads
    assert config["vision_cfg"]["width"] // config["vision_cfg"]["head_width"] == heads
    assert config["prolip_cfg"]["forward"] == "paper" and not config["prolip_cfg"]["mask_padding"]
    assert model.mask_token_id is not None and model.mask_token_id not in (model.pad_token_id, *model.special_token_ids)


def test_a_new_model_has_the_papers_scale_bias_and_variances():
    model = prolip.create_model("ProLIP-ViT-XS-16").eval()
    with torch.no_grad():
        image, text, scale, bias = model(torch.randn(1, 3, *model.visual.image_size), torch.zeros(1, 12).long())
    assert image.mean.shape == text.mean.shape == (1, model.embed_dim)
    assert (scale.item(), bias.item()) == (pytest.approx(10), -10)
    assert image.trace.item() == pytest.approx(model.embed_dim * 4.54e-5, rel=0.1)


@pytest.mark.parametrize(
    "name, near",
    [("ProLIP-ViT-B16", "ProLIP-ViT-B-16"), ("prolip-vit-xs-16", "ProLIP-ViT-XS-16"), ("ViT-B-61", "ViT-B-16")],
)
def test_an_unknown_name_lists_the_near_ones(name, near):
    with pytest.raises(ValueError, match=f"unknown model '{name}': did you mean .*{near}"):
        prolip.create_model(name)


@pytest.mark.parametrize(
    "kwargs, error, message",
    [
        ({"precision": "fp8"}, ValueError, "precision is 'fp8': did you mean"),
        ({"mask_paddin": True}, TypeError, "no option 'mask_paddin': did you mean mask_padding"),
        ({"pretrained": "laion2b"}, FileNotFoundError, "'laion2b' does not exist: give a weights file"),
        ({"require_pretrained": True}, ValueError, "no weights for ProLIP-ViT-test"),
        ({"forward": "papr"}, ValueError, "it should be 'paper', 'released' or 'reader'"),
        ({"mask_token_id": 50000}, ValueError, "has token id 50000, but text_cfg.vocab_size is 49409"),
        ({"vision_cfg": {"widht": 3}}, ValueError, "unknown key 'widht' in vision_cfg: did you mean width"),
        ({"text_cfg": {"hf_model_name": "roberta"}}, ValueError, "text_cfg.hf_model_name is not supported"),
        ({"text_cfg": {"pad_id": 7}}, ValueError, "text_cfg.pad_id is 7, but prolip_cfg.pad_token_id 0"),
        ({"vision_cfg": {"head_width": 5}}, ValueError, "width 32 is not a multiple of head_width 5"),
        ({"text_cfg": {"heads": 5}}, ValueError, "text_cfg.width 32 is not a multiple of heads 5"),
        ({"vision_cfg": {"timm_model_name": "resnet50"}}, ValueError, "vision_cfg.timm_model_name is not supported"),
        ({"vision_cfg": {"layers": [3, 4, 6, 3]}}, ValueError, r"vision_cfg.layers is \[3, 4, 6, 3\], for a ResNet"),
        ({"vision_cfg": {"pos_embed_type": "rope"}}, ValueError, "'rope': it should be 'learnable' or 'sin_cos_2d'"),
        ({"text_cfg": {"scaled_cosine_attn": True}}, ValueError, "text_cfg.scaled_cosine_attn is not supported"),
        ({"force_image_size": 0}, ValueError, "vision_cfg.image_size is 0: it should be greater than or equal to 1"),
        ({"force_image_size": (32, 0)}, ValueError, "vision_cfg.image_size is .32, 0.: it should be greater"),
        ({"force_image_size": (32, 32, 3)}, ValueError, "it should have at most 2 items"),
        ({"force_context_length": -1}, ValueError, "text_cfg.context_length is -1: it should be greater"),
        ({"embed_dim": "32"}, ValueError, "embed_dim is '32': it should be a valid integer"),
        ({"vision_cfg": {"patch_size": 64}}, ValueError, "image_size 32 is below the patch_size 64"),
        ({"text_cfg": {"vocab_size": None}}, ValueError, "text_cfg.vocab_size is None"),
        ({"mask_padding": "false"}, ValueError, "prolip_cfg.mask_padding is 'false': it should be a valid boolean"),
        ({"init_unc_bias": None}, ValueError, "prolip_cfg.init_unc_bias is None: it should be a valid number"),
        ({"pad_token_id": None}, ValueError, "prolip_cfg.pad_token_id is None: it should be a valid integer"),
        ({"special_token_ids": 5}, ValueError, "prolip_cfg.special_token_ids is 5: it should be a valid tuple"),
        ({"mask_token_id": 0}, ValueError, "mask_token_id 0 is also padding or special"),
        ({"init_logit_bias": []}, ValueError, r"init_logit_bias is \[\]: it should be a valid number"),
        ({"jit": True}, ValueError, "jit=True is only for OpenCLIP. Remove it; .*torch.compile"),
        ({"force_patch_dropout": 0.5}, ValueError, "force_patch_dropout=0.5 .*keep="),
        ({"pretrained_image_path": "vit.pt"}, ValueError, "pretrained_image_path='vit.pt' .*pretrained=<file>"),
    ],
)
def test_wrong_options_are_refused_with_the_remedy(kwargs, error, message):
    with pytest.raises(error, match=message):
        prolip.create_model("ProLIP-ViT-test", **kwargs)


@pytest.mark.parametrize("name", ["create_model", "create_model_and_transforms"])
def test_every_option_of_openclips_is_taken_at_its_default(name):
    """What is written for OpenCLIP's factory names them all: its own training program does."""
    options = {
        key: parameter.default
        for key, parameter in inspect.signature(getattr(open_clip, name)).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD and key != "model_name"
    }
    assert {"jit", "force_custom_text", "pretrained_text", "output_dict"} <= set(options)
    made = getattr(prolip, name)("ProLIP-ViT-test", **options)
    assert (made if name == "create_model" else made[0]).embed_dim == 32


def test_options_reach_the_model():
    model = prolip.create_model(
        "ProLIP-ViT-test",
        force_image_size=(16, 48),
        force_context_length=20,
        force_quick_gelu=True,
        mask_padding=True,
        init_logit_scale=3.0,
        vision_cfg={"layers": 1},
    )
    assert model.visual.image_size == (16, 48) and model.num_patches == 2 * 6
    assert model.context_length == 20 and model.text.mask_padding
    assert model.logit_scale.item() == 3.0 and len(model.visual.transformer.resblocks) == 1
    assert type(model.visual.transformer.resblocks[0].mlp.gelu).__name__ == "QuickGELU"
    assert model.config["vision_cfg"]["image_size"] == (16, 48)
    zero = prolip.create_model("ProLIP-ViT-test", init_logit_scale=0, init_logit_bias=0)
    assert zero.logit_scale.item() == zero.logit_bias.item() == 0.0
    tanh = prolip.create_model("ProLIP-ViT-test", text_cfg={"act_kwargs": {"approximate": "tanh"}})
    assert tanh.text.transformer.resblocks[0].mlp.gelu.approximate == "tanh"
    assert tanh.visual.transformer.resblocks[0].mlp.gelu.approximate == "none"


# OpenCLIP calls the jitter of its own pipeline unused although it applies it.
@pytest.mark.filterwarnings("ignore:Unused augmentation cfg items")
def test_transforms_are_openclips_for_the_models_size():
    jitter = {"color_jitter": (0.32, 0.32, 0.32, 0.08), "color_jitter_prob": 0.8, "gray_scale_prob": 0.2}
    options = {"image_mean": (0.0,) * 3, "image_std": (1.0,) * 3, "aug_cfg": {"scale": (0.8, 1.0)} | jitter}
    model, train, val = prolip.create_model_and_transforms("ProLIP-ViT-test", **options)
    picture = Image.new("RGB", (90, 70), (255, 0, 51))
    assert train(picture).shape == (3, 32, 32)
    torch.testing.assert_close(val(picture).mean((1, 2)), torch.tensor([1.0, 0.0, 0.2]))
    assert all(step in repr(train) and step not in repr(val) for step in ("color_jitter", "gray_scale"))
    assert tuple(model.visual.preprocess_cfg["mean"]) == (0.0, 0.0, 0.0)
    _, train, _ = prolip.create_model_and_transforms("ProLIP-ViT-test", aug_cfg=AugmentationCfg(scale=(0.5, 0.6)))
    assert "scale=(0.5, 0.6)" in repr(train)


def test_a_folder_with_a_configuration_alone_takes_weights_from_elsewhere(tmp_path):
    source = prolip.create_model("ProLIP-ViT-test")
    save_pretrained(source, tmp_path / "weights")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text((tmp_path / "weights" / "config.json").read_text())
    weights = tmp_path / "weights"
    for pretrained in (weights, str(weights), f"local-dir:{weights}", weights / "model.safetensors"):
        made = prolip.create_model(f"local-dir:{tmp_path}/own", pretrained=pretrained)
        assert torch.equal(made.visual.proj, source.visual.proj)
    with pytest.raises(ValueError, match="would be ignored: remove one"):
        prolip.create_model(f"local-dir:{weights}", pretrained=str(weights))


def test_a_hub_name_may_be_given_as_pretrained_and_openclips_file_comes_before_its_neighbour(monkeypatch, tmp_path):
    """Published OpenCLIP models have model.safetensors too: the weights of a transformers model."""
    from safetensors.torch import save_file

    monkeypatch.setattr(hub, "reachable", lambda: pytest.fail("asked for the network"))
    snapshot = tmp_path / "models--org--clip" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--clip" / "refs").mkdir()
    (tmp_path / "models--org--clip" / "refs" / "main").write_text("abc")
    source = prolip.create_model("ProLIP-ViT-test")
    save_file(source.state_dict(), snapshot / "open_clip_model.safetensors")
    save_file({"vision_model.embeddings": torch.zeros(1)}, snapshot / "model.safetensors")
    (snapshot / "open_clip_config.json").write_text(json.dumps({"model_cfg": source.config}))
    (snapshot / "config.json").write_text(json.dumps({"architectures": ["CLIPModel"]}))
    made = prolip.create_model("ProLIP-ViT-test", pretrained="hf-hub:org/clip", cache_dir=str(tmp_path))
    assert torch.equal(made.visual.proj, source.visual.proj)


def test_a_local_folder_that_is_incomplete_says_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist: local-dir: needs a folder with config.json"):
        prolip.create_model(f"local-dir:{tmp_path}/absent")
    with pytest.raises(FileNotFoundError, match="no configuration in .*found nothing"):
        prolip.create_model(f"local-dir:{tmp_path}")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        prolip.create_model(f"local-dir:{tmp_path}")
    (tmp_path / "config.json").write_text(json.dumps(factory.get_model_config("ProLIP-ViT-test")[0]))
    with pytest.raises(FileNotFoundError, match="no weights in .*expected one of model.safetensors.*found config.json"):
        prolip.create_model(f"local-dir:{tmp_path}")
    assert prolip.create_model(f"local-dir:{tmp_path}", load_weights=False).embed_dim == 32


def test_a_folder_of_openclips_format_without_weights_asks_for_them(tmp_path):
    config = {"embed_dim": 32, "vision_cfg": {"width": 64, "layers": 1}, "text_cfg": {"width": 32, "layers": 1}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    with pytest.raises(FileNotFoundError, match="no weights in .*expected one of .*open_clip_model.safetensors"):
        prolip.create_model(f"local-dir:{tmp_path}")
    assert prolip.create_model(f"local-dir:{tmp_path}", load_weights=False).config["prolip_cfg"]["forward"] == "reader"
    with pytest.raises(ValueError, match="prolip_cfg.conv_stem needs ProLIP's own towers: remove it, or set forward"):
        prolip.create_model(f"local-dir:{tmp_path}", load_weights=False, conv_stem=True)
    config["vision_cfg"]["head_width"] = 48
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    with pytest.raises(ValueError, match="vision_cfg.width 64 is not a multiple of head_width 48: change one"):
        prolip.create_model(f"local-dir:{tmp_path}", load_weights=False)


@pytest.mark.parametrize("code, answers", [(200, True), (404, True), (429, True), (503, False)])
def test_a_hub_in_trouble_is_not_asked_for_files(monkeypatch, code, answers):
    """Its client would try again for minutes; what the hub refuses, it can say itself."""

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(code)
            self.end_headers()

        def log_message(self, *args):
            pass

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert hub.reachable() is answers


@pytest.mark.parametrize("aug_cfg", [{"scale": "x"}, {"scale": 3}, {"scale": (0.5,)}, {"nope": 1}, 5])
def test_augmentations_that_are_none_are_refused(aug_cfg):
    with pytest.raises(ValueError, match="aug_cfg .* is invalid .*give e.g. .'scale'"):
        prolip.create_model_and_transforms("ProLIP-ViT-test", aug_cfg=aug_cfg)


# --- OpenCLIP's names ---
def test_create_model_from_pretrained_loads_weights_or_says_that_there_are_none(model, tmp_path):
    save_pretrained(model, tmp_path)
    made, preprocess = prolip.create_model_from_pretrained(f"local-dir:{tmp_path}", image_mean=(0.5, 0.5, 0.5))
    torch.testing.assert_close(made.state_dict(), model.state_dict())
    assert preprocess.transforms[-1].mean == (0.5, 0.5, 0.5)
    weights = str(tmp_path / "model.safetensors")
    alone = prolip.create_model_from_pretrained("ProLIP-ViT-test", weights, "fp32", "cpu", return_transform=False)
    assert isinstance(alone, torch.nn.Module) and torch.equal(alone.logit_bias, model.logit_bias)
    with pytest.raises(ValueError, match="no weights for ProLIP-ViT-test: give pretrained="):
        prolip.create_model_from_pretrained("ProLIP-ViT-test")


@pytest.mark.parametrize("batch", [1, 2, None])
def test_a_zero_shot_classifier_is_a_gaussian_per_class(model, tokenizer, batch):
    classes = prolip.build_zero_shot_classifier(model, tokenizer, CLASSES, TWO_TEMPLATES, num_classes_per_batch=batch)
    assert isinstance(classes, Gaussian) and classes.mean.shape == (3, model.embed_dim)
    with torch.no_grad():
        prompts = [model.encode_text(tokenizer([f"a photo of a {name}.", f"art of {name}."])) for name in CLASSES]
    for i, z in enumerate(prompts):
        torch.testing.assert_close(classes.select(i), mixture(z), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        image = model.encode_image(torch.randn(2, 3, 32, 32))
    assert measures.pairwise_csd_similarity(image, classes).shape == (2, 3)


def test_names_without_a_door_say_what_to_write():
    with pytest.raises(NotImplementedError, match=r"prolip.get_tokenizer\(<model name>\)"):
        prolip.tokenize(["a cat"])
    from prolip import build_zero_shot_classifier, list_pretrained, tokenize  # noqa: F401 - none ends in an ImportError


def test_models_and_weights_are_listed_ours_first():
    every = prolip.list_models()
    assert every[len(own_models()) :] == open_clip.list_models() and set(own_models()) <= set(every)
    assert ("ViT-B-16", "openai") in prolip.list_pretrained()
    assert "ViT-B-16:openai" in prolip.list_pretrained(as_str=True)


@pytest.mark.parametrize("name, tag", [("ViT-B-16", "openai"), ("ViT-L/14", "laion400m_e31")])
def test_weights_with_a_tag_are_fetched_from_the_hub_or_asked_for(name, tag, monkeypatch):
    asked, real = [], hub.hub_files
    monkeypatch.setattr(hub, "reachable", lambda: False)
    monkeypatch.setattr(hub, "hub_files", lambda repo, *names, **_: (asked.append((repo, names)), real(repo, *names)))
    with pytest.raises(FileNotFoundError, match="run `hf download .*, or give its weights as --pretrained"):
        prolip.create_model(name, pretrained=tag)
    assert asked[0][0].count("/") == 1 and asked[0][1][0] == ("open_clip_model.safetensors",)


@pytest.mark.parametrize("tag", ["openai", "laion2b_s34b_b79k", "webli", "datacomp_xl_s13b_b90k"])
def test_openclips_tags_are_told_from_files(tag):
    wanted = f"'{tag}' does not exist: give .* tag of OpenCLIP give its architecture, such as --model ViT-"
    with pytest.raises(FileNotFoundError, match=wanted) as error:
        prolip.create_model("ProLIP-ViT-test", pretrained=tag)
    assert "\n" not in str(error.value)


def test_features_are_not_normalised_again(model):
    with torch.no_grad():
        features = model.encode_image(torch.randn(2, 3, 32, 32))
    with pytest.raises(AttributeError, match="already have unit length"):
        features /= features.norm(dim=-1, keepdim=True)
    with pytest.raises(AttributeError, match="pairwise_csd_similarity"):
        features @ features.T


FEW = ("RN50", "ViTamin-S", "MobileCLIP-S1", "convnext_base", "coca_ViT-B-32", "EVA02-B-16", "mt5-base-ViT-B-32")
MANY = [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in open_clip.list_models()]


@pytest.mark.parametrize("name", MANY)
def test_every_architecture_builds_with_heads(name):
    """Without memory. transformers' towers cannot run there, the others do."""
    with torch.device("meta"):
        model = ProLIP(factory.get_model_config(name)[0])
        z = model.encode_image(torch.empty(1, 3, *model.image_size))
        if "hf_model_name" not in model.config["text_cfg"]:
            text = model.encode_text(torch.empty(1, model.context_length, dtype=torch.int64))
            assert text.log_var.shape == z.log_var.shape == (1, model.embed_dim)
    depths = model.depths()
    assert set(depths) == {n for n, _ in model.named_parameters() if n.startswith(("visual.", "text."))}
