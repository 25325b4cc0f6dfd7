"""Models of OpenCLIP's towers with readers in every use: each method trains them, each command takes them."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import miniatures as mini
import numpy as np
import pytest
import torch
from clip_benchmark_runs import evaluate as benchmark
from commands import evaluate, run
from explored import make_app
from PIL import Image
from small_towers import NAMES, inputs, small_config, small_folder, small_towers
from tiny_tars import write_tar

import prolip
from prolip import export
from prolip.embedder import Embedder
from prolip.embeddings import UnpairedEmbeddings
from prolip.gaussian import Gaussian
from prolip.methods import FURTHER, METHODS, find_method, score_of
from prolip.methods.base import Context
from prolip.models.checkpoint import CheckpointError, save_pretrained
from prolip.models.diagnose import READERS
from prolip.uncertainty.token_stats import encode_with_stats

#: One of every kind that differs in its uses: timm's tower, a pyramid; transformers' text, a decoder, native towers.
SLOW = ("xlm-roberta-base-ViT-B-32", "coca_ViT-B-32", "ViT-B-16")
KINDS = ["ViT-B-16-SigLIP2", "convnext_base", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
TEXT = "a photo of the red car green tree blue sea small dog old house snow this is friend thing key some more words"
WORDS = [*TEXT.split(), "group", "sub"]


def write_tokenizer(folder: Path, pad: int) -> Path:
    """A tokenizer of whole words, in transformers' format, which pads with this id."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    ends = {"<pad>": pad, "</s>": 1 - pad, "<unk>": 2}
    raw = Tokenizer(models.WordLevel(ends | {word: 3 + i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1 - pad)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **special).save_pretrained(str(folder))
    return folder


#: One that has a text tower of transformers' and an image tower of timm's; the others are slow.
EXPORTED = "nllb-clip-base-siglip"
EACH = [name if name == EXPORTED else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    """`local-dir:` of a small saved model with readers, whose traces differ, with a tokenizer that fits it."""
    place, name = tmp_path_factory.mktemp("uses"), request.param
    config = small_config(name)
    if "SigLIP" not in name:  # timm's ViT has its own size
        config["vision_cfg"]["image_size"] = 64
    foreign = "hf_tokenizer_name" in config["text_cfg"]
    if not foreign:
        config["text_cfg"]["vocab_size"] = 49408
    with small_towers(place / "transformers"):
        plain = small_folder(name, place / name, config)
        made = prolip.create_model(f"local-dir:{plain}", init_unc_bias=-4.0, init_unc_gain=1.0)
        files = write_tokenizer(place / "words", made.pad_token_id) if foreign else "bpe"
        tokenizer = prolip.get_tokenizer(f"local-dir:{plain}", tokenizer=files)
        yield f"local-dir:{save_pretrained(made, place / 'model', tokenizer=tokenizer)}"


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Write labelled and captioned images in clip_benchmark's layout, and a corpus of drawings with concepts."""
    root = tmp_path_factory.mktemp("sets")
    for seed, name in enumerate(("single", "other")):
        mini.wds_classification(root / name, mini.CLASSES[:6], seed=seed)
    mini.wds_retrieval(root / "pairs", images=36)
    samples = []
    for i in range(12):
        record = {"hexcode": str(i), "name": f"red thing {WORDS[i]}", "style": "flat"}
        record |= {"group": f"group {WORDS[i % 2]}", "subgroup": f"sub {WORDS[i % 4]}"}
        record |= {"keywords": [f"blue {WORDS[i % 3]}", "some more words"]}
        samples.append((f"flat-{i}", {"png": mini.picture(i), "json": json.dumps(record).encode()}))
    write_tar(root / "flat.tar", samples)
    return root


def test_tasks_and_clip_benchmark_agree(model, sets, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = evaluate(["--model", model, "--data", sets / "single", "--data", sets / "pairs"])
    assert len(found) == 2
    theirs = benchmark(sets / "single", "--model", model, "--model_type", "prolip")["metrics"]
    assert theirs["acc1"] == pytest.approx(found[0].metrics["acc1"], abs=1e-6)


def test_an_index_is_built_and_answers(model, sets, tmp_path, capsys):
    place = tmp_path / "index"
    run("search", "build", place, "--data", f"shards:{sets}/flat.tar", "--model", model)
    capsys.readouterr()
    run("search", "query", place, "--text", "red car", "--top", "2")
    said = capsys.readouterr().out
    assert said.count("flat-") == 2 and "match probability" in said
    assert make_app([str(place)]) is not None


def test_data_are_scored_and_selected(model, sets, tmp_path):
    data = ("--data", f"shards:{sets}/flat.tar", "--caption-sampling", "name")
    run("curate", "score", *data, "--model", model, "--output", tmp_path / "scores")
    run("curate", "select", tmp_path / "scores", "--keep", "0.5", "--rank-by", "normalised_score", "--yes")
    run("curate", "write", tmp_path / "scores", "--output", tmp_path / "kept")
    assert any((tmp_path / "kept").iterdir())


def test_classifiers_with_and_without_examples_predict(model):
    pictures = [Image.open(io.BytesIO(mini.picture(i))) for i in range(8)]
    zero = prolip.ZeroShotClassifier(model, ["red car", "green tree"]).fit()
    assert set(zero.predict(pictures)) <= {"red car", "green tree"}
    few = prolip.FewShotClassifier(model).fit(pictures, ["red car", "green tree"] * 4)
    assert np.isfinite(few.predict_proba(pictures)).all()


def test_hierarchies_are_walked(model, sets, capsys):
    run("hierarchy", "traverse", "--model", model, "--data", sets / "flat.tar", "--top", "3", "--steps", "9")
    assert capsys.readouterr().out.count("[ROOT]") == 3
    run("hierarchy", "entailment", "--model", model, "--data", sets / "flat.tar", "--intervals", "20")


def test_a_card_is_written_with_the_model(model, tmp_path):
    run("hub", "save", model.removeprefix("local-dir:"), "--output", tmp_path / "shared")
    again = Embedder.load(f"local-dir:{tmp_path}/shared")
    assert again.fingerprint == Embedder.load(model).fingerprint
    assert "README.md" in {path.name for path in (tmp_path / "shared").iterdir()}


def test_variances_are_fitted_to_the_means_in_closed_form(model, sets, tmp_path, capsys):
    """The fitted model has the means of the first, bit for bit, and novelty of both sides."""
    data = f"shards:{sets}/pairs/test/{{0,1}}.tar"
    sizes = ("--bank", "32", "--centres", "4", "--novelty-centres", "4")
    run("uncertainty", "--model", model, "--data", data, "--output", tmp_path / "fitted", *sizes)
    assert "no novelty" not in capsys.readouterr().out
    before, after = Embedder.load(model), Embedder.load(f"local-dir:{tmp_path}/fitted")
    pixels = before.preprocess(Image.open(io.BytesIO(mini.picture(1))))[None]
    for batch, side in ((pixels, "image"), (before.tokenizer(["red car"]), "text")):
        old, new = (getattr(one, f"encode_{side}")(batch).mean for one in (before, after))
        assert torch.equal(old, new) and {"mean", "first"} == after.encode(batch, side).novelty.keys()
    assert after.score.units is not None


def test_first_tokens_are_those_of_the_first_block(model):
    """Bit for bit what OpenCLIP's tower gives its first block, of images and of texts."""
    network = prolip.create_model(model).eval()
    pixels, ids = torch.randn(2, 3, *network.image_size), torch.randint(3, 30, (2, network.context_length))
    for batch, side, tower in ((pixels, "image", network.visual), (ids, "text", network.text)):
        first = encode_with_stats(network, batch, side).token_stats
        assert first.shape == (2, 2 * tower.first_width) and first.isfinite().all()
        assert not torch.equal(first[0], first[1])


def test_the_corpus_is_evaluated_and_its_figures_are_drawn(model, sets, tmp_path, capsys):
    run("eval", "emoji", "--model", model, "--data", sets / "flat.tar", "--output", tmp_path / "corpus")
    assert (tmp_path / "corpus/metrics.json").is_file()
    run("figures", "--model", model, "--data", sets / "flat.tar", "--only", "4", "--output", tmp_path / "figures")
    assert any((tmp_path / "figures").iterdir())


def test_a_folder_that_has_lost_its_readers_is_refused(model, tmp_path):
    shutil.copytree(model.removeprefix("local-dir:"), tmp_path / "lost")
    (tmp_path / "lost" / READERS).unlink()
    with pytest.raises(CheckpointError, match=f"{READERS} is not next to it: copy it there"):
        prolip.create_model(f"local-dir:{tmp_path}/lost")


@pytest.mark.parametrize("name", EACH)
def test_graphs_of_every_combination_equal_the_model(name, tmp_path):
    """Check any number of rows, in PyTorch and (slow) in onnxruntime."""
    with small_towers(tmp_path / "transformers"):
        made = prolip.create_model(f"local-dir:{small_folder(name, tmp_path / name)}", init_unc_gain=1.0).eval()
        for way, write in export.WAYS.items() if name != EXPORTED else [("pt2", export.WAYS["pt2"])]:
            found = export.largest_differences(made, write(made, tmp_path / way), (1, 3))
            assert max(found.values()) <= 1e-4, (way, found)


# --- methods ---
ROWS = 4
#: Methods whose heads make means of their own.
HEADS = ("pcme", "pcmepp", "vacsr")
#: In the default profile: all methods of one combination, of others those with heads (their tokens differ).
WHOLE, FEW = "ViT-B-16-SigLIP", ("convnext_base", "xlm-roberta-base-ViT-B-32")


def cells(*few):
    """(combination, method), most of them slow; few: further combinations whose heads are tried by default."""
    quick = {(WHOLE, method) for method in METHODS} | {(name, method) for name in few for method in HEADS}
    every = [(name, method) for name in NAMES for method in METHODS]
    return [pytest.param(*cell, marks=[] if cell in quick else pytest.mark.slow) for cell in every]


@pytest.fixture(autouse=True)
def seeded():
    """No loss is zero by chance."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Function from a combination to its small model, in OpenCLIP's format."""
    place, made = tmp_path_factory.mktemp("small"), {}
    with small_towers(place / "transformers"):
        yield lambda name: made.get(name) or made.setdefault(name, small_folder(name, place / name))


def batch_of(model, method):
    """Images, and texts with an end and padding, as a run with the method hands them over."""
    images, ids = inputs(model, ROWS)
    text = {"source-free": {}, "likelihood": {"text": ids[:, None]}}.get(method, {"text": ids})
    return {"image": images, "key": [f"k{i}" for i in range(ROWS)], **text}, ids


def look(objective, model, batch, ids):
    """Let source-free find its pairs among the batch."""
    with torch.no_grad():
        found = model.encode_image(batch["image"]), model.encode_text(ids)
    images, texts = (Gaussian(z.mean, torch.zeros_like(z.mean)) for z in found)
    novelty = {"image_novelty": {}, "text_novelty": {}}
    pool = UnpairedEmbeddings(keys=batch["key"], image=images, text=texts, text_ids=ids, **novelty)
    objective.pool_state = objective.before_training(score_of(model), pool)


def settings_of(method, **more):
    """Return settings without known matches, which these batches lack."""
    kind = find_method(method).config
    return kind(**({"known_matches": False} if "known_matches" in kind.__dataclass_fields__ else {}), **more)


def objective_of(folder, method, **more):
    chosen, config = find_method(method), settings_of(method, **more)
    own = {"name": method} | ({"config": vars(config)} if chosen.extend else {})
    model = prolip.create_model(f"local-dir:{folder}", **({} if chosen.adapts else {"method_cfg": own}))
    return chosen.objective(model, config, Context(total_steps=2))


@pytest.mark.parametrize("name, method", cells(*FEW))
def test_two_steps_of_a_method_move_all_that_it_reads(folders, name, method):
    objective = objective_of(folders(name), method)
    model = objective.model
    batch, ids = batch_of(model, method)
    if method == "source-free":
        look(objective, model, batch, ids)
    before = {name: x.clone() for name, x in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(2):
        optimizer.zero_grad(set_to_none=True)
        loss = objective(objective.prepare(dict(batch), step))["loss"]
        loss.backward()
        assert loss.isfinite()
        assert not [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        optimizer.step()
        objective.after_step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(before[name], p)}
    assert {"visual.tower", "text.tower"} <= {".".join(name.split(".")[:2]) for name in moved}


@pytest.mark.parametrize("name, method", cells())
def test_means_begin_as_openclips_or_the_log_says_that_they_are_new(folders, name, method):
    """Heads that must keep the means keep them, without a warning."""
    plain = prolip.create_model(f"local-dir:{folders(name)}").eval()
    batch, ids = batch_of(plain, method)
    for pooled in (True, False) if method in HEADS else (None,):
        more = {} if pooled is None else {"pooled_heads": pooled}
        objective = objective_of(folders(name), method, **more)
        model = objective.model.eval()
        with torch.no_grad():
            pairs = (
                (model.encode_image(batch["image"]).mean, plain.encode_image(batch["image"]).mean),
                (model.encode_text(ids).mean, plain.encode_text(ids).mean),
            )
        furthest = max((own - theirs).abs().max() for own, theirs in pairs)
        said = [line for line in objective.notes(ROWS) if "--no-pooled-heads" in line]
        assert (furthest > 1e-2, len(said)) == (True, 1) if pooled else (furthest < 1e-5, len(said)) == (True, 0)


def test_scale_and_bias_are_openclips_where_the_means_are(folders):
    own = prolip.create_model(f"local-dir:{folders(WHOLE)}")
    kept = objective_of(folders(WHOLE), "pcmepp", pooled_heads=False)
    assert torch.equal(kept.model.logit_scale, own.logit_scale) and kept.balances(kept.config)
    new = objective_of(folders(WHOLE), "pcmepp")
    assert new.model.logit_bias.item() == -5 and not new.balances(new.config)


def test_a_method_that_cannot_train_such_a_model_says_so_before_anything_is_built(tmp_path):
    """Masked views of images that no square divides."""
    from prolip.utils.flags import FlagError
    from training.config import build_config
    from training.model import build_model

    values = {"model": {"model": "RN50", "force_image_size": 225}, "data": {"train_data": "x.tar"}}
    with pytest.raises(FlagError, match=r"--method prolip does not support --model RN50 \(ModifiedResNet; causal.*224"):
        build_model(build_config("prolip", values), torch.device("cpu"))


def test_a_head_of_ones_own_sees_the_tokens_of_openclips_towers(folders, monkeypatch):
    """The documented example, whose head knows nothing of kinds of towers."""
    monkeypatch.setenv(FURTHER, "near_method")
    objective = objective_of(folders("convnext_base"), "near")
    batch, _ = batch_of(objective.model, "near")
    objective(objective.prepare(batch, 0))["loss"].backward()
    shifts = [tower.head.shift.weight.grad for tower in objective.model.towers().values()]
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in shifts)
