"""Every block of README, docs/start.md and the guides runs, on a small stand-in of the demo's run."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from dev import blocks
from prolip.cli.main import main

SHORT = ["--max-steps", "8", "--warmup", "4", "--train-num-samples", "1024"]
SHORT += ["--fit-samples", "400", "--changed-images", "40"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return blocks.make_inputs(tmp_path_factory.mktemp("pages") / "inputs")


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """A finished run of the demo's recipe, after eight steps instead of 1,750."""
    folder = tmp_path_factory.mktemp("demo")
    here = Path.cwd()
    os.chdir(blocks.ROOT)
    try:
        words = ["--config", "scripts/recipes/emoji-demo.yaml", "--name", "demo", "--output", str(folder), *SHORT]
        assert main(["train", *words]) == 0
    finally:
        os.chdir(here)
    return folder / "demo"


def run_page(page: Path, inputs: Path, demo: Path, folder: Path, slow: bool) -> int:
    """Run the blocks of a page in order; returns how many ran."""
    sandbox, ran, text = blocks.Sandbox(folder / "page", inputs, demo), 0, page.read_text()
    found = blocks.blocks_of(text)
    assert len(re.findall(r"^ *```(?:bash|python|sh)", text, re.M)) == sum(block.place != (0, 0) for block in found)
    for block in found:
        if not block.runs or block.slow > slow:
            continue
        printed, ran = sandbox.run(block), ran + 1
        missing = blocks.missing_words(block, printed)
        remedy = f"refresh the page: python scripts/dev/blocks.py --write {page.relative_to(blocks.ROOT)}"
        assert not missing, f"{block.code}prints no {sorted(missing)}; {remedy}\n{printed[-3000:]}"
    shutil.rmtree(folder / "page")
    return ran


NAMES = [page.relative_to(blocks.ROOT).as_posix() for page in blocks.pages()]


@pytest.mark.parametrize("name", NAMES)
def test_the_blocks_of_a_page_run_and_print_what_it_shows(name, inputs, demo, tmp_path):
    run_page(blocks.ROOT / name, inputs, demo, tmp_path, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in NAMES if any(block.slow for block in blocks.blocks_of((blocks.ROOT / name).read_text()))]
)
def test_the_slow_blocks_of_a_page_run(name, inputs, demo, tmp_path):
    assert run_page(blocks.ROOT / name, inputs, demo, tmp_path, slow=True)


def test_a_block_that_fails_or_prints_something_else_is_found(inputs, demo, tmp_path):
    sandbox = blocks.Sandbox(tmp_path / "page", inputs, demo)
    shown = '```python\nprint("similarity", 0.5, "cat")\n```\n\n```text\nsimilarity 0.7 cat\n```\n'
    (block,) = blocks.blocks_of(shown)
    assert not blocks.missing_words(block, sandbox.run(block))
    assert blocks.missing_words(block, "score 0.5 cat") == set()  # a word of the code itself
    (block,) = blocks.blocks_of(shown.replace("similarity 0.7", "likeness 0.7"))
    assert blocks.missing_words(block, sandbox.run(block)) == {"likeness"}
    for code in ("```bash\nprolip search query nowhere --text cat\n```", "```python\nraise ValueError('no')\n```"):
        with pytest.raises(RuntimeError, match="ended with"):
            sandbox.run(blocks.blocks_of(code)[0])


def test_large_files_of_the_demo_are_linked_or_on_another_disk_copied(tmp_path, monkeypatch):
    large = tmp_path / "model"
    large.write_bytes(bytes(2_000_000))
    blocks.placed(str(large), str(tmp_path / "linked"))
    assert (tmp_path / "linked").samefile(large)
    monkeypatch.setattr(os, "link", lambda *places: (_ for _ in ()).throw(OSError("Invalid cross-device link")))
    blocks.placed(str(large), str(tmp_path / "copied"))
    assert (tmp_path / "copied").read_bytes() == large.read_bytes() and not (tmp_path / "copied").samefile(large)
