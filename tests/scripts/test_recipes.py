"""The recipes of published sets: their values are the papers', and they train, stop, resume and are evaluated."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path

import miniatures as mini
import open_clip
import pytest
import torch
from commands import evaluate
from safetensors.torch import load_file
from training_runs import assert_same_state, newest, stop_after

from prolip.cli.command import parser_of
from prolip.cli.main import find
from prolip.models.registry import get_model_config
from studies.papers import papers
from training.health.signals import EXIT_STOPPED
from training.main import main, parse
from training.model import build_model

ROOT = Path(__file__).parents[2]

RECIPES = ROOT / "scripts/recipes"
#: Those of data that users bring, by the word of their data.
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml") if re.match(r"(coco|cub|flickr|iapr)-", path.name))
ADAPTING = {"flickr-to-coco-source-free": ("flickr", "coco"), "iapr-to-flickr-source-free": ("iapr", "flickr")}
#: Stopped and resumed in every run of the tests; the others, with the same kinds of steps, in the slow ones.
RESUMED = ("coco-pcmepp", "cub-pcme", "iapr-to-flickr-source-free")
#: Those whose heads are new, and the width that these have.
HEADS = {"coco-pcme": 1024, "coco-pcme-rerun": 1024, "coco-pcmepp": 1024, "coco-vacsr": 1024, "cub-pcme": 512}


def commands(name: str) -> list[list[str]]:
    """Return the commands in a recipe's head, as words after `python -m` or `prolip eval`; all words of a script."""
    text = re.sub(r" \\\n# +", " ", (RECIPES / f"{name}.yaml").read_text())
    begin = r"python -m|prolip eval|python(?= scripts/studies/papers/papers\.py)"
    return [shlex.split(line) for line in re.findall(rf"^#     (?:{begin}) (.+)$", text, re.M)]


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_in_its_head_can_be_typed_and_are_of_this_recipe(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = commands(name)
    recipes = [words[words.index("--config") + 1] for words in found if words[0] == "training.main"]
    assert recipes[-1] == f"scripts/recipes/{name}.yaml"
    for program, *words in found:
        if program == "training.main":
            config = parse(words)
            assert config.run.epochs and config.data.train_data and config.run.global_batch_size == 128
        elif program == "scripts/studies/papers/papers.py":
            assert papers.find_printed(words[:1]) and words[1:] == ["--results", "found.json"]
        else:
            command, rest = find(["eval", program, *words])
            assert parser_of(command).parse_strictly(rest).output == "found.json"
    assert [words[0] for words in found][-2:] == ["tasks", "scripts/studies/papers/papers.py"]


def config_of(name: str):
    """Return the config of the recipe's own command."""
    return parse([words for words in commands(name) if words[0] == "training.main"][-1][1:])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ADAPTING])
def test_training_is_that_of_the_papers_appendix(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = config_of(name)
    optim, run = config.optim, config.run
    assert (optim.opt, optim.warmup) == ("adamp", 0)
    backbones, rows, dim = (optim.image_lr_mult, optim.text_lr_mult), run.global_batch_size, HEADS.get(name)
    assert getattr(config.objective, "head_dim", None) == dim
    if name in ("coco-pcme", "cub-pcme"):  # PCME C.2, and the released configurations
        heads, lr, start, kl, uniformity, slow = {
            "coco": (30, 2e-4, 15, 1e-5, 0, 0.1),
            "cub": (10, 1e-4, 5, 1e-3, 10, 1.0),
        }[name[:-5]]
        assert (run.epochs, optim.image_freeze_epochs, optim.text_freeze_epochs) == (60, heads, heads)
        assert (optim.lr, optim.lr_scheduler, config.data.word_drop) == (lr, "cosine", 0.1)
        assert (optim.wd, backbones, optim.grad_clip_norm) == (0, (slow, slow), 2 / (2 * rows))
        assert (config.augment.erase_prob, config.augment.cutout) == (0.2, 0)
        # of sums over 2 B^2 pairs and over B x D; tests of the method compare these weights with the sums themselves
        objective = config.objective
        assert (objective.match_samples, objective.match_start) == (7, start)
        assert objective.kl_weight == pytest.approx(kl * dim / 2)
        assert objective.uniformity_weight == uniformity / (2 * rows)
    else:  # PCME++ B.2 and Table B.1
        clip = {"coco-pcme-rerun": 2 / (2 * rows), "coco-vse": 2 / rows, "coco-triplet-sum": 2 / rows}.get(name, 2)
        assert (backbones, optim.grad_clip_norm) == ((0.01, 0.1), clip)
        assert (run.epochs, optim.lr, optim.wd, optim.layer_decay) == (25, 5e-4, 1e-4, 0.7)
        assert (optim.beta1, optim.beta2, optim.eps) == (0.9, 0.999, 1e-8)
        assert (optim.image_freeze_epochs, optim.text_freeze_epochs, optim.unfreeze_warmup_epochs) == (2, 0, 1)
        assert (optim.lr_scheduler, optim.lr_milestones, optim.lr_step_factor) == ("step", (0.6,), 0.1)
        assert config.augment.token_shares == (0.1, 0.02, 0.08)
        assert optim.swa_epochs == (10 if name == "coco-pcmepp" else 0)
    if name == "coco-pcme-rerun":  # VIB's 1e-4 is a mean next to a sum over 2 B^2 pairs
        assert (config.objective.match_start, config.objective.kl_weight) == (5, 1e-4 / (2 * rows))
    if name == "coco-vse":
        assert config.objective.sum_steps == 2 * (config.data.train_num_samples // rows)
    if name == "coco-pcmepp":
        assert config.objective.pseudo_positives == "first"
    if name == "coco-vacsr":
        assert (config.objective.component_noise, config.objective.kl_weight) == ("independent", 5e-4)
    if name != "cub-pcme":
        assert config.data.train_num_samples == 5 * 113_287


@pytest.mark.parametrize("name", ADAPTING)
def test_adaptation_has_the_papers_neighbourhood_and_its_source_two_epochs_of_all_negatives(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert config_of(name).objective.neighbours == 300
    source = parse(commands(name)[0][1:])
    steps = source.data.train_num_samples // source.run.global_batch_size
    assert source.objective.sum_steps == 2 * steps


@pytest.mark.parametrize("page", ["docs/reference/recipes.md", *(f"scripts/recipes/{name}.yaml" for name in NAMES)])
def test_every_rsum_that_is_said_is_printed_in_a_paper(page):
    printed = {row["rsum"] for table in papers.PRINTED for _, row in table.rows if "rsum" in row}
    printed |= {row["coco_1k/rsum"] for table in papers.PRINTED for _, row in table.rows if "coco_1k/rsum" in row}
    sums = {"551.8", "534.3"}  # of six figures of VACSR's Table 1, and of VSE-infinity's in PCME++'s C.8 to C.11
    said = set(re.findall(r"\b[2-5]\d\d\.\d\b", (ROOT / page).read_text()))
    assert said <= printed | sums
    assert said or page.endswith(("coco-prolip.yaml", "-likelihood.yaml", "-triplet-sum.yaml", "-pcme.yaml"))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ADAPTING])
def test_training_begins_with_openais_weights_by_names_that_openclip_knows(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    wanted, head = config_of(name).model, (RECIPES / f"{name}.yaml").read_text()
    assert (wanted.model, wanted.pretrained, wanted.image_resize_mode) == ("ViT-B-16-quickgelu", "openai", "squash")
    for model in {wanted.model, *re.findall(r"ViT-[BL]-\d\d\S*quickgelu", head)}:
        assert open_clip.get_pretrained_cfg(model, "openai")["hf_hub"]
        assert get_model_config(model, tag="openai")[0]["quick_gelu"]
    assert ("--no-pooled-heads" in head) == (name in HEADS)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ADAPTING])
def test_step_0_has_clips_embedding_but_where_heads_of_the_papers_are_new(name, clip, sets):
    data = sets[name.split("-")[0]]
    begin = ["--config", str(RECIPES / f"{name}.yaml"), "--train-data", data, "--val-data", data, *clip]
    theirs, _, _ = open_clip.create_model_and_transforms(clip[1], pretrained=clip[3])
    generator = torch.Generator().manual_seed(0)
    images, texts = torch.randn(3, 3, 32, 32, generator=generator), open_clip.get_tokenizer(clip[1])(["a", "b c", "d!"])
    for words in ([], ["--no-pooled-heads"]) if name in HEADS else ([],):
        model, _, preprocess = build_model(parse([*begin, *words]), torch.device("cpu"))
        model.eval()
        assert "Resize(size=(32, 32)" in repr(preprocess)  # squashed
        with torch.no_grad():
            means = model.encode_image(images).mean, model.encode_text(texts).mean
            wanted = theirs.encode_image(images, normalize=True), theirs.encode_text(texts, normalize=True)
        if name in HEADS and not words:
            assert [x.shape[1] for x in means] == 2 * [HEADS[name]] and model.config["embed_dim"] == 32
        else:
            for mean, own in zip(means, wanted):
                torch.testing.assert_close(mean, own, rtol=0, atol=1e-5)


# --- runs on miniatures -----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> dict[str, str]:
    """Word -> the miniature's address, each of its splits there."""
    root = tmp_path_factory.mktemp("sets")
    birds = mini.cub(root / "birds", species=5, images=4)
    found = {"cub": f"cub:{birds[0]},{birds[1]}", "iapr": f"iapr:{mini.iapr(root / 'iaprtc12', images=200)}"}
    for word, dataset in (("coco", "coco"), ("flickr", "flickr30k")):
        file, images = mini.karpathy(root / word, images=35, dataset=dataset)
        content = json.loads(file.read_text())
        for number, record in enumerate(content["images"]):
            record["split"] = "train" if number < 12 else "restval" if number < 16 else "val" if number < 26 else "test"
        file.write_text(json.dumps(content))
        found[word] = f"{word}:{file},{images}"
    return found


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> list[str]:
    """A tiny architecture of OpenCLIP's by its name, and the file of its weights."""
    folder = tmp_path_factory.mktemp("clip")
    config = mini.TINY_CLIP | {"quick_gelu": True, "text_cfg": mini.TINY_CLIP["text_cfg"] | {"layers": 2}}
    (folder / "ViT-recipe-quickgelu.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / "ViT-recipe-quickgelu.json")
    torch.manual_seed(0)
    torch.save(open_clip.CLIP(**config).state_dict(), folder / "clip.pt")
    return ["--model", "ViT-recipe-quickgelu", "--pretrained", str(folder / "clip.pt")]


def words_of(recipe: str, data: str, folder: Path, name: str, *more: object) -> list[str]:
    """A recipe's run in five epochs of a step: stages, milestones and averages keep their places in it."""
    begin = ["--config", str(RECIPES / f"{recipe}.yaml"), "--train-data", data, "--val-data", data]
    config = parse(begin)
    given = {"batch_size": 8, "workers": 0, "train_num_samples": 8, "epochs": 5, "precision": "fp32", "device": "cpu"}
    given |= {"log_every_n_steps": 1, "val_frequency": 5, "warmup": min(1, config.optim.warmup)}
    given |= {"output": folder, "name": name}
    if config.optim.swa_epochs:
        given["swa_epochs"] = 2
    if config.optim.text_freeze_epochs:
        given |= {"image_freeze_epochs": 3, "text_freeze_epochs": 2}
    given |= {key: 2 for key in ("neighbours", "sum_steps") if hasattr(config.objective, key)}
    flags = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    return [*begin, *flags, *map(str, more)]


@pytest.fixture(scope="module")
def prepared(sets, clip, tmp_path_factory):
    """Recipe -> its data, and whose weights it begins with: CLIP's, or a source's that was trained as its head says."""
    folder = tmp_path_factory.mktemp("sources")

    def prepare(recipe: str) -> tuple[str, list[str]]:
        if recipe not in ADAPTING:
            return sets[recipe.split("-")[0]], clip
        source, target = ADAPTING[recipe]
        (told,) = (words for words in commands(recipe) if words[0] == "training.main" and "--model" not in words)
        flags = [flag for flag in ("--best-metric", "--val-split") if flag in told]
        chosen = [word for flag in flags for word in told[told.index(flag) :][:2]]
        begun = words_of("coco-vse", sets[source], folder, source, *clip, *chosen)
        assert main(begun) == 0
        return sets[target], ["--model", f"local-dir:{folder / source / 'best'}"]

    return prepare


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    """Recipe -> its whole run, where it is the first to ask for it, and what begins its command line."""
    folder, done = tmp_path_factory.mktemp("runs"), {}

    def train(recipe: str) -> tuple[Path, list[str]]:
        if recipe not in done:
            data, begin = prepared(recipe)
            begun = words_of(recipe, data, folder, recipe, *begin)
            assert main(begun) == 0
            done[recipe] = folder / recipe, begun
        return done[recipe]

    return train


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_trains_and_is_evaluated_beside_the_papers_rows(name, trained, tmp_path, capsys):
    run, begun = trained(name)
    losses = [row["loss"] for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    assert len(losses) == 5 and all(map(math.isfinite, losses))
    (told,) = (words for words in commands(name) if words[0] == "tasks")
    ((_, published, *_),) = (words for words in commands(name) if words[0] == "scripts/studies/papers/papers.py")
    kept = told[told.index("--model") + 1]
    split = ["--split", told[told.index("--split") + 1]] if "--split" in told else []
    model, data = f"local-dir:{run / Path(kept).name}", begun[begun.index("--val-data") + 1]
    (result,) = evaluate(["--model", model, "--data", data, *split, "--output", str(tmp_path / "found.json")])
    capsys.readouterr()
    papers.main([published, "source-free", "--results", str(tmp_path / "found.json")])
    found = capsys.readouterr().out.partition("PCME Table E.2, cub" if name == "cub-pcme" else "Source-free Table II,")
    assert result.info["images"] == (4 if split else 10) and found[1]
    assert result.key in found[2] and f"{100 * result.metrics['i2t/R@1']:.2f}" in found[2]
    metric = parse(begun).val.best_metric
    assert not metric or json.loads((run / "best/best.json").read_text())["metric"] == metric
    assert (run / "model_swa/readers.safetensors").exists() == (name == "coco-pcmepp")


@pytest.mark.parametrize(
    "name", [name if name in RESUMED else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_a_stopped_recipe_goes_on_as_if_it_had_not_been(name, trained, tmp_path):
    whole, begun = trained(name)
    parts = [*begun, "--output", str(tmp_path)]
    assert stop_after(3, parts) == EXIT_STOPPED
    assert main([*parts, "--resume", "latest"]) == 0
    assert_same_state(newest(whole), newest(tmp_path / name))


def test_adaptation_begins_with_zero_shot_clip_as_in_table_ii(sets, clip, tmp_path):
    name = "iapr-to-flickr-source-free"
    assert "# --model ViT-B-32-quickgelu --pretrained openai" in (RECIPES / f"{name}.yaml").read_text()
    assert main(words_of(name, sets["flickr"], tmp_path, name, *clip)) == 0
    rows = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 5 and all(map(math.isfinite, losses))
    trained = load_file(tmp_path / name / "model/open_clip_model.safetensors")
    begun = torch.load(clip[3], weights_only=True)
    assert not torch.equal(trained["visual.proj"], begun["visual.proj"])
    assert trained["visual.proj"].shape == begun["visual.proj"].shape
