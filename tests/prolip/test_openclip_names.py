"""What OpenCLIP's users type: it works, or one line says what to type instead."""
import pytest
import torch

import prolip
from prolip import measures
from prolip.evaluation.zero_shot import class_gaussians
from prolip.gaussian import Gaussian, mixture
from prolip.models.weights.checkpoint import save_pretrained

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


@pytest.mark.parametrize("names, templates, message", [
    ("cat", TEMPLATES, "classnames are a str, want a list"),
    ([], TEMPLATES, "classnames are a list of nothing"),
    ([["cat", "kitten"]], TEMPLATES, "synonyms go to .*class_gaussians"),
    (NAMES, "a {}", "templates are 'a {}': give a list"),
    (NAMES, [], "give a list with at least one"),
    (NAMES, ["a photo"], "no place for the class"),
])
def test_classes_and_templates_that_are_none_are_refused(model, tokenizer, names, templates, message):
    with pytest.raises((TypeError, ValueError), match=message):
        prolip.build_zero_shot_classifier(model, tokenizer, names, templates)


def test_functions_are_templates_of_class_gaussians_too(model, tokenizer):
    by_function = class_gaussians(model, tokenizer, [["cat"]], [lambda name: f"a {name}"])
    torch.testing.assert_close(by_function, class_gaussians(model, tokenizer, [["cat"]], ["a {}"]))


def test_names_without_a_door_say_what_to_write():
    with pytest.raises(NotImplementedError, match=r"prolip.get_tokenizer\(<model name>\)"):
        prolip.tokenize(["a cat"])
    with pytest.raises(NotImplementedError, match="local-dir:<run>/model.*hf-hub:.*list_models"):
        prolip.list_pretrained()
    from prolip import build_zero_shot_classifier, list_pretrained, tokenize  # noqa: F401 - none ends in an ImportError


@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B-16", "RN50", "coca_ViT-B-32"])
def test_openclips_models_are_told_from_unknown_ones(name):
    with pytest.raises(ValueError, match=f"unknown model '{name}': .*{name} is OpenCLIP's.*load_embedder"):
        prolip.create_model(name, pretrained="openai")
    with pytest.raises(ValueError, match="unknown model 'ViT-B-33': did you mean") as error:
        prolip.create_model("ViT-B-33")
    assert "OpenCLIP's" not in str(error.value)


@pytest.mark.parametrize("tag", ["openai", "laion2b_s34b_b79k", "webli", "datacomp_xl_s13b_b90k"])
def test_openclips_tags_are_told_from_files(tag):
    wanted = f"'{tag}' is no file: give .* tag of OpenCLIP's: of .* hf-hub:.*init_uncertainty=True"
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
