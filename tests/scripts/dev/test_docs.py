"""Commands in README and docs can be typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import fitted_models
import open_clip
import pytest
import torch

import prolip
from dev import openclip_table, reference
from prolip.data.reading.shard_index import build_index
from prolip.embedder import Embedder
from prolip.evaluation.suites.datacomp.catalogue import TASKS
from prolip.models.checkpoint import save_pretrained
from training.main import parse

ROOT = Path(__file__).parents[3]

PAGES = ["README.md", "slurm/README.md", "data/emoji/README.md", "data/emoji/LICENSES/README.md"]
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))


def test_the_generated_pages_of_the_reference_are_the_codes():
    assert reference.commands_page() == (ROOT / "docs/reference/commands.md").read_text()
    assert reference.config_page() == (ROOT / "docs/reference/config.md").read_text()


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", prose, re.M)}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_lead_somewhere(page):
    path = ROOT / page
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", path.read_text()):
        target = (path.parent / link) if link else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), f"{link}#{anchor}"


def commands(page: str) -> list[str]:
    """The commands of a page, continued lines joined, comments dropped."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.S | re.M) + re.findall(r"(?:^ {4}python .*\n)+", text, re.M)
    lines = [line for block in blocks for line in re.sub(r"\\\n", " ", block).splitlines()]
    return [re.sub(r"(^|\s)#.*", "", line) for line in lines]


def source_of(words: list[str]) -> tuple[str, list[Path]] | None:
    """The program that a command starts, with the files that define its flags; None if it is none of ours."""
    if "clip-benchmark" in words:
        from importlib.util import find_spec

        own = ROOT / "src/prolip/cli/eval.py"
        return "clip-benchmark", [own, Path(find_spec("clip_benchmark").origin).parent / "cli.py"]
    for word in words:
        assert not word.startswith("prolip.") or "-m" not in words, word  # `prolip VERB` starts what is there
        if re.match(r"(scripts|slurm|tests)/.*\.(py|sbatch)$", word):
            assert (ROOT / word).exists(), word
            return word, [ROOT / word]
    return None


@pytest.mark.parametrize("page", PAGES)
def test_commands_start_what_exists_with_flags_that_it_has(page):
    for line in commands(page):
        try:
            words = shlex.split(line)
        except ValueError:  # the first or last line of a loop
            continue
        found = source_of(words)
        if found is None or found[0].endswith((".sbatch", "simulate_steps.py")):
            continue  # tested with the scripts and the planner
        name, files = found
        first = next(i for i, word in enumerate(words) if word == name)
        text = "".join(file.read_text() for file in files)
        flags = [word.split("=")[0] for word in words[first:] if word.startswith("--") and len(word) > 2]
        known = {flag: rf"""["'](?:{flag}|{flag[2:].replace("-", "_")})["']""" for flag in flags}  # or the field's name
        assert [flag for flag in flags if not re.search(known[flag], text)] == [], line


def test_architecture_md_names_files_that_exist():
    tree = re.search(r"```\nsrc/prolip/(.*?)```", (ROOT / "docs/developing/architecture.md").read_text(), re.S)[1]
    there = {path.name for folder in ("src", "scripts") for path in (ROOT / folder).rglob("*.py")}
    assert set(re.findall(r"(?<!\*)\b\w+\.py", tree)) - there == set()


def test_tests_that_pages_name_exist():
    for page in PAGES:
        for name in re.findall(r"tests/[\w/.]+\.py|tests/[\w/]+\w(?![\w./])", (ROOT / page).read_text()):
            assert (ROOT / name).exists(), f"{page}: {name}"


def test_python_of_formats_md_reads_shards_with_an_index(tmp_path, capsys):
    shard, index = str(ROOT / "data/emoji/emojione.tar"), str(tmp_path / "index.json")
    build_index([shard], index)
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/reference/formats.md").read_text(), re.S | re.M)
    names: dict = {}
    exec(code.replace("s3://bucket/index.json", index).replace("s3://bucket/{00000..00009}.tar", shard), names)
    assert "json" in names["raw"] and names["image"].mode == "RGB" and names["faults"].summary()["samples"] == 0


def test_data_sets_md_lists_the_tasks_of_datacomp():
    page = (ROOT / "docs/reference/data_sets.md").read_text()
    for task in TASKS:
        name = task.folders[0].removeprefix("wds_").removesuffix("_test")
        assert f"| {task.name} | `{name}` | {task.size:,}" in page, task.name


KINDS = ("likelihood", "openclip", "prolip", "fitted openclip", "pcme", "vacsr", "vse", "siglip")


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_python_of_share_md_computes_the_models_own_score(kind, tmp_path, monkeypatch):
    if kind == "likelihood":
        name = fitted_models.fitted_model(tmp_path)
    elif kind.endswith("openclip"):
        name = fitted_models.fitted_openclip(tmp_path)
        if kind == "openclip":
            (Path(name.removeprefix("local-dir:")) / "uncertainty.safetensors").unlink()
    else:
        torch.manual_seed(0)
        model = prolip.create_model("ProLIP-ViT-test", method_cfg={"name": kind}, init_unc_bias=-3.0, init_unc_gain=1.0)
        name = f"local-dir:{save_pretrained(model, tmp_path / 'model')}"
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/guides/share.md").read_text(), re.S | re.M)
    (code,) = (block for block in blocks if "export_onnx" in block)
    assert code.count("local-dir:runs/demo/model") == 1
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code.replace("local-dir:runs/demo/model", name), names)
    assert {path.name for path in (tmp_path / "runs/demo/onnx").iterdir()} == {"image.onnx", "text.onnx"}
    own, given = Embedder.load(name), names["score"]
    scores = own.score.pairwise(own.encode_image(names["pixels"]), own.encode_text(names["ids"]))
    torch.testing.assert_close(names["scores"], scores, atol=1e-4, rtol=1e-4)
    logits, facts = own.score.logit(scores), names["facts"]
    assert (logits is None) == (names["logits"] is None) == (kind in ("openclip", "vse", "pcme"))
    if logits is not None:
        torch.testing.assert_close(names["logits"], logits, atol=1e-3, rtol=1e-4)
    if kind in ("prolip", "siglip", "openclip"):
        trained = [own.logit_scale, own.logit_bias]
        assert [facts["logit_scale"], facts["logit_bias"]] == [given.scale, given.bias] == trained
    else:
        assert not {"logit_scale", "logit_bias"} & facts.keys()


def test_notice_names_what_requirements_and_the_extras_name():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines += sum(project["optional-dependencies"].values(), [])
    wanted = {re.split(r"[<>=~!\[ ]", line)[0] for line in lines if line and not line.startswith("#")}
    assert {"torch", "pyyaml", "moto", "transformers"} <= wanted
    named = re.split(r"[\s,()]+", (ROOT / "NOTICE").read_text().split("3. Dependencies")[1])
    assert wanted - set(named) == set()


@pytest.mark.parametrize("page", ["docs/guides/train.md"])
def test_training_commands_are_taken_by_the_program(page):
    trainings = [re.search(r"(?:training\.main|prolip train) (--.*)$", line) for line in commands(page)]
    found = [match[1] for match in trainings if match]
    tried = [words for words in found if "--train-data" in words]
    assert tried
    for words in tried:
        assert parse(shlex.split(words, comments=True)).data.train_data


def test_the_table_of_openclips_architectures_has_each_and_says_what_the_code_does():
    page = (ROOT / "docs/reference/openclip_models.md").read_text()
    rows = dict(re.findall(r"^\| (\S+) (\|.*\|)$", page, re.M))
    names = {path.stem for path in Path(open_clip.__file__).parent.glob("model_configs/*.json")}
    assert rows.keys() == names | {"name"} and len(names) == 144
    for name in ("ViT-B-16-SigLIP2", "RN50", "coca_ViT-B-32"):
        assert f"| {' | '.join(openclip_table.row(name))} |" in page


@pytest.mark.slow
def test_every_row_of_the_table_of_openclips_architectures_is_the_codes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs/reference/openclip_models.md").read_text())
    openclip_table.main(["--write", str(page)])
    assert page.read_text() == (ROOT / "docs/reference/openclip_models.md").read_text()
