"""mkdocs' hook (.mkdocs.yml): before a page is rendered, links out of docs/ become names of files.

In the repository `[rule](../src/x.py)` leads to the file; on the site that file does not exist.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:)([^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **options: Any) -> str:
    """mkdocs' hook: return the text of the page to render."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def named(link: re.Match) -> str:
        words, target = link.groups()
        place = posixpath.normpath(posixpath.join(folder, target))
        if place.startswith("docs/"):
            return link[0]
        return f"`{place}`" if words.strip("`") in (place, place.rsplit("/", 1)[-1]) else f"{words} (`{place}`)"

    return LINK.sub(named, markdown)
