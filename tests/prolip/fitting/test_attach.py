"""Any trained model gets variances: its means stay bit for bit, and every evaluation takes what is left."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from commands import clip_benchmark, datacomp, evaluate, evaluate_corpus
from fitted_models import fitted_model
from safetensors.torch import load_file, save_file

import prolip
from drawings import SHARDS, UNSEEN
from prolip.cli.main import main as command_line
from prolip.corpora.emoji import corpus as emoji
from prolip.corpora.emoji.result import REFUSED_BY, load
from prolip.embedder import Embedder
from prolip.embeddings import Pairs, few_pairs
from prolip.evaluation.cache import FeatureStore
from prolip.evaluation.embed import load_features
from prolip.evaluation.metrics.calibration import reliability
from prolip.evaluation.metrics.selective import auroc, risk_coverage
from prolip.fitting.attach import attach
from prolip.loading import recognised
from prolip.measures.chance import OwnFirst, warn_once
from prolip.methods.likelihood import LikelihoodConfig
from prolip.models.checkpoint import save_pretrained

DATA = ["--data", SHARDS, "--caption-sampling", "name:2,keywords,group"]
SMALL = ["--bank", "64", "--centres", "64"]
CONFIG = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "width": 32, "heads": 2, "layers": 1},
    "quick_gelu": True,
}


def main(words: list[str]) -> int:
    """The exit code of `prolip uncertainty`."""
    return command_line(["uncertainty", *words])


def fit(model: Path | str, output: Path, *words: object) -> None:
    """Fit variances to a model, small ones."""
    name = f"local-dir:{model}" if isinstance(model, Path) else model
    assert main(["--model", name, *SMALL, *map(str, words), "--output", str(output)]) == 0


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks") / "wds_drawings"
    command_line(["data", "emoji", "--data", UNSEEN, "--output", str(folder)])
    return folder


def test_a_model_is_recognised_by_its_kind_and_that_of_its_weights(pair, tmp_path):
    kind = "a ProLIP model" if (pair[0] / "config.json").exists() else "an OpenCLIP model"
    assert recognised(f"local-dir:{pair[0]}", None) == f"local-dir:{pair[0]} is {kind}"
    (tmp_path / "own.pt").touch()
    assert (
        recognised("ViT-S-32", f"{tmp_path}/own.pt")
        == f"ViT-S-32 is an OpenCLIP model with the weights in {tmp_path}/own.pt"
    )
    assert recognised("ViT-B-32", "openai") == "ViT-B-32 is an OpenCLIP model with the published weights openai"
    assert recognised("ViT-B-32", "random") == "ViT-B-32 is an OpenCLIP model with random weights"


@pytest.fixture(scope="module", params=["ours", "openclip"])
def pair(request, tmp_path_factory) -> tuple[Path, Path]:
    """A model of points in a folder, and the folder that the command makes of it."""
    before, after = (tmp_path_factory.mktemp(name) for name in ("before", "after"))
    torch.manual_seed(0)
    if request.param == "ours":
        save_pretrained(prolip.create_model("ProLIP-ViT-test", method_cfg={"name": "siglip"}), before)
    else:
        vision, text = open_clip.CLIPVisionCfg(**CONFIG["vision_cfg"]), open_clip.CLIPTextCfg(**CONFIG["text_cfg"])
        model = open_clip.CLIP(CONFIG["embed_dim"], vision, text, quick_gelu=True)
        preprocess = {"mean": [0.5] * 3, "std": [0.4] * 3, "interpolation": "bilinear", "resize_mode": "squash"}
        text = json.dumps({"model_cfg": CONFIG, "preprocess_cfg": preprocess})
        (before / "open_clip_config.json").write_text(text)
        save_file(model.state_dict(), before / "open_clip_model.safetensors")
    fit(before, after, *DATA, "--save-pairs", after / "pairs.safetensors")
    facts = json.loads((after / "fit.json").read_text())
    assert facts["data"].endswith(SHARDS.rpartition("/")[2]) and facts["pairs"] > facts["images"] > 100
    return before, after


def test_the_means_are_the_old_ones_bit_for_bit_and_inputs_differ_in_variance(pair):
    old, new = (Embedder.load(f"local-dir:{folder}") for folder in pair)
    pixels = torch.randn(20, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    texts = ["a red ball", "sport", "trophy", "a", "game of chance", "fishing pole and a fish"]
    ours = (pair[0] / "config.json").exists()  # a model of points is normalised once more by who evaluates it
    for one, other in (
        (old.encode_image(pixels), new.encode_image(pixels)),
        (old.embed_texts(texts), new.embed_texts(texts)),
    ):
        torch.testing.assert_close(one.mean, other.mean, rtol=0, atol=1e-7 if ours else 0)
        assert other.trace.isfinite().all() and other.trace.unique().numel() > 1
    assert not old.probabilistic and new.probabilistic and new.score.name == "true_match"
    weights = "model.safetensors" if ours else "open_clip_model.safetensors"
    before, after = (load_file(folder / weights) for folder in pair)
    assert all(torch.equal(after[name], x) for name, x in before.items())
    assert old.fingerprint != new.fingerprint and new.score.units.images > 100


def test_every_evaluation_takes_it(pair, task, tmp_path, capsys):
    model = f"local-dir:{pair[1]}"
    corpus = evaluate_corpus(["--model", model, "--data", UNSEEN])
    assert corpus.similarity == "true_match" and "trace/group" in corpus.metrics
    (result,) = evaluate(["--model", model, "--data", f"wds:{task}", "--uncertainty", "--save-features", str(tmp_path)])
    assert result.info["similarity"] == "true_match" and any("refusal" in key for key in result.metrics)
    (again,) = evaluate(["--features", str(tmp_path), "--uncertainty"])
    assert again.metrics == pytest.approx(result.metrics, rel=0, abs=0, nan_ok=True)
    root, output = f"{task.parent}/wds_{{dataset_cleaned}}", str(tmp_path / "{similarity}.json")
    words = ["eval", "--model", model, "--dataset", "wds/drawings", "--dataset_root", root, "--output", output]
    clip_benchmark([*words, "--num_workers", "0"])
    found = json.loads((tmp_path / "true_match.json").read_text())
    (features,) = load_features(FeatureStore(tmp_path))
    scores = Embedder.load(model).score.pairwise(features.image, features.text)
    hit = (scores.T.topk(5, dim=1).indices == features.owners.unsqueeze(1)).any(1)  # a caption's own image alone counts
    assert found["metrics"]["image_retrieval_recall@5"] == pytest.approx(hit.double().mean().item(), abs=1e-6)
    words = ["--classes", "subgroup", "--output", str(tmp_path / "data/wds_cars_test")]
    assert command_line(["data", "emoji", "--data", UNSEEN, *words]) == 0
    words = ["--model", model, "--data", str(tmp_path / "data"), "--tasks", "cars", "--device", "cpu", "--output"]
    datacomp([*words, str(tmp_path / "datacomp")])
    (line,) = map(json.loads, (tmp_path / "datacomp/results.jsonl").read_text().splitlines())
    assert line["metrics"]["acc1"] == pytest.approx(corpus.metrics["zero_shot/subgroup/top1"])


def images_of(model: str) -> torch.Tensor:
    """Drawings of a designer that nothing was fitted to."""
    preprocess = Embedder.load(model).preprocess
    return torch.stack([preprocess(drawing.image()) for drawing in emoji.read([UNSEEN]).drawings])


def test_noise_and_blank_images_are_new_to_what_was_fitted_to_drawings(pair):
    name = f"local-dir:{pair[1]}"
    embedder, own, g = Embedder.load(name), images_of(name), torch.Generator().manual_seed(0)
    near = embedder.novelty(embedder.encode_hidden(own))
    blank = torch.randn(100, 3, 1, 1, generator=g).expand(-1, -1, 32, 32)
    for foreign in (torch.randn(100, 3, 32, 32, generator=g), blank):
        far = embedder.novelty(embedder.encode_hidden(foreign))
        assert auroc(torch.cat([near["first"], far["first"]]), torch.arange(len(own) + 100) >= len(own)) > 0.9
    assert Embedder.load(f"local-dir:{pair[0]}").novelty is None


def test_a_saved_model_gives_the_nats_of_the_one_that_was_fitted_to_the_bit(pair, tmp_path):
    before, after = pair
    pairs = Pairs.from_tensors(load_file(after / "pairs.safetensors"))
    config = LikelihoodConfig(bank=64, centres=64)
    fitted = attach(f"local-dir:{before}", None, None, pairs, config, tmp_path / "again")
    embedder = Embedder.load(f"local-dir:{tmp_path}/again")
    hidden = embedder.encode_hidden(images_of(f"local-dir:{before}"))
    words = embedder.encode_hidden(embedder.tokenizer(list(emoji.read([UNSEEN]).caption_table().texts)), "text")
    for found, again in (
        (fitted.novelty(hidden), embedder.novelty(hidden)),
        (fitted.text_novelty(words), embedder.text_novelty(words)),
    ):
        assert found.keys() == {"mean", "first"} and all(x.unique().numel() > 10 for x in found.values())
        assert all(torch.equal(nats, found[name]) for name, nats in again.items())
    assert fitted.score.doubt is not None and embedder.score.doubt == fitted.score.doubt
    mean = hidden.z.mean
    for one, other in zip(fitted.reader.evidence(mean), embedder.reader.evidence(mean)):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    assert torch.equal(fitted.reader.ambiguity(mean), embedder.reader.ambiguity(mean))


def test_the_corpus_is_refused_by_novelty_from_the_same_pass(pair, tmp_path, capsys):
    result = evaluate_corpus(["--model", f"local-dir:{pair[1]}", "--data", UNSEEN, "--output", str(tmp_path)])
    embedder = Embedder.load(f"local-dir:{pair[1]}")
    hidden = embedder.encode_hidden(images_of(f"local-dir:{pair[1]}"))
    for name, nats in embedder.novelty(hidden).items():
        np.testing.assert_allclose(result.novelty[name], nats, rtol=1e-3, atol=1e-3)
        assert np.array_equal(load(tmp_path).novelty[name], result.novelty[name])
    names, score, scale = result.text.select(result.name_texts), embedder.score, 2 / embedder.score.units.unit
    chosen = score.pairwise(result.image, names).argmax(1)
    own = (scale * result.image.mean @ names.mean.T).softmax(1)[torch.arange(len(chosen)), chosen]
    assert 0 < result.doubt.min() < result.doubt.max() < 1
    answer = -((1 - result.doubt) * own + result.doubt / len(names.mean)).log()
    nats = answer + sum((1 + torch.from_numpy(x).exp() / 10).log() for x in result.novelty.values())
    wrong = ~result.rankings["names"][0].hit(1)
    assert result.metrics["refusal/names_i2t/all/auroc"] == pytest.approx(auroc(nats, wrong))
    assert result.metrics["refusal/names_i2t/answer/aurc"] == pytest.approx(risk_coverage(answer, wrong).aurc)
    right = (~wrong).numpy()
    assert result.metrics["refusal/names_i2t/answer/ece"] == pytest.approx(reliability((-answer).exp(), right).ece)
    assert result.metrics["undoubted/names_i2t/answer/ece"] == pytest.approx(reliability(own, ~wrong).ece)
    first = risk_coverage(result.novelty["first"], wrong).aurc
    assert result.metrics["refusal/names_i2t/first/aurc"] == pytest.approx(first)
    chosen = score.pairwise(result.image, result.text).argmax(0)  # the drawing that each text finds
    nats = -(scale * result.text.mean @ result.image.mean.T).log_softmax(1)[torch.arange(len(chosen)), chosen]
    nats = nats + sum((1 + torch.from_numpy(x)[chosen].exp() / 10).log() for x in result.novelty.values())
    nats = nats[result.table.true_matches > 0]
    wrong = ~result.rankings["captions"][1].hit(1)[result.rankings["captions"][1].answerable]
    assert result.metrics["refusal/captions_t2i/all/aurc"] == pytest.approx(risk_coverage(nats, wrong).aurc)
    said = capsys.readouterr().out
    ways = (REFUSED_BY[name] for name in ("score", "text", "pair", "mean", "first", "answer", "all"))
    assert all(said.count(f"\n{words} ") >= 2 for words in ways)
    points = evaluate_corpus(["--model", f"local-dir:{pair[0]}", "--data", UNSEEN])
    assert {key.split("/")[2] for key in points.metrics if key.startswith("refusal/")} == {"score"}


def test_a_terminal_counts_inputs_and_a_log_file_has_a_line_for_each_part(pictures, tmp_path, capfd, monkeypatch):
    save_pretrained(prolip.create_model("ProLIP-ViT-test"), tmp_path / "model")
    data = as_csv(tmp_path / "all.csv", [(picture, f"number {i}") for i, picture in enumerate(pictures)])
    steps = [
        f"local-dir:{tmp_path}/model is a ProLIP model",
        f"embedding the images and texts of {data}",
        "fitting variances to 30 pairs",
    ]
    fit(tmp_path / "model", tmp_path / "out", "--data", data, "--changed-images", 0, "--batch-size", 7)
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if not line.startswith("warning")] == steps
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    fit(tmp_path / "model", tmp_path / "out", "--data", data, "--changed-images", 0, "--batch-size", 7)
    said = capfd.readouterr().err
    assert "images and texts: 60 [" in said and all(line in said for line in steps)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--data", "/nowhere.tar"], "/nowhere.tar"),
        (["--pairs", "/nowhere.safetensors"], "nowhere.safetensors"),
        ([*DATA, "--bank", "3"], "--bank 3: give a number of at least 32"),
        ([*DATA, "--novelty-centres", "-1"], "--novelty-centres -1: give a number of at least 0"),
        (["--pairs", __file__], "header"),
        ([], "give either --data, or --pairs with embeddings from --save-pairs"),
        (["--data", SHARDS, "--split", "train"], "--split train, but --data has no splits"),
        (["--data", SHARDS, "--select", "group=none"], "--data: 2 shards contain no sample that matches --select"),
        (["--samples", "100"], "--samples is not a flag here: use --fit-samples"),
    ],
)
def test_what_is_not_there_ends_in_one_line(words, error, tmp_path, capsys):
    save_pretrained(prolip.create_model("ProLIP-ViT-test"), tmp_path / "model")
    assert main(["--model", f"local-dir:{tmp_path}/model", *words, "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert error in said and said.startswith("error: ") and said.count("\n") == 1


@pytest.fixture
def never_embeds(monkeypatch):
    """Nothing may be embedded: what is wrong was known before."""
    monkeypatch.setattr("prolip.fitting.collect.embed_images", lambda *args, **options: pytest.fail("to embed"))


def refused(capsys, *words) -> str:
    """The one line in which the command ends."""
    assert main([*map(str, words)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


def as_csv(path: Path, rows: list[tuple[Path, str]]) -> Path:
    path.write_text("filepath\ttitle\n" + "".join(f"{picture}\t{text}\n" for picture, text in rows))
    return path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> list[Path]:
    """Thirty drawings as files."""
    folder = tmp_path_factory.mktemp("pictures")
    paths = [folder / f"{row}.png" for row in range(30)]
    for path, drawing in zip(paths, emoji.read([UNSEEN]).drawings):
        drawing.image().convert("RGB").save(path)
    return paths


def test_fewer_than_thirty_pairs_are_refused_before_they_are_embedded(pair, pictures, tmp_path, capsys, never_embeds):
    model = ["--model", f"local-dir:{pair[0]}", "--output", tmp_path / "out"]
    for rows in (1, 29):
        data = as_csv(tmp_path / "few.csv", [(picture, picture.stem) for picture in pictures[:rows]])
        assert f"{rows} pairs" in refused(capsys, *model, "--data", data)
    assert "needs 30" in refused(capsys, *model, *DATA, "--fit-samples", 1)
    assert not (tmp_path / "out").exists()


def test_thirty_pairs_are_fitted_with_a_warning_and_so_is_one_picture_with_many_captions(pictures, tmp_path, capsys):
    save_pretrained(prolip.create_model("ProLIP-ViT-test"), tmp_path / "model")
    for name, rows in (("thirty", pictures), ("same", pictures[:1] * 60)):
        data = as_csv(tmp_path / f"{name}.csv", [(picture, f"number {i}") for i, picture in enumerate(rows)])
        fit(tmp_path / "model", tmp_path / name, "--data", data)
        said = capsys.readouterr()
        assert f"warning: {len(rows)} pairs" in said.err
        assert ("no novelty of images" in said.out) is (name == "same")
        traces = Embedder.load(f"local-dir:{tmp_path}/{name}").embed_texts(["a cat", "animal", "x"]).trace
        assert float(traces.max()) <= math.log(len(rows)) * 2 / 9  # of a scale from 10
    save_pretrained(prolip.create_model("ProLIP-ViT-test"), tmp_path / "same")
    assert (tmp_path / "thirty/fit.json").exists() and not (tmp_path / "same/fit.json").exists()


def test_warnings_follow_the_summary_each_on_a_line(pictures, tmp_path, capsys, monkeypatch):
    model = prolip.create_model("ProLIP-ViT-test")
    torch.nn.init.constant_(model.logit_scale, math.log(1 / 0.07))
    save_pretrained(model, tmp_path / "model")
    data = as_csv(tmp_path / "d.csv", [(picture, f"number {i}") for i, picture in enumerate(pictures)])
    monkeypatch.setattr(sys, "stderr", sys.stdout)
    fit(tmp_path / "model", tmp_path / "fitted", "--data", data, "--changed-images", 0)
    *_, used, few, initial, decisive = capsys.readouterr().out.splitlines()
    assert used == f"use it as --model local-dir:{tmp_path}/fitted"
    assert few.startswith("warning: 30 pairs of 30 images and 30 texts are few: ") and ";" not in few
    assert initial == "warning: the logit scale is OpenCLIP's initial value: are these weights trained?"
    assert decisive.startswith("warning: the model finds an image's own caption first in ")
    assert decisive.endswith("Variances and similarities fitted to it have no meaning")


def test_missing_weights_are_refused_before_a_line_of_progress(tmp_path, capfd):
    assert main(["--model", "ViT-B-32", "--data", SHARDS, "--output", str(tmp_path / "out")]) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: ViT-B-32 names an architecture, but no weights are given") and said.count("\n") == 1


def test_python_is_warned_of_few_pairs_and_of_a_model_at_chance(pictures, tmp_path, caplog):
    save_pretrained(prolip.create_model("ProLIP-ViT-test"), tmp_path / "model")
    data = as_csv(tmp_path / "d.csv", [(picture, f"number {i}") for i, picture in enumerate(pictures)])
    prolip.fit_uncertainty(f"local-dir:{tmp_path}/model", f"csv:{data}", tmp_path / "fitted", device="cpu")
    assert f"{len(pictures)} pairs of" in caplog.text and "no better than chance" in caplog.text
    hits, pairs, candidates = json.loads((tmp_path / "fitted/fit.json").read_text())["own_first"]
    assert OwnFirst(hits, pairs, candidates).at_chance and pairs == candidates == len(pictures)
    name = f"local-dir:{tmp_path}/model"  # whose cosines no fit has found without meaning
    assert Embedder.load(name).caution == ""
    shutil.copy(tmp_path / "fitted/fit.json", tmp_path / "model")
    for _ in range(2):
        embedder = Embedder.load(name)
    assert embedder.caution == f"in its fit, {OwnFirst(hits, pairs, candidates)}"
    assert caplog.messages.count(f"{name}: {embedder.caution}") == 1


def test_a_fit_to_few_pairs_is_named_once_at_loading(tmp_path, caplog):
    warn_once.cache_clear()
    name = fitted_model(tmp_path, doubts=True)
    for _ in range(2):
        assert Embedder.load(name).caution == ""  # it has a meaning
    few = f"{name}: in its fit, {few_pairs(128, 64, 64)}"
    assert "128 pairs of 64 images and 64 texts are few: variances and probabilities are rough" in few
    assert caplog.messages == [few]
    facts = tmp_path / "fitted/fit.json"
    facts.write_text(facts.read_text().replace('"pairs": 128', '"pairs": 300'))
    Embedder.load(name)
    assert caplog.messages == [few]
    facts.unlink()  # as a run's model, which counts images and texts only
    Embedder.load(name)
    assert caplog.messages[1:] == [f"{name}: in its fit, {few_pairs(None, 64, 64)}"]


def test_places_that_cannot_be_written_are_refused_before_anything_is_embedded(pair, tmp_path, capsys, never_embeds):
    model = ["--model", f"local-dir:{pair[0]}", *DATA]
    said = refused(capsys, *model, "--output", tmp_path / "out", "--save-pairs", tmp_path / "no/where/p.safetensors")
    assert "no/where/p.safetensors" in said and "folder does not exist" in said
    assert "contains the model itself" in refused(capsys, *model, "--output", pair[0])
    assert "contains the model itself" in refused(capsys, *model, "--output", f"{pair[0]}/../{pair[0].name}")


def test_a_model_of_a_run_is_refused_and_another_is_replaced_with_a_line(pair, tmp_path, capfd, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(pair[0], run / "model")
    shutil.copytree(pair[0], run / "fitted")
    (run / "config.json").write_text('{"method": "siglip"}')
    words = ["--model", f"local-dir:{pair[0]}", "--pairs", pair[1] / "pairs.safetensors", *SMALL, "--output"]
    said = refused(capfd, *words, run / "model")
    assert f"{run}/model holds the model of a run: give another folder, such as {run}/fitted" in said
    assert main([*map(str, words), str(run / "fitted")]) == 0
    assert f"{run}/fitted holds a model, which this command replaces" in capfd.readouterr().err
    assert main([*map(str, words), str(run / "new")]) == 0
    assert json.loads((run / "new/fit.json").read_text())["data"] == f"{pair[1].name}/pairs.safetensors"
    assert "which this command replaces" not in capfd.readouterr().err


@pytest.mark.parametrize("file", ["config.json", "open_clip_config.json", "model.safetensors", "pytorch_model.bin"])
def test_a_folder_with_files_of_another_program_is_refused_and_left_as_it_is(
    pair, file, tmp_path, capsys, never_embeds
):
    (tmp_path / file).write_text('{"architectures": ["BertModel"]}')
    said = refused(capsys, "--model", f"local-dir:{pair[0]}", *DATA, "--output", tmp_path)
    assert f"has files of another model, program or run ({file})" in said
    assert (tmp_path / file).read_text() == '{"architectures": ["BertModel"]}' and len(list(tmp_path.iterdir())) == 1


def test_pairs_of_another_model_of_the_same_width_are_refused(pair, tmp_path, capsys):
    before, after = pair
    other = shutil.copytree(before, tmp_path / "other")
    weights = other / ("model.safetensors" if (other / "model.safetensors").exists() else "open_clip_model.safetensors")
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("ln_final.weight"))
    save_file(tensors | {name: tensors[name] * 1.001}, weights, {"format": "pt"})
    given = ["--model", f"local-dir:{other}", *SMALL, "--output", tmp_path / "out", "--pairs"]
    assert "embedded by another model" in refused(capsys, *given, after / "pairs.safetensors")
    assert not (tmp_path / "out").exists()
    unknown = {name: x for name, x in load_file(after / "pairs.safetensors").items() if name != "model"}
    save_file(unknown, tmp_path / "old.safetensors")
    assert main([*map(str, given), str(tmp_path / "old.safetensors")]) == 0
    assert "does not name the model that embedded it" in capsys.readouterr().err
    first = unknown["image_first"]
    save_file(unknown | {"image_first": torch.cat([first, first], 1)}, tmp_path / "wide.safetensors")
    assert main([*map(str, given), str(tmp_path / "wide.safetensors")]) == 2
    assert "error: image_first of the pairs has" in capsys.readouterr().err


def test_pairs_fit_the_same_model_with_variances_too(pair, tmp_path):
    """The fingerprint is of what the means depend on."""
    fit(pair[1], tmp_path / "out", "--pairs", pair[1] / "pairs.safetensors")
    assert Embedder.load(f"local-dir:{tmp_path}/out").score.units is not None


def test_a_method_whose_own_layers_change_the_means_is_refused(tmp_path, capsys, never_embeds):
    save_pretrained(prolip.create_model("ProLIP-ViT-test", method_cfg={"name": "pcme"}), tmp_path / "model")
    said = refused(capsys, "--model", f"local-dir:{tmp_path}/model", *DATA, "--output", tmp_path / "out")
    assert "the method pcme has its own layers" in said
