"""What README and docs say can be typed, can be typed."""
from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image

from prolip.methods import METHODS
from training.main import build_parser, parse

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/training.md").read_text()
# OpenCLIP's flag that does not exist here, named for that reason.
FOREIGN = {"--logs"}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")


def known_flags() -> set[str]:
    """Every flag of every method, and how to switch it off."""
    return {flag for method in METHODS for flag in build_parser(method).flags()}


def test_training_md_names_every_flag():
    wanted = {flag for flag in known_flags() if not flag.startswith("--no-")} - {"--help"}
    assert wanted - set(FLAG.findall(TEXT)) == set()


def test_training_md_names_no_flag_that_does_not_exist():
    torchrun = {"--nproc_per_node"}
    words = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9]", TEXT))
    assert words - known_flags() - FOREIGN - torchrun == set()


def test_training_md_groups_flags_as_help_does():
    groups = [g.title for g in build_parser("prolip")._action_groups if g.title and g._group_actions]
    sections = [title.split(" ")[0] for title in re.findall(r"^### (.+)$", TEXT, re.M)]
    assert sections == [title for title in groups if title != "options"]
    for title in sections:
        section = re.split(r"^##", TEXT.split(f"### {title}")[1], flags=re.M)[0]
        group = next(g for g in build_parser("prolip")._action_groups if g.title == title)
        flags = {a.option_strings[0] for a in group._group_actions}
        assert flags - set(FLAG.findall(section)) == set(), title


@pytest.mark.parametrize("page", ["README.md", "docs/training.md", "slurm/README.md", "data/emoji/README.md"])
def test_links_and_commands_lead_to_files_that_exist(page):
    path = ROOT / page
    text = path.read_text()
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", text):
        assert (path.parent / link).exists(), link
    for file in re.findall(r"(?:python |sbatch )(?:--\S+ )*((?:scripts|slurm)/\S+\.(?:py|sbatch|sh))", text):
        assert (ROOT / file).exists(), file


def test_readme_python_runs_as_it_stands_with_a_trained_or_a_new_model(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert code.count("local-dir:runs/demo/model") == 2
    Image.new("RGB", (64, 64), "red").save(tmp_path / "picture.png")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code.replace("local-dir:runs/demo/model", "ProLIP-ViT-XS-16"), names)
    image, texts, measures = names["image"], names["texts"], names["measures"]
    assert image.mean.shape == image.log_var.shape == (1, 192)
    torch.testing.assert_close(image.mean.norm(dim=-1), torch.ones(1))
    assert texts.trace.shape == (3,)
    assert measures.pairwise_csd_similarity(image, texts).shape == (1, 3)
    assert measures.inclusion_test(image, texts).shape == (3,)


@pytest.mark.parametrize("page", ["README.md", "docs/training.md"])
def test_training_commands_are_taken_by_the_program(page):
    commands = re.findall(r"training\.main ((?:--.*)?)$", (ROOT / page).read_text(), re.M)
    tried = [words for words in commands if "--train-data" in words]
    assert tried
    for words in tried:
        assert parse(shlex.split(words, comments=True)).data.train_data
