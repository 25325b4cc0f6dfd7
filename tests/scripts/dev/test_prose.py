"""Pages, messages, help and docstrings stay in plain English and within their budgets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dev import blocks, prose

ROOT = Path(__file__).parents[3]
NAMES = [path.relative_to(ROOT).as_posix() for path in blocks.pages()]
WORDS = {"README.md": 700, "docs/index.md": 150, "docs/guides/index.md": 150, "docs/CONTRIBUTING.md": 400}
MOST_WORDS, ALL_WORDS = 900, 18_500
LONGEST, MEAN, CODE, PRINTED, COLUMNS = 30, 15, 84, 100, 3


@pytest.mark.parametrize("name", NAMES)
def test_a_guide_has_short_sentences_narrow_tables_and_few_words(name):
    text = (ROOT / name).read_text()
    found = prose.sentences(text)
    assert [" ".join(words) for words in found if len(words) > LONGEST] == []
    assert sum(map(len, found)) <= MEAN * len(found)
    assert len(text.split()) <= WORDS.get(name, MOST_WORDS)
    rows = [line for line in prose.FENCE.sub("", text).splitlines() if line.startswith("|")]
    assert [row for row in rows if len(re.findall(r"(?<!\\)\|", row)) > COLUMNS + 1] == []
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M):
        assert [
            line for line in block.splitlines() if len(line) > (CODE if kind in ("bash", "python") else PRINTED)
        ] == []


def test_readme_start_and_guides_are_read_in_one_evening():
    assert sum(len((ROOT / name).read_text().split()) for name in NAMES) <= ALL_WORDS
    for name in ("docs/index.md", "docs/CONTRIBUTING.md"):
        assert len((ROOT / name).read_text().split()) <= WORDS[name], name


PAGES = [path for path in prose.pages(ROOT) if path.name not in ("glossary.md", "patterns.md")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_has_no_banned_word(path):
    assert [found for start, text in prose.checked(path) for found in prose.findings(text)] == []


@pytest.mark.parametrize("path", prose.python_files(ROOT), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_messages_help_comments_and_docstrings_are_plain(path):
    found = [(start, *finding) for start, text in prose.checked(path) for finding in prose.findings(text)]
    found += [(line, text.splitlines()[0]) for line, text in prose.docstrings(path) if prose.fragment(text)]
    assert path.name in ("prose.py", "write_fixtures.py") or found == []  # which hold such words as data


def test_every_guide_names_the_study_behind_its_metrics():
    measured = re.compile(r"\b(AUROC|AUC|R@1|mAP@R|recall@\d+|AURC|RSUM)\b(?: of)? [0-9.]")
    for name in NAMES:
        text = prose.prose((ROOT / name).read_text())
        linked = re.search(r"studies/|benchmarks/", (ROOT / name).read_text())
        assert linked or not measured.search(text), name


def test_prose_is_read_as_a_person_reads_it():
    text = "# A title\n\nOne two. Is `x.y` three?\n\n| a | b |\n|---|---|\n\n"
    text += "- An item with [a link](b.md): more.\n\n```\nno\n```\n"
    read = [" ".join(words) for words in prose.sentences(text)]
    assert read == ["A title", "One two", "Is code three", "An item with a link more"]
    assert [found[1] for found in prose.findings("It goes on behind the picture; behind-the-scenes stand-ins")] == [
        "goes on",
        "behind",
        "picture",
    ]
    assert prose.fragment("What is kept.") and prose.fragment("Of both.") and not prose.fragment("Return what is kept.")
