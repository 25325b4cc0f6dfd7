"""Removal of possible secrets from addresses: user info, queries, fragments, and the commands of `pipe:`."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator
from functools import lru_cache
from itertools import count, islice
from shutil import which
from typing import Any
from urllib.parse import unquote

from braceexpand import braceexpand

SCHEME = r"[A-Za-z][A-Za-z0-9+.\-]*://"
URL = re.compile(rf"({SCHEME})(.*?)(?=(?:[,{{\s]|::)+{SCHEME}|$)", re.DOTALL)
URL_IN_TEXT = re.compile(rf"{SCHEME}[^\s'\"<>`]*[^\s'\"<>`.,;:)\]!]")
#: The path and the query without the host, as libraries report requests.
QUERY_IN_TEXT = re.compile(r"(/[^\s'\"?]*)\?[^\s'\"()]*=[^\s'\"()]*")
PIPE = re.compile(r"(\s*(?:[\w-]+:)*pipe:)(?!sha256=)(.+)", re.DOTALL)
RANGE = re.compile(r"\{[^{},]*\.\.[^{},]*\}")  # range of a brace pattern, without secrets
RANGES_FROM, ROUNDS, MASK = 0xE000, 100_000, "***"
MOST, LEAST = 200, 6  # maximum of expanded addresses of a brace pattern, minimum characters of a secret

salt = secrets.token_hex(8)  # of this run; a resumed run adopts the salt of its checkpoint
#: Secrets to remove from all text (commands, secret parts of URLs): patterns with their substitutes.
hidden: dict[str, tuple[re.Pattern[str], str]] = {}


@lru_cache(maxsize=4096)
def _tag(text: str, salted: str) -> str:
    digest = hashlib.pbkdf2_hmac("sha256", text.encode(errors="surrogateescape"), salted.encode(), ROUNDS, 12)
    return f"{salted}-{digest.hex()}"


def tag(text: str, salted: str | None = None) -> str:
    """Return SALT-HASH of a secret text; deliberately slow, against guessing of passwords."""
    return _tag(text, salted or salt)


def adopt(tagged: str) -> None:
    """Use the salt of this tag from now on, so that equal texts have equal tags."""
    global salt
    salt = tagged.partition("-")[0]


def redacted(value: Any) -> Any:
    """Return an address, or addresses joined by `::`, without secrets; for a nested value, redact every text in it.

    `https://user:password@host/a.tar?key=x#y` -> `https://host/a.tar`; `pipe:command` -> `pipe:sha256=SALT-HASH`.
    """
    if isinstance(value, dict):
        return {redacted(key): redacted(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(redacted, value))
    if not isinstance(value, str) or not ("://" in value or "pipe:" in value):
        return value
    found = []
    for source in value.split("::"):
        given = list(_alternatives(source))
        kept = [URL.sub(lambda url: url[1] + _divided(url)[1], one) for one in given]
        unique = [source] if kept == given else list(dict.fromkeys(kept))
        if command := PIPE.fullmatch(source):
            unique = [f"{command[1]}sha256={tag(command[2])}"]
        found.append(unique[0] if len(unique) == 1 else f"{{{','.join(unique)}}}")
    return "::".join(found)


def _alternatives(source: str) -> Iterator[str]:
    """Yield the addresses of a brace pattern, with its ranges unchanged."""
    ranges, numbers = RANGE.findall(source), count(RANGES_FROM)
    text = RANGE.sub(lambda _: chr(next(numbers)), source)
    try:
        found = list(islice(braceexpand(text, escape=False), MOST)) if "{" in text else [text]
    except (ValueError, RecursionError):  # unbalanced or too deep, reported elsewhere
        found = [text]
    for one in found:
        for number, pattern in enumerate(ranges):
            one = one.replace(chr(RANGES_FROM + number), pattern)
        yield one


def _divided(found: re.Match[str]) -> tuple[str, str, str]:
    """Split a URL into user info, host with path, and query with fragment. Passwords may hold unencoded characters."""
    rest = found[2]
    if found[1].lower() == "file://":
        return "", rest, ""
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    odd = "@" not in host and re.search(r":(?!\d*$)", host) and not host.startswith("[")
    end = rest.rfind("@") if odd else host.rfind("@")
    user, rest = rest[: max(end, 0)], rest[end + 1 :]
    place = re.split(r"[?#]", rest, maxsplit=1)[0]
    return user, place, rest[len(place) :]


def hide(value: Any) -> None:
    """Make `scrub` remove the secrets of these addresses from now on."""
    if isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            hide(inner)
        return
    for source in value.split("::") if isinstance(value, str) else ():
        if found := PIPE.fullmatch(source):
            text = r"[^\s'\"]*".join(map(_quoted, re.split(r"\{[^{}]*\}", found[2])))
            hidden[found[2]] = re.compile(text), f"sha256={tag(found[2])}"
            continue
        for url in (url for one in _alternatives(source) for url in URL.finditer(one)):
            user, _, query = _divided(url)
            for secret in (user, user.partition(":")[2], query[1:]):
                hidden.update({x: (re.compile(_quoted(x)), MASK) for x in (secret, unquote(secret)) if len(x) >= LEAST})


def _quoted(text: str) -> str:
    """Return a pattern of a text as written, or as repr and JSON write it."""
    return re.sub(r"\\\\|['\"]", lambda found: rf"\\*{found[0]}", re.escape(text))


def scrub(text: str, queries: bool = True) -> str:
    """Remove user info, the secrets of `hide` and (with `queries`) queries from text such as an error message."""

    def shortened(found: re.Match[str]) -> str:
        _, place, query = _divided(found)
        return found[1] + place + ("" if queries else query)

    for secret in sorted(hidden, key=len, reverse=True):
        pattern, substitute = hidden[secret]
        text = pattern.sub(substitute, text)
    if "://" in text:
        text = URL_IN_TEXT.sub(lambda url: URL.sub(shortened, url[0]), text)
    return QUERY_IN_TEXT.sub(r"\1", text) if queries and "?" in text else text


def said_by(command: str, text: str) -> str:
    """Mask the words of a command in its stderr text; names of programs and paths stay."""
    words = set(re.split(r"[\s'\"`=:;|&<>(){},@?#]+", command))
    for word in sorted(words, key=len, reverse=True):
        if len(word) >= 4 and not word.startswith(("/", ".", "-", "http")) and not which(word):
            text = text.replace(word, MASK)
    return scrub(text)
