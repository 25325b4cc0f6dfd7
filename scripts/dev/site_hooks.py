"""mkdocs' hooks (.mkdocs.yml): links out of docs/ become names of files, and the notebook becomes a page.

In the repository `[rule](../src/x.py)` leads to the file; on the site that file does not exist.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:)([^)#\s]+)(#[^)]*)?\)")
CODE, FLAG = re.compile(r"<code>.*?</code>", re.S), re.compile(r"(?<=[\s>(|])--[a-z][a-z0-9-]*")
NOTEBOOK, PAGE = "tour.ipynb", "tour.md"


def on_page_markdown(markdown: str, page: Any, **options: Any) -> str:
    """Return the text of the page to render (mkdocs' hook)."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def named(link: re.Match) -> str:
        words, target, anchor = link.groups()
        place = posixpath.normpath(posixpath.join(folder, target))
        if place.startswith("docs/"):
            return f"[{words}]({target.replace(NOTEBOOK, PAGE)}{anchor or ''})"
        return f"`{place}`" if words.strip("`") in (place, place.rsplit("/", 1)[-1]) else f"{words} (`{place}`)"

    return LINK.sub(named, markdown)


def on_page_content(html: str, **options: Any) -> str:
    """mkdocs' hook: keep flags whole where a line of code wraps; a browser would break them after a hyphen."""
    return CODE.sub(lambda code: FLAG.sub(r'<span class="flag">\g<0></span>', code[0]), html)


def on_files(files: Any, config: Any) -> Any:
    """Replace the notebook by a page and its images (mkdocs' hook)."""
    from mkdocs.structure.files import File

    notebook = files.get_file_from_path(NOTEBOOK)
    if notebook:
        files.remove(notebook)
        parts = list(page_of(json.loads(Path(notebook.abs_src_path).read_text(encoding="utf-8"))))
        images = {f"tour_{number}.png": part for number, part in enumerate(parts) if isinstance(part, bytes)}
        for name, image in images.items():
            files.append(File.generated(config, name, content=image))
        names = iter(images)
        text = "\n\n".join(f"![]({next(names)})" if isinstance(part, bytes) else part for part in parts)
        files.append(File.generated(config, PAGE, content=text))
    return files


def page_of(notebook: dict[str, Any]) -> Iterator[str | bytes]:
    """Yield the cells of a notebook as Markdown, and its images as PNG."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                yield base64.b64decode(data["image/png"])
            elif text := "".join(output.get("text", data.get("text/plain", []))):
                yield f"```text\n{text.rstrip()}\n```"
