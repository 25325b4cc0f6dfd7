"""JSON and YAML of other people: bounded before it is read, every key once, and every refusal in one line."""

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

CONFIG_BYTES = 2**20  # of a configuration: the largest real ones have some thousands
YAML_BYTES = 2**17  # YAML is read by Python, in seconds per megabyte
VALUES, DEPTH = 100_000, 50  # of a document with all aliases written out
LINE_END = re.compile(r"\r\n|\r|\n")  # str.splitlines also splits at characters that stand in captions

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlong, _short.maxlevel = 40, 2


def shown(value: Any) -> str:
    """A value on one line of a message, shortened."""
    try:
        return _short.repr(value)
    except (ValueError, RecursionError):  # such as a whole number of thousands of digits
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
    """`json.loads`; ValueError also for too deep a nesting and, where `unique`, for a key that is there twice."""
    try:  # json takes a byte order mark in bytes alone
        own = text.removeprefix("\ufeff") if isinstance(text, str) else text
        return json.loads(own, object_pairs_hook=check_unique if unique else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_unique(pairs: list[tuple[Any, Any]], where: str = "") -> dict[Any, Any]:
    """The pairs as a dict. ValueError for a key that is there twice; where: a word for the values, to name both."""
    found = dict(pairs)
    if len(found) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        places = f" ({where} {' and '.join(str(value) for other, value in pairs if other == key)})" if where else ""
        raise ValueError(f"the key {shown(key)} is there twice{places}: remove one")
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
    """The value in a JSON file. ValueError with its name for no JSON, a large file or deep nesting; OSError."""
    try:
        return check_tree(loads(read_file(path, limit).decode("utf-8-sig"), unique=True))
    except ValueError as error:
        if str(error).startswith(f"{path} "):  # of `read_file`
            raise
        raise ValueError(f"{path} is no JSON: {error}") from error


def read_yaml(path: str | os.PathLike) -> Any:
    """The value in a YAML file, by the safe loader, aliases bounded. ValueError, also for a repeated key; OSError."""
    import yaml

    class UniqueKeys(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            check_unique([(self.construct_object(key, deep=True), key.start_mark.line + 1) for key in own], "line")
            return super().construct_mapping(node, deep)

    data = read_file(path, YAML_BYTES)
    try:
        return check_tree(yaml.load(data, UniqueKeys))  # noqa: S506  # a safe one
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ValueError(f"{path} is no YAML: {why}") from error


def check_tree(value: Any) -> Any:
    """The value itself; ValueError for more than VALUES parts, aliases written out, or a nesting deeper than DEPTH."""
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
    """The lines of a list whose order counts. ValueError for a blank one, which would shift or empty a class."""
    lines = text_lines(text)
    if "" in lines:
        raise ValueError(f"line {lines.index('') + 1} of {place} is blank: each is an entry; remove or fill it")
    return tuple(lines)


def fingerprint(*parts: Any, digits: int = 32) -> str:
    """Hexadecimal digits of JSON values: equal parts, equal digits, on every machine."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=digits // 2).hexdigest()
