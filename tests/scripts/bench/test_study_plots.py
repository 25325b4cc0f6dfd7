"""The plots of studies and benchmarks show the numbers of their pages, which open with an abstract and a plot."""

import json
import re

import pytest
from PIL import Image

from dev.prose import sentences
from studies.plots import IMAGES, PLOTS, ROOT, draw, numbers, read, table, tables

DOCS = ROOT / "docs"
#: Pages without a plot: the index of the studies, a page that `make gpu` writes.
WITHOUT = {"studies/index.md", "benchmarks/gpu.md"}


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_has_the_numbers_of_its_page(name):
    plot = PLOTS[name]
    path, page = IMAGES / f"{name}.png", (DOCS / plot.page).read_text()
    with Image.open(path) as image:
        assert json.loads(image.info["Numbers"]) == read(plot), "stale: run python scripts/studies/plots.py --write"
    assert path.stat().st_size < 60_000
    assert page.count(f"](../images/{name}.png)") == 1


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_is_drawn(name, tmp_path):
    found = read(PLOTS[name])
    assert all(values for series in found.values() for values in series.values())
    draw(PLOTS[name], found, tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as image:
        assert image.width == 780 and json.loads(image.info["Numbers"]) == found


def test_every_study_and_benchmark_has_a_plot():
    pages = [page for folder in ("studies", "benchmarks") for page in (DOCS / folder).glob("*.md")]
    there = {page.relative_to(DOCS).as_posix() for page in pages}
    assert there - WITHOUT == {plot.page for plot in PLOTS.values()}


@pytest.mark.parametrize("page", [plot.page for plot in PLOTS.values()])
def test_a_page_opens_with_an_abstract_of_five_sentences_and_a_plot(page):
    title, abstract, plot, *_ = re.split(r"\n\n+", (DOCS / page).read_text())
    assert title.startswith("# ") and plot.startswith("![")
    assert len(sentences(abstract)) == 5


def test_cells_are_read_as_the_pages_write_them():
    assert numbers("**2.96** (2.89 to 3.07)") == [2.96, 2.89, 3.07]
    assert numbers("-.11 [-.2, +.1]") == [-0.11, -0.2, 0.1]
    assert numbers("82,219,008 → 9,166") == [82219008, 9166]
    assert numbers("-") == [] and numbers("−3.5") == [-3.5]


def test_equal_heads_are_numbered_and_missing_tables_are_named():
    page = "| | t2i | t2i |\n|---|---|---|\n| a | 1 | 2 |\n\ntext\n\n| b |\n|---|\n| 3 |\n"
    assert tables(page) == [[{"": "a", "t2i": "1", "t2i 2": "2"}], [{"b": "3"}]]
    with pytest.raises(ValueError, match="no table with the heads"):
        table(page, "c")
