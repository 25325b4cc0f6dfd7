"""What OpenCLIP's users type: it works, or one line says what to type instead."""

import open_clip
import pytest
import torch

import prolip
from prolip import measures
from prolip.evaluation.zero_shot import class_gaussians
from prolip.gaussian import Gaussian, mixture
from prolip.models import registry as hub
from prolip.models.checkpoint import save_pretrained
from prolip.models.prolip import ProLIP
from prolip.models.registry import get_model_config, own_models

TEMPLATES = ("a photo of a {}.", lambda name: f"art of {name}.")
NAMES = ["cat", "dog", "red panda"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return prolip.create_model("ProLIP-ViT-test").eval()


@pytest.fixture(scope="module")
def tokenizer():
    return prolip.get_tokenizer("ProLIP-ViT-test")


def test_create_model_from_pretrained_loads_weights_or_says_that_there_are_none(model, tmp_path):
    save_pretrained(model, tmp_path)
    made, preprocess = prolip.create_model_from_pretrained(f"local-dir:{tmp_path}", image_mean=(0.5, 0.5, 0.5))
    torch.testing.assert_close(made.state_dict(), model.state_dict())
    assert preprocess.transforms[-1].mean == (0.5, 0.5, 0.5)
    weights = str(tmp_path / "model.safetensors")
    alone = prolip.create_model_from_pretrained("ProLIP-ViT-test", weights, "fp32", "cpu", return_transform=False)
    assert isinstance(alone, torch.nn.Module) and torch.equal(alone.logit_bias, model.logit_bias)
    with pytest.raises(ValueError, match="no weights to load for ProLIP-ViT-test: give pretrained="):
        prolip.create_model_from_pretrained("ProLIP-ViT-test")


@pytest.mark.parametrize("batch", [1, 2, None])
def test_a_zero_shot_classifier_is_a_gaussian_per_class(model, tokenizer, batch):
    classes = prolip.build_zero_shot_classifier(model, tokenizer, NAMES, TEMPLATES, num_classes_per_batch=batch)
    assert isinstance(classes, Gaussian) and classes.mean.shape == (3, model.embed_dim)
    with torch.no_grad():
        prompts = [model.encode_text(tokenizer([f"a photo of a {name}.", f"art of {name}."])) for name in NAMES]
    for i, z in enumerate(prompts):
        torch.testing.assert_close(classes.select(i), mixture(z), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        image = model.encode_image(torch.randn(2, 3, 32, 32))
    assert measures.pairwise_csd_similarity(image, classes).shape == (2, 3)


@pytest.mark.parametrize(
    "names, templates, message",
    [
        ("cat", TEMPLATES, "classnames are a str, want a list"),
        ([], TEMPLATES, "classnames are a list of nothing"),
        ([["cat", "kitten"]], TEMPLATES, "synonyms go to .*class_gaussians"),
        (NAMES, "a {}", "templates are 'a {}': give a list"),
        (NAMES, [], "give a list with at least one"),
        (NAMES, ["a photo"], "no place for the class"),
    ],
)
def test_classes_and_templates_that_are_none_are_refused(model, tokenizer, names, templates, message):
    with pytest.raises((TypeError, ValueError), match=message):
        prolip.build_zero_shot_classifier(model, tokenizer, names, templates)


def test_functions_are_templates_of_class_gaussians_too(model, tokenizer):
    by_function = class_gaussians(model, tokenizer, [["cat"]], [lambda name: f"a {name}"])
    torch.testing.assert_close(by_function, class_gaussians(model, tokenizer, [["cat"]], ["a {}"]))


def test_names_without_a_door_say_what_to_write():
    with pytest.raises(NotImplementedError, match=r"prolip.get_tokenizer\(<model name>\)"):
        prolip.tokenize(["a cat"])
    from prolip import build_zero_shot_classifier, list_pretrained, tokenize  # noqa: F401 - none ends in an ImportError


def test_models_and_weights_are_listed_ours_first():
    every = prolip.list_models()
    assert every[len(own_models()) :] == open_clip.list_models() and set(own_models()) <= set(every)
    assert ("ViT-B-16", "openai") in prolip.list_pretrained()
    assert "ViT-B-16:openai" in prolip.list_pretrained(as_str=True)


@pytest.mark.parametrize(
    "name, tag, file",
    [
        ("ViT-B-16", "openai", "open_clip_model.safetensors"),
        ("ViT-L/14", "laion400m_e31", "open_clip_model.safetensors"),
    ],
)
def test_weights_with_a_tag_are_fetched_from_the_hub_or_asked_for(name, tag, file, monkeypatch):
    asked, real = [], hub.hub_files
    monkeypatch.setattr(hub, "reachable", lambda: False)
    monkeypatch.setattr(hub, "hub_files", lambda repo, *names, **_: (asked.append((repo, names)), real(repo, *names)))
    with pytest.raises(FileNotFoundError, match="run `hf download .*, or give its weights as --pretrained"):
        prolip.create_model(name, pretrained=tag)
    assert asked[0][0].count("/") == 1 and asked[0][1][0] == (file,)


def test_an_unknown_name_is_told_from_openclips():
    with pytest.raises(ValueError, match="unknown model 'ViT-B-33': did you mean") as error:
        prolip.create_model("ViT-B-33")
    assert "OpenCLIP's" not in str(error.value)


@pytest.mark.parametrize("tag", ["openai", "laion2b_s34b_b79k", "webli", "datacomp_xl_s13b_b90k"])
def test_openclips_tags_are_told_from_files(tag):
    wanted = f"'{tag}' is no file: give .* tag of OpenCLIP's: give its architecture, such as --model ViT-"
    with pytest.raises(FileNotFoundError, match=wanted) as error:
        prolip.create_model("ProLIP-ViT-test", pretrained=tag)
    assert "\n" not in str(error.value)


def test_features_are_not_normalised_again(model):
    with torch.no_grad():
        features = model.encode_image(torch.randn(2, 3, 32, 32))
    with pytest.raises(AttributeError, match="unit length already"):
        features /= features.norm(dim=-1, keepdim=True)
    with pytest.raises(AttributeError, match="pairwise_csd_similarity"):
        features @ features.T


@pytest.mark.parametrize("name", open_clip.list_models())
def test_every_architecture_builds_with_heads(name):
    """Without memory. transformers' towers cannot run there, the others do."""
    with torch.device("meta"):
        model = ProLIP(get_model_config(name)[0])
        z = model.encode_image(torch.empty(1, 3, *model.image_size))
        if "hf_model_name" not in model.config["text_cfg"]:
            text = model.encode_text(torch.empty(1, model.context_length, dtype=torch.int64))
            assert text.log_var.shape == z.log_var.shape == (1, model.embed_dim)
    depths = model.depths()
    assert set(depths) == {n for n, _ in model.named_parameters() if n.startswith(("visual.", "text."))}
