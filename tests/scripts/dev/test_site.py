"""The site of docs/: every page has its place, every link leads somewhere, nothing is fetched from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from dev import site_hooks

ROOT = Path(__file__).parents[3]

CONFIG = ROOT / ".mkdocs.yml"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
#: What a browser cuts or lets scroll sideways: the page itself, code, tables and images wider than their place.
CUT = """() => {
  const most = document.documentElement.clientWidth
  const parts = document.querySelectorAll('.md-content :is(pre code, .md-typeset__scrollwrap, img)')
  const wide = [...parts].filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth
    || e.getBoundingClientRect().right > most + 1)
  if (document.documentElement.scrollWidth > most) wide.push(document.documentElement)
  return wide.map(e => e.tagName + ' ' + e.textContent.slice(0, 60))
}"""


class Loader(yaml.SafeLoader):
    """YAML whose Python objects are left aside."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def pages_of(nav) -> list[str]:
    """The pages of a navigation, in its order."""
    if isinstance(nav, str):
        return [nav]
    return [page for item in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(item)]


def left_out(nav, folder: Path) -> list[str]:
    """Pages of a folder that a navigation does not have."""
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*.md")}
    return sorted(there - set(pages_of(nav)))


def test_every_page_of_docs_has_its_place_on_the_site(tmp_path):
    config = yaml.load(CONFIG.read_text(), Loader)
    nav = config["nav"]
    missing = [page for page in left_out(nav, ROOT / "docs") if f"/{page}" not in config["not_in_nav"].split()]
    assert not missing, f"{', '.join(missing)}: missing in the navigation. Name it under nav in .mkdocs.yml"
    assert [page for page in pages_of(nav) if page != site_hooks.PAGE and not (ROOT / "docs" / page).is_file()] == []
    (tmp_path / "new.md").touch()
    assert left_out(nav, tmp_path) == ["new.md"]


def test_links_out_of_docs_become_names_of_files():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="study.md"))
    text = "[`a.py`](../src/a.py), [rules](../x/y.md#z), [here](b.md), [web](https://x.y)"
    told = site_hooks.on_page_markdown(text, page)
    assert told == "`src/a.py`, rules (`x/y.md`), [here](b.md), [web](https://x.y)"
    page.file.src_uri = "api/models.md"
    assert site_hooks.on_page_markdown("[a](../b.md)", page) == "[a](../b.md)"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built; mkdocs' warnings are errors."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(CONFIG), "-d", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # a word of its own about another program
    done = subprocess.run(words, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr, done.stderr[-3000:]
    return folder


def test_the_site_is_built_without_a_warning_and_fetches_nothing(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for path in pages:
        html = path.read_text()
        assert not re.findall(r"<(?:script|img|iframe)[^>]+src=.?https?:", html), path
        assert not re.findall(r"<link[^>]+rel=.?(?:stylesheet|preconnect)[^>]+https?:", html), path


def test_public_names_stand_on_the_pages_of_the_api(site):
    text = "".join(path.read_text() for path in (site / "reference/api").glob("*.html"))
    for name in (
        "prolip.factory.create_model",
        "prolip.gaussian.Gaussian.trace",
        "prolip.losses.ppcl",
        "prolip.classifiers.zero_shot.ZeroShotClassifier.predict_proba",
        "prolip.measures.pairwise_csd_distance",
        "prolip.search.index.SearchIndex",
        "prolip.export.export_pt2",
    ):
        assert f'id="{name}"' in text, name


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: apt-get install chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_start_and_guides_are_not_cut(site, width):
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[test]'")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900})
        for path in [site / "index.html", site / "start.html", *sorted(site.glob("guides/*.html"))]:
            page.goto(path.as_uri())
            assert page.evaluate(CUT) == [], path.name
        page.set_content("<div class='md-content'><pre><code style='display:block;width:50px'>" + "x" * 99)
        assert page.evaluate(CUT)[0].startswith("CODE")
        browser.close()


def test_flags_stay_whole_where_code_wraps():
    html = "<p>--a</p><code>prolip train --max-steps 3 (--name) a--b</code>"
    whole = site_hooks.on_page_content(html)
    assert re.findall(r'<span class="flag">(.*?)</span>', whole) == ["--max-steps", "--name"]
