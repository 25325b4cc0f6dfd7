"""Reading of untrusted JSON and YAML: bounded size, unique keys, errors in one line."""

from __future__ import annotations

import hashlib
import json
import os
import re
import reprlib
import stat
from collections import Counter
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

CONFIG_BYTES = 2**20  # of a configuration; real ones have at most some thousands
YAML_BYTES = 2**17  # Python reads YAML at seconds per megabyte
VALUES, DEPTH = 100_000, 50  # of a document with all aliases expanded
LINE_END = re.compile(r"\r\n|\r|\n")  # str.splitlines also splits at characters that occur in captions

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlong, _short.maxlevel = 40, 2


def shown(value: Any) -> str:
    """Format a value for one line of a message, shortened."""
    try:
        return _short.repr(value)
    except (ValueError, RecursionError):  # such as an integer with thousands of digits
        return f"a {type(value).__name__} too long to show"


def read_file(path: str | os.PathLike, limit: int) -> bytes:
    """Read the bytes of a regular file. ValueError for folders, pipes, devices and more than `limit` bytes; OSError."""
    nonblocking = getattr(os, "O_NONBLOCK", 0)  # otherwise a pipe would block
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | nonblocking)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is a pipe or a device: give a regular file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} has more than {limit:,} bytes, too many for such a file: check the path")
    return data


def loads(text: str | bytes, unique: bool = False) -> Any:
    """Call `json.loads`; ValueError also for too deep nesting and (if `unique`) for a repeated key."""
    try:  # json accepts a byte order mark only in bytes
        own = text.removeprefix("\ufeff") if isinstance(text, str) else text
        return json.loads(own, object_pairs_hook=check_unique if unique else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_unique(pairs: list[tuple[Any, Any]], where: str = "") -> dict[Any, Any]:
    """Return the pairs as a dict. ValueError for a repeated key. where: a noun for the values, to name both."""
    found = dict(pairs)
    if len(found) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        places = f" ({where} {' and '.join(str(value) for other, value in pairs if other == key)})" if where else ""
        raise ValueError(f"the key {shown(key)} occurs twice{places}: remove one")
    return found


def check_types(values: Any, kinds: Mapping[str, Any], place: object, others: Any = object) -> dict[str, Any]:
    """Return `values`, a dict with instances of kinds[name] or of `others`. ValueError for anything else."""
    if not isinstance(values, dict):
        raise ValueError(f"{place} is {shown(values)}: expected an object")
    for name, value in values.items():
        kind = kinds.get(name, others)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
            expected = getattr(kind, "__name__", str(kind)).replace(" | None", "")
            raise ValueError(f"{place}: {shown(name)} is {shown(value)}: expected {expected}")
    return values


def read_json(path: str | os.PathLike, limit: int = CONFIG_BYTES) -> Any:
    """Read the value in a JSON file. ValueError naming the file for invalid, large or deeply nested JSON; OSError."""
    try:
        return check_tree(loads(read_file(path, limit).decode("utf-8-sig"), unique=True))
    except ValueError as error:
        if str(error).startswith(f"{path} "):  # from `read_file`
            raise
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def read_yaml(path: str | os.PathLike) -> Any:
    """Read the value in a YAML file with the safe loader, aliases bounded. ValueError (also repeated keys), OSError."""
    import yaml

    class UniqueKeys(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            check_unique([(self.construct_object(key, deep=True), key.start_mark.line + 1) for key in own], "line")
            return super().construct_mapping(node, deep)

    data = read_file(path, YAML_BYTES)
    try:
        return check_tree(yaml.load(data, UniqueKeys))  # noqa: S506  # a safe loader
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ValueError(f"{path} is not valid YAML: {why}") from error


def check_tree(value: Any) -> Any:
    """Return the value; ValueError for more than VALUES parts with aliases expanded, or nesting deeper than DEPTH."""
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
    """Read a UTF-8 file of at most `limit` bytes; ValueError (also UnicodeDecodeError), OSError."""
    return read_file(Path(path), limit).decode("utf-8-sig")


def text_lines(text: str) -> list[str]:
    """Split a text into stripped lines, without blank ones at the end."""
    return [line.strip() for line in LINE_END.split(text.rstrip())] if text.strip() else []


def entries(text: str, place: object) -> tuple[str, ...]:
    """Return the lines of an ordered list. ValueError for a blank line, which would shift or empty a class."""
    lines = text_lines(text)
    if "" in lines:
        raise ValueError(
            f"line {lines.index('') + 1} of {place} is blank, but each line is an entry: remove or fill it"
        )
    return tuple(lines)


def fingerprint(*parts: Any, digits: int = 32) -> str:
    """Hash JSON values to hexadecimal digits, equal on every machine for equal parts."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=digits // 2).hexdigest()
