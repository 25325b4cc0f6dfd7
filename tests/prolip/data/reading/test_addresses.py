"""Which addresses may be opened, and how many a pattern with braces stands for before any is made."""

from __future__ import annotations

import random
import time

import pytest
from braceexpand import braceexpand

from prolip.data.reading.stream import check_address, count_texts, expand_braces
from prolip.utils.secrecy import redacted


@pytest.mark.parametrize(
    "address",
    [
        "a.png",
        "./pipe:touch x",
        "/data/a b.tar",
        "file:///data/0.tar",
        "file:0.tar",
        "s3://b/{0..9}.tar",
        "gs://b/0.tar",
        "hf://datasets/o/n/0.tar",
        "http://host/0.tar",
        "https://[::1]:80/a.png?of=ftp://b",
        "12:30.png",
        "a:b.tar",
        "~/x",
    ],
)
def test_paths_and_urls_of_the_known_schemes_are_opened_anywhere(address):
    assert check_address(address) == check_address(address, pipes=True) == address


@pytest.mark.parametrize(
    "address, why",
    [
        ("pipe:touch x", "commands are run for training shards"),
        ("PIPE:touch x", "commands are run"),
        (" pipe:touch x", "commands are run"),
        ("|touch x", "commands are run"),
        ("shell:touch x", "commands are run"),
        ("pipe://touch x", "commands are run"),
        ("pipe::touch x", "commands are run"),
        ("hf-hub:org/name", "hf-hub: is for models alone"),
        ("local-dir:runs/a", "local-dir: is for models alone"),
        ("ftp://host/a", "its scheme is 'ftp'"),
        ("memory://a", "its scheme is 'memory'"),
        ("HTTP://h/a", "is 'HTTP'"),
        ("data:image/png;base64,AA", "is 'data'"),
        ("local:///etc/passwd", "is 'local'"),
        ("ssh://h/a", "is 'ssh'"),
        ("github://o:n@main/a", "is 'github'"),
        ("s3a://b/a", "is 's3a'"),
        (" http://h/a", "is ' http'"),
        ("simplecache::s3://b/a", "is 'simplecache'"),
        ("zip://a::http://h/b.zip", "is 'zip'"),
        ("http:/h/a", "is 'http'"),
        ("s3://b/a::file:///etc/passwd", "chained URLs"),
        ("file:x::ftp://h", "is 'file'"),
        ("./a://b", "is './a'"),
    ],
)
def test_every_other_address_is_refused_by_name_with_what_is_allowed(address, why):
    with pytest.raises(ValueError, match="give a path .* or a URL of file, http, https, s3, gs or hf") as refusal:
        check_address(address)
    assert repr(redacted(address)) in str(refusal.value) and why in str(refusal.value)
    if address[:5] != "pipe:":
        with pytest.raises(ValueError, match="s3, gs or hf, or a pipe: command$"):
            check_address(address, pipes=True)


def test_a_refusal_shows_no_secret():
    for address in (
        "pipe:curl -H 'Bearer SECRET' x",
        "ftp://user:SECRET@host/0.tar",
        "s3://b/0.tar?sig=SECRET::zip://a",
    ):
        with pytest.raises(ValueError, match="is not opened") as refusal:
            check_address(address)
        assert "SECRET" not in str(refusal.value)
    with pytest.raises(ValueError, match="stands for") as refusal:
        expand_braces("https://user:SECRET@host/{0..99999999}.tar?sig=SECRET")
    assert "SECRET" not in str(refusal.value) and "{0..99999999}" in str(refusal.value)


def test_braces_are_counted_as_they_are_expanded():
    parts = ["{", "}", ",", "..", "1", "03", "-2", "a", "d", "\\", "{0..3}", "{a,b}", "{1..9..3}", "{z..a..5}"]
    draw, balanced = random.Random(0), 0
    for _ in range(4000):
        pattern = "".join(draw.choices(parts, k=draw.randint(1, 8)))
        try:
            count = count_texts(pattern)
        except ValueError:
            with pytest.raises(ValueError, match="is not balanced"):
                expand_braces(pattern)
            continue
        balanced += 1
        assert count == len(list(braceexpand(pattern))), pattern
    assert balanced > 1000


@pytest.mark.parametrize(
    "pattern, said",
    [
        ("{0..99999999}.tar", "100,000,000 addresses, at most 10,000,000"),
        ("{00..99}" * 4, "100,000,000"),
        ("{0..3,{1..99999999999}}", "100,000,000,000"),
        ("{a,b}" * 60, r"more than 10\^15"),
        ("{0..9}" * 50_000, "more than"),
        ("{" + "0" * 100_000 + "..9}", "more than"),
        ("{0..9999999}" + "x" * 2000, "stands for 10,000,000 addresses"),
        ("{" * 100_000, "more than 50 deep"),
        ("}{" * 1000, "closes at character 1"),
        ("{1,{2}", "1 brace.* not closed"),
    ],
)
def test_a_typing_error_in_braces_takes_no_memory(pattern, said):
    started = time.monotonic()
    with pytest.raises(ValueError, match=f"^brace pattern '.*{said}") as refusal:
        expand_braces(pattern)
    assert len(str(refusal.value)) < 500 and time.monotonic() - started < 2
