"""What mkdocs does to a page before it is rendered (.mkdocs.yml): links out of docs/ become names of files.

The pages are read in the repository, too, where `[rule](../src/x.py)` leads to the file; on the site there is none.
"""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **options: Any) -> str:
    """mkdocs' hook: the page's text as it is rendered."""
    return markdown if "/" in page.file.src_uri else OUTSIDE.sub(named, markdown)


def named(link: re.Match) -> str:
    """A link as its words with the file's place in the repository, once."""
    words, place = link.groups()
    return f"`{place}`" if words.strip("`") in (place, place.rsplit("/", 1)[-1]) else f"{words} (`{place}`)"
