"""Programs of PyTorch of both towers: every method's model, and OpenCLIP's with and without variances."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from fitted_models import TINY, fitted_model, fitted_openclip, openclip_model
from test_export import graph

from prolip import export
from prolip.embedder import evaluating, own_score
from prolip.export import ImageEncoder, TextEncoder, export_pt2, largest_differences, load
from prolip.factory import create_model
from prolip.gaussian import Gaussian
from prolip.methods import METHODS, score_from_dict
from prolip.models.checkpoint import save_pretrained
from prolip.uncertainty.openclip import PointModel

#: In a process of its own, which must not know this code.
ELSEWHERE = """
import sys, torch
pixels, ids, found = torch.load(sys.argv[2]), torch.load(sys.argv[3]), {}
facts = {"prolip.json": ""}
for name, x in (("image", pixels), ("text", ids)):
    run = torch.export.load(f"{sys.argv[1]}/{name}.pt2", extra_files=facts).module()
    found[name] = [tuple(run(x[:rows])) for rows in (1, 3, 5)]
assert not any(name.partition(".")[0] in ("prolip", "open_clip", "timm") for name in sys.modules)
torch.save([found, facts["prolip.json"]], sys.argv[4])
"""


def method_model(name, folder):
    """A model of a method as a run leaves it, with variances that differ from input to input."""
    if name == "likelihood":
        return fitted_model(folder)
    torch.manual_seed(0)
    model = create_model("ProLIP-ViT-test", method_cfg={"name": name}, init_unc_bias=-4.0, init_unc_gain=1.0)
    return f"local-dir:{save_pretrained(model, folder / name)}"


#: Those whose towers have parts of their own; the others' graphs are one of these.
OWN = ("pcmepp", "siglip", "vacsr")
EACH = [
    name if name in OWN else pytest.param(name, marks=pytest.mark.slow)
    for name, method in METHODS.items()
    if not method.adapts
]


@pytest.mark.parametrize("name", EACH)
def test_programs_of_every_method_equal_the_model(name, tmp_path):
    model = load(method_model(name, tmp_path))
    found = largest_differences(model, export_pt2(model, tmp_path / "pt2"), (1, 3, 9))
    assert max(found.values()) <= 1e-4, found
    facts = export.facts(model)
    assert facts["probabilistic"] is METHODS[name].probabilistic
    own, p, q = own_score(model.model if isinstance(model, PointModel) else model)[0], *torch.randn(2, 2, 3, 32)
    again = score_from_dict(json.loads(json.dumps(facts["score"])))
    scores = [score.pairwise(Gaussian(*p), Gaussian(*q)) for score in (own, again)]
    torch.testing.assert_close(*scores, rtol=0, atol=0)


def test_a_graph_may_differ_as_much_as_float32_rounds_the_model(tmp_path, monkeypatch):
    """A narrow kernel, as of a model with collapsed means, amplifies the rounding of a mean."""
    model, generator = load(fitted_model(tmp_path)), torch.Generator().manual_seed(0)
    _, ids = (encoder(model).example(64, generator) for encoder in (ImageEncoder, TextEncoder))
    head = model.text.head.ambiguity
    with torch.no_grad():
        head.centres.copy_(model.encode_text(ids).mean[: len(head.centres)])
        head.words.zero_()
        head.kernel_width.fill_(1e-5)
        head.kernel_weight.fill_(-2.0)
    twin = TextEncoder(copy.deepcopy(model).double())
    added = 0.0

    def runner(file, name):
        encoder = ImageEncoder(model) if name == "image" else twin
        return lambda x: (lambda mean, log_var: (mean.float(), log_var.float() + added))(*encoder(x))

    monkeypatch.setattr(export, "runner", runner)
    with torch.no_grad():
        rounding = (TextEncoder(model)(ids)[1] - twin(ids)[1]).abs().max().item()
    files = dict.fromkeys(("image", "text"), tmp_path)
    assert rounding > 2e-3 and largest_differences(model, files, (64,))["text"] == pytest.approx(1e-5, rel=1e-3)
    added = 12 * rounding
    assert largest_differences(model, files, (64,))["text"] > 1e-4


def test_a_program_runs_where_this_code_is_not(tmp_path):
    model = load(fitted_model(tmp_path))
    export_pt2(model, tmp_path / "pt2")
    inputs = {encoder.name: encoder.example(5) for encoder in (ImageEncoder(model), TextEncoder(model))}
    for name, x in inputs.items():
        torch.save(x, tmp_path / name)
    words = [tmp_path / "pt2", tmp_path / "image", tmp_path / "text", tmp_path / "out"]
    subprocess.run([sys.executable, "-c", ELSEWHERE, *map(str, words)], check=True, cwd=tmp_path, env={"PATH": ""})
    found, facts = torch.load(tmp_path / "out")
    for encoder in (ImageEncoder(model), TextEncoder(model)):
        for rows, got in zip((1, 3, 5), found[encoder.name]):
            with evaluating(encoder, "cpu"):
                torch.testing.assert_close(got, encoder(inputs[encoder.name][:rows]), atol=1e-4, rtol=0)
    said = json.loads(facts)
    assert said["score"]["name"] == "true_match" and said["score"]["unit"] > 0 and said["context_length"] == 12


@pytest.mark.parametrize("fitted", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_openclips_models_are_exported_with_and_without_variances(fitted, tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    words = [fitted_openclip(tmp_path)] if fitted else list(openclip_model(tmp_path))
    flags = words[:1] if fitted else [words[0], "--pretrained", words[1]]
    assert graph(flags[0], tmp_path / "out", *flags[1:], "--format", "pt2", "onnx") == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if "at most" in line]) == 4
    model = load(*words)
    facts = export.facts(model)
    assert facts["probabilistic"] is fitted and facts["context_length"] == TINY["text_cfg"]["context_length"]
    program = torch.export.load(tmp_path / "out/text.pt2").module()
    log_var = program(TextEncoder(model).example(4))[1]
    assert log_var.isfinite().all() if fitted else torch.isneginf(log_var).all()


def test_a_tower_that_is_no_graph_is_refused_in_words(tmp_path, capsys, monkeypatch):
    class Odd(ImageEncoder):
        def forward(self, image):
            return (image, image) if image.sum().item() > 0 else (-image, image)

    with pytest.raises(ValueError, match="cannot make a graph of the image tower.*--save-features"):
        export.export_program(Odd(create_model("ProLIP-ViT-test")))
    save_pretrained(create_model("ProLIP-ViT-test"), tmp_path / "model")
    monkeypatch.setattr(export, "ImageEncoder", Odd)
    assert graph(f"local-dir:{tmp_path}/model", tmp_path / "out", "--format", "pt2") == 2
    assert "error: torch.export cannot make a graph" in capsys.readouterr().err
