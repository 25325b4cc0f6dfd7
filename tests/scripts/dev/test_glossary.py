"""The glossary has the words that the checker of prose bans, and the page of faults those that the code names."""

from __future__ import annotations

import re

from dev import prose
from prolip.data.faults import SHARD_KINDS, UNCHARGED

PAGE = (prose.ROOT / "docs/developing/glossary.md").read_text(encoding="utf-8")
LAST = PAGE.split("\n## ")[-1]


def test_the_last_table_of_the_glossary_and_the_checker_ban_the_same_words():
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|$", LAST, re.M)
    listed = {word: instead for words, instead in rows for word in re.findall(r"`(.*?)`", words)}
    assert len(rows) == len(prose.BANNED)
    for word, instead in listed.items():
        assert prose.WORD.fullmatch(word) and prose.instead_of(word) == instead, word
    for pattern in prose.BANNED:
        assert any(re.fullmatch(pattern, word) for word in listed), f"no row of the glossary has {pattern}"


def test_a_page_may_quote_a_banned_word_but_not_use_it(tmp_path):
    page = tmp_path / "page.md"
    page.write_text('Write "after", not "behind" or `behind`.\n\nThe file stands behind it.\n', encoding="utf-8")
    found = [(start + line - 1, word) for start, text in prose.checked(page) for line, word, _ in prose.findings(text)]
    assert found == [(3, "stands"), (3, "behind")]


def test_the_page_of_faults_has_every_fault_that_the_code_names():
    page = (prose.ROOT / "docs/reference/faults.md").read_text(encoding="utf-8")
    code = "".join(path.read_text(encoding="utf-8") for path in (prose.ROOT / "src").rglob("*.py"))
    kinds = {*re.findall(r'(?:SampleFault|ShardFault)\(\s*"([^"]+)"', code), *SHARD_KINDS, *UNCHARGED}
    assert len(kinds) > 20 and {kind for kind in kinds if f"`{kind}`" not in page} == set()
