"""JSON and YAML that others wrote: bounded before it is read, every key once, and every refusal one line."""

from __future__ import annotations

import hashlib
import json
import os
import re
import reprlib
import stat
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

#: Bytes of a configuration: the largest real ones have some thousands.
CONFIG_BYTES = 2**20
#: YAML is read by Python, in seconds per megabyte.
YAML_BYTES = 2**17
#: Values of a document with all aliases written out, and how deep they may lie in each other.
VALUES, DEPTH = 100_000, 50
#: str.splitlines also splits at form feeds, U+0085 and U+2028, which stand in captions.
LINE_END = re.compile(r"\r\n|\r|\n")

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlong, _short.maxlevel = 40, 2


def shown(value: Any) -> str:
    """A value as messages show it: on one line, and cut where it is long."""
    try:
        return _short.repr(value)
    except (ValueError, RecursionError):  # whole numbers of thousands of digits are not written out
        return f"a {type(value).__name__} too long to show"


def read_file(path: str | os.PathLike, limit: int) -> bytes:
    """The bytes of a regular file. ValueError for folders, pipes and devices, and above `limit` bytes; OSError."""
    nonblocking = getattr(os, "O_NONBLOCK", 0)  # or a pipe would be waited for
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | nonblocking)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is a pipe or a device: give a regular file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} has more than {limit:,} bytes, which no such file needs: is it the right one?")
    return data


def loads(text: str | bytes, unique: bool = False) -> Any:
    """`json.loads`; ValueError for what is nested too deeply too and, where `unique`, for a key that is there twice."""
    if isinstance(text, str):
        text = text.removeprefix("\ufeff")  # which json takes in bytes alone
    try:
        return json.loads(text, object_pairs_hook=check_unique if unique else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_unique(pairs: list[tuple[Any, Any]], where: str = "") -> dict[Any, Any]:
    """The pairs as a dict. ValueError for a key that stands twice; where: what the values are, if they say it."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        places = f" ({where} {' and '.join(str(value) for key, value in pairs if key == twice)})" if where else ""
        raise ValueError(f"the key {shown(twice)} is there twice{places}: remove the one that is not meant")
    return found


def check_types(values: Any, kinds: Mapping[str, Any], place: object, others: Any = object) -> dict[str, Any]:
    """An object with values by name, each an instance of kinds[name] or of `others`. ValueError for anything else."""
    if not isinstance(values, dict):
        raise ValueError(f"{place} is {shown(values)}: want an object")
    for name, value in values.items():
        kind = kinds.get(name, others)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
            wanted = getattr(kind, "__name__", str(kind)).replace(" | None", "")
            raise ValueError(f"{place}: {shown(name)} is {shown(value)}: want {wanted}")
    return values


def read_json(path: str | os.PathLike, limit: int = CONFIG_BYTES) -> Any:
    """What a configuration file says. ValueError with its name for what is no JSON, too large or too deep; OSError."""
    try:
        return check_tree(loads(read_file(path, limit).decode("utf-8-sig"), unique=True))
    except ValueError as error:
        if str(error).startswith(f"{path} "):  # of `read_file`
            raise
        raise ValueError(f"{path} is no JSON: {error}") from error


def read_yaml(path: str | os.PathLike) -> Any:
    """What a YAML file says, by the safe loader, every key once, aliases bounded. ValueError in one line; OSError."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            check_unique([(self.construct_object(key, deep=True), key.start_mark.line + 1) for key in own], "line")
            return super().construct_mapping(node, deep)

    data = read_file(path, YAML_BYTES)
    try:
        return check_tree(yaml.load(data, Loader))  # noqa: S506  # a safe one
    except RecursionError:
        raise ValueError(f"{path} is no YAML: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error


def check_tree(value: Any) -> Any:
    """The value itself; ValueError where it has more than VALUES parts, or parts that lie deeper than DEPTH.

    A few aliases of aliases stand for billions of values, which nothing shows until they are written.
    """
    count, level = 1, [value]
    for _ in range(DEPTH):
        below: list[Any] = []
        for part in level:
            if isinstance(part, (list, tuple, Mapping)):
                below.extend(part.values() if isinstance(part, Mapping) else part)
            if count + len(below) > VALUES:
                raise ValueError(f"it has more than {VALUES:,} values")
        if not below:
            return value
        count, level = count + len(below), below
    raise ValueError(f"it is nested more than {DEPTH} levels deep")


def text_of(path: str | os.PathLike, limit: int) -> str:
    """The text of a UTF-8 file of at most `limit` bytes; ValueError (UnicodeDecodeError too), OSError."""
    return read_file(Path(path), limit).decode("utf-8-sig")


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


def fingerprint(*parts: Any, digits: int = 32) -> str:
    """Hexadecimal digits of JSON values: equal parts, equal digits, on every machine."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=digits // 2).hexdigest()
