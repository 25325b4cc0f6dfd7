"""Both towers as torch.export programs, ONNX graphs, traces: one graph for any number of rows, equal to the model."""

import json
import math
import resource
import warnings
from pathlib import Path

import pytest
import torch
import yaml

from prolip import export
from prolip.cli.main import main
from prolip.embedder import evaluating
from prolip.export import BATCHES, ImageEncoder, TextEncoder, export_onnx, export_program, largest_differences
from prolip.factory import create_model
from prolip.gaussian import Gaussian
from prolip.models.checkpoint import save_pretrained

onnxruntime = pytest.importorskip("onnxruntime")

RELEASED = f"local-dir:{Path(__file__).parents[2] / 'fixtures/released_prolip_tiny'}"
RECIPE = Path(__file__).parents[3] / "scripts/recipes/emoji-demo.yaml"
ENCODERS = {"image": ImageEncoder, "text": TextEncoder}
# Each flag that changes a graph, in few models.
MODELS = {
    "flags": ("ProLIP-ViT-test", {"mask_padding": True, "conv_stem": True, "quick_gelu": True}),
    "released": (RELEASED, {}),
    "paper": ("ProLIP-ViT-test", {}),
}
EACH = [name if name == "flags" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


def build(name, options=None):
    """A model whose variances differ from input to input: the initial head gives all about -10."""
    torch.manual_seed(0)
    model = create_model(name, **(options or {}))
    with torch.no_grad():
        for head in (model.visual.uncertainty_proj, model.text.text_uncertainty_projection):
            head.weight.normal_(std=head.in_features**-0.5)
    return model


def graph(model, folder, *words):
    return main(["export", "graph", "--model", model, "--output", str(folder), *words])


def assert_equal_at_other_batches(run, encoder, batches=BATCHES):
    generator = torch.Generator().manual_seed(3)
    for rows in batches:
        x = encoder.example(rows, generator)
        with evaluating(encoder, "cpu"):
            wanted, got = encoder(x), run(x)
        assert len(got) == 2
        for a, b in zip(got, wanted):
            assert a.shape == b.shape == (rows, encoder.model.embed_dim)
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tower", ENCODERS)
@pytest.mark.parametrize("name", EACH)
def test_exported_programs_take_any_number_of_rows(name, tower):
    encoder = ENCODERS[tower](build(*MODELS[name])).train()
    program = export_program(encoder)
    assert_equal_at_other_batches(program.module(), encoder)
    assert all(part.training for part in encoder.modules())


@pytest.mark.parametrize("tower", ENCODERS)
@pytest.mark.parametrize("name", EACH)
def test_traces_take_any_number_of_rows(name, tower):
    encoder = ENCODERS[tower](build(*MODELS[name])).eval()
    with warnings.catch_warnings(record=True) as seen, torch.no_grad():
        warnings.simplefilter("always")
        traced = torch.jit.trace(encoder, (encoder.example(2),))
    fixed = [warning for warning in seen if issubclass(warning.category, torch.jit.TracerWarning)]
    assert not [warning for warning in fixed if "prolip" in Path(warning.filename).parts]  # PyTorch has some of its own
    assert_equal_at_other_batches(traced, encoder)


def test_an_exported_tower_gives_gaussians_and_takes_any_number_of_kept_patches():
    model = build("ProLIP-ViT-test").eval()
    rows, kept = torch.export.Dim("rows"), torch.export.Dim("kept", max=model.num_patches)
    image, keep = torch.randn(2, 3, 32, 32), torch.tensor([[0, 5, 9], [2, 3, 15]])
    program = torch.export.export(model.visual, (image, keep), dynamic_shapes=({0: rows}, {0: rows, 1: kept}))
    other = torch.randn(5, 3, 32, 32), torch.rand(5, 16).argsort(1)[:, :7]
    got, wanted = program.module()(*other), model.encode_image(*other)
    assert isinstance(got, Gaussian)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["ProLIP-ViT-test", pytest.param("", marks=pytest.mark.slow, id="the demo's model")])
def test_onnx_graphs_equal_the_model_in_onnxruntime(tmp_path, name):
    """The smallest model, and the architecture that the demo's recipe trains, with random weights."""
    recipe = yaml.safe_load(RECIPE.read_text())["model"]
    model = build(name or recipe["model"], {key: recipe[key] for key in ("init_logit_scale", "init_logit_bias")})
    files = export_onnx(model, tmp_path / "onnx")
    found = largest_differences(model, files, BATCHES)
    assert found.keys() == ENCODERS.keys() and max(found.values()) <= 1e-4
    with torch.no_grad():  # and the comparison can tell another model
        model.text.text_uncertainty_projection.bias += 0.01
    assert largest_differences(model, files, (3,))["text"] > 9e-4  # of log variances near -10
    with torch.no_grad():
        model.text.text_uncertainty_projection.bias.fill_(float("nan"))
    assert math.isnan(largest_differences(model, files, (3,))["text"])
    session = onnxruntime.InferenceSession(files["text"])
    facts = json.loads(session.get_modelmeta().custom_metadata_map["prolip"])
    assert facts["context_length"] == model.context_length and facts["logit_bias"] == -5.0
    assert facts["logit_scale"] == model.logit_scale.exp().item() == facts["score"]["scale"]
    assert facts["preprocess"]["mean"] == list(model.visual.preprocess_cfg["mean"])


def test_what_cannot_be_exported_is_refused_with_the_remedy(tmp_path, monkeypatch, capsys):
    model = create_model("ProLIP-ViT-test", precision="bf16")
    with pytest.raises(ValueError, match="torch.bfloat16 on cpu.*precision='fp32'"):
        export_onnx(model, tmp_path)
    assert graph("ProLIP-ViT-test", tmp_path) == 2
    assert "no weights are given" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert graph("ProLIP-ViT-test", tmp_path / "file", "--pretrained", "random") == 2
    assert "is a file: give a folder" in capsys.readouterr().err
    save_pretrained(create_model("ProLIP-ViT-test"), tmp_path / "model")
    assert graph(f"local-dir:{tmp_path / 'model'}", tmp_path / "onnx", "--pretrained", "random") == 2
    assert "has its own weights, so pretrained='random' would be ignored: remove one" in capsys.readouterr().err
    monkeypatch.setattr(export, "NEEDED", ("onnx", "absent_module"))
    with pytest.raises(ImportError, match="ONNX needs absent_module: pip install absent_module"):
        export_onnx(model, tmp_path)


@pytest.fixture
def full_disk():
    """Files of this process end at 200 kB, as on a disk without more room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("form", [pytest.param("onnx", marks=pytest.mark.slow), "pt2"])
def test_a_full_disk_leaves_the_former_graphs(form, tmp_path, capsys, full_disk):
    save_pretrained(create_model("ProLIP-ViT-test"), tmp_path / "model")
    place = tmp_path / "graphs"
    place.mkdir()
    for name in ("image", "text"):
        (place / f"{name}.{form}").write_bytes(b"former")
    full_disk()
    assert graph(f"local-dir:{tmp_path / 'model'}", place, "--format", form) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert f"{place} was not written (File too large): free space on its disk, or give another path" in said
    assert {path.name: path.read_bytes() for path in place.iterdir()} == dict.fromkeys(
        (f"image.{form}", f"text.{form}"), b"former"
    )


def test_what_is_no_model_is_refused_in_words(tmp_path):
    for bad in ("x", torch.nn.Linear, torch.nn.Linear(1, 1), None):
        for write in (export_onnx, export.export_pt2, ImageEncoder):
            with pytest.raises(TypeError, match=r"the model is a .*: give the model of prolip.export.load"):
                write(bad, *([] if write is ImageEncoder else [tmp_path / "out"]))
    with pytest.raises(TypeError, match="the model is a int: give a name"):
        export.load(5)
    assert not (tmp_path / "out").exists()
