"""What an address may be: a path, a URL of SCHEMES or, of training shards alone, a `pipe:` command; and its braces."""

from __future__ import annotations

import re

from braceexpand import alphabet, braceexpand
from fsspec.registry import known_implementations

from prolip.utils.documents import shown
from prolip.utils.secrecy import redacted

SCHEMES = ("file", "http", "https", "s3", "gs", "hf")
ALLOWED = "give a path (./NAME where a file's name looks like a URL) or a URL of file, http, https, s3, gs or hf"
#: Words that begin the names of models, and those that begin commands somewhere.
OF_MODELS, COMMANDS = ("hf-hub", "local-dir"), ("pipe", "shell", "exec", "cmd")
BEGINNING = re.compile(r"([a-z][a-z0-9+.-]*)(://|::|:)", re.IGNORECASE)
#: Addresses that one pattern may stand for, how deep its braces may lie in each other, and characters in all.
MOST, DEPTH, CHARACTERS = 10_000_000, 50, 2**34
RANGE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.-?(\d+))?")


def check_address(address: str, pipes: bool = False) -> str:
    """The address itself. ValueError naming it where it is no path and no URL of SCHEMES.

    pipes: whether it may be a command. fsspec knows many more schemes and chains of them (`simplecache::`, `zip://`),
    some of which run programs or write files, so no other scheme gets there.
    """
    if pipes and address.startswith("pipe:"):
        return address
    begin = BEGINNING.match(address.strip())
    word, sign = (begin[1], begin[2]) if begin else ("", "")
    if word.lower() in OF_MODELS:
        why = f"{word}: is for models alone"
    elif address.lstrip().startswith("|") or word.lower() in COMMANDS:
        why = "commands are run for training shards (--train-data 'pipe:COMMAND') and nowhere else"
    elif word in SCHEMES and address.startswith(f"{word}://"):
        if word in ("http", "https") or "::" not in address:
            return address
        why = "chained URLs are not opened"
    elif word == "file" and "://" not in address:
        return address
    elif "://" in address or sign == "::" or word.lower() in known_implementations:
        why = f"its scheme is {address.partition(':')[0]!r}"
    else:
        return address
    known = f"{redacted(address)!r} is not opened, {why}"
    raise ValueError(f"{known}: {ALLOWED}" + (", or a pipe: command" if pipes else ""))


def expand_braces(pattern: str) -> list[str]:
    """The texts that a pattern with braces stands for, as bash has them. ValueError for braces that are not balanced,
    and for more than MOST texts, which are counted before any is made.
    """
    try:
        count = count_texts(pattern)
    except ValueError as error:
        raise ValueError(f"brace pattern {shown(redacted(pattern))} is not balanced: {error}") from None
    if count > MOST or count * len(pattern) > CHARACTERS:
        number = f"{count:,}" if count < 10**15 else "more than 10^15"
        said = f"{number} addresses, at most {MOST:,} of 16 GB in all are read"
        raise ValueError(f"brace pattern {shown(redacted(pattern))} stands for {said}: correct the range")
    return list(braceexpand(pattern))


def count_texts(pattern: str) -> int:
    """How many texts `braceexpand` makes of a pattern, at most about 10^15, in one pass over it.

    Neighbours multiply, what commas separate adds up, a range counts its steps; all other braces stand for themselves.
    """
    open_braces = [[1, 0, 0, 0]]  # product of this alternative, sum of those before, commas, where the text begins
    nested, at = False, 0
    while at < len(pattern):
        sign, here = pattern[at], open_braces[-1]
        if sign == "\\":
            at += 1
        elif sign == "{":
            open_braces.append([1, 0, 0, at + 1])
            nested = False
            if len(open_braces) > DEPTH:
                raise ValueError(f"braces lie more than {DEPTH} deep in each other")
        elif sign == "," and len(open_braces) > 1:
            here[:3] = [1, here[0] + here[1], 1]
        elif sign == "}":
            open_braces.pop()
            if not open_braces:
                raise ValueError(f"a brace closes at character {at + 1} that none opens")
            inner = 1 if nested or here[2] else count_range(pattern[here[3] : at])
            open_braces[-1][0] = min(open_braces[-1][0] * inner * (here[0] + here[1]), 10**15)
            nested = True
        at += 1
    if len(open_braces) > 1:
        raise ValueError(f"{len(open_braces) - 1} brace(s) are not closed")
    return open_braces[0][0]


def count_range(text: str) -> int:
    """The steps of a range, 1 for what is none."""
    found = RANGE.fullmatch(text)
    if found is None or found[1].isalpha() != found[2].isalpha():
        return 1
    if len(text) > 60:
        return 10**15  # numbers of that many digits are a mistake
    first, last = (alphabet.index(end) if end.isalpha() else int(end) for end in found.groups()[:2])
    return abs(last - first) // (int(found[3] or 1) or 1) + 1
