"""JSON and YAML in which a key stands once, and texts of a line per entry: what the usual readers let pass in silence.

Of a key that stands twice in one object, json and yaml take the last value.
"""
from __future__ import annotations

import json
import re
from typing import Any

#: str.splitlines also splits at form feeds, U+0085 and U+2028, which stand in captions.
LINE_END = re.compile(r"\r\n|\r|\n")


def load_json(text: str | bytes) -> Any:
    """The value of a JSON text. ValueError where it is none, or an object has a key twice."""
    return json.loads(text, object_pairs_hook=unique)


def load_yaml(text: str) -> Any:
    """The value of a YAML text by PyYAML's safe loader. ValueError where it is none, or a mapping has a key twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            unique([(self.construct_object(key, deep=True), key.start_mark.line + 1) for key in own], "line")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)  # noqa: S506  a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def unique(pairs: list[tuple[Any, Any]], where: str = "") -> dict[Any, Any]:
    """The pairs as a dict. ValueError for a key that stands twice; where: what the values are, if they say it."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        places = f" ({where} {' and '.join(str(value) for key, value in pairs if key == twice)})" if where else ""
        raise ValueError(f"the key {twice!r} stands there twice{places}: remove the one that is not meant")
    return found


def text_lines(text: str) -> list[str]:
    """The lines of a text, stripped, without blank ones at its end."""
    return [line.strip() for line in LINE_END.split(text.rstrip())] if text.strip() else []


def entries(text: str, place: object) -> tuple[str, ...]:
    """The entries of a list with a line each, whose order counts. ValueError naming a blank line among them."""
    lines = text_lines(text)
    if "" in lines:
        raise ValueError(
            f"line {lines.index('') + 1} of {place} is blank: every line is an entry, and a blank one would shift or "
            "empty a class; remove it, or write what is missing"
        )
    return tuple(lines)
