"""Sources by one word, bare addresses whose kind is recognised, and the addresses that may be opened at all."""

from __future__ import annotations

import time

import pytest
from tiny_tars import png

from prolip.data.reading.named import KINDS, NamedSource, parse_source, without_word
from prolip.data.reading.stream import check_address, expand_braces
from prolip.utils.secrecy import redacted


def make(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(png(1) if name.endswith(".png") else b"1\n")


def test_every_word_names_its_kind_and_bare_addresses_are_recognised_by_their_form():
    for kind, form in KINDS.items():
        assert parse_source(f"{kind}:a.csv,b::c") == NamedSource(kind, "a.csv,b::c")
        assert str(parse_source(f"{kind}:a")) == f"{kind}:a" and form.startswith(f"{kind}:")
        assert without_word(f"{kind}:pipe:cat a") == "pipe:cat a" == without_word("pipe:cat a")
        with pytest.raises(ValueError, match=rf"--train-data '{kind}:' has no address: write {kind}:"):
            parse_source(f"{kind}:", "--train-data")
    shards = ("a.tar", "a.tar.gz", "d/{000..099}.tar", "d/{a,b}", "a.tar::b.tar", "pipe:cat x", "https://h/x")
    shards += ("s3://b/{0..9}.tar?sig=1", "{s3://b/0.tar,http://h/1.tar}")
    tables = {"a.csv": "csv", "a.TSV": "csv", "a.parquet": "parquet", "a.jsonl": "jsonl"}
    for address, kind in (dict.fromkeys(shards, "shards") | tables).items():
        assert parse_source(address) == (kind, address)


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["0.tar", "index.json"], "shards"),
        (["classnames.txt", "test/0.tar"], "wds"),
        (["train/nshards.txt"], "wds"),
        (["0.tar", "nshards.txt"], "wds"),
        (["1.png", "1.txt"], "images"),
        (["train-0.parquet"], "parquet"),
        (["classnames.txt", "test/1.png"], "images"),
    ],
)
def test_folders_are_recognised_by_their_content(tmp_path, files, kind):
    make(tmp_path, *files)
    assert parse_source(str(tmp_path)).kind == kind


def test_what_cannot_be_told_is_refused_with_all_forms(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path, "a.zip")
    for text, error, said in (
        ("image:x", ValueError, "^--data 'image:x': 'image' is not a kind of data. Did you mean images:FOLDER"),
        ("cvs:x.csv", ValueError, "Known are csv:FILE, .*, emoji:TARS"),
        (f"{tmp_path}/a.zi", FileNotFoundError, "--data '.*a.zi' is missing .*Did you mean a.zip"),
        (f"{tmp_path}/a.zip", ValueError, "has no suffix of .csv, .*: check the name, or put its kind before it"),
    ):
        with pytest.raises(error, match=said):
            parse_source(text)
    make(tmp_path, "cvs:x.csv")  # a file that is there is meant
    assert parse_source("cvs:x.csv").kind == "csv"
    with pytest.raises(ValueError, match="of the kind texts, .*give one of csv:FILE, shards:TARS$"):
        parse_source("texts:a.txt", "--val-data", ("csv", "shards"))
    with pytest.raises(ValueError, match="https://h/a.csv' is data of the kind shards") as refused:
        parse_source("https://user:word@h/a.csv?key=5", kinds=("csv",))
    assert "word@" not in str(refused.value)


# --- which addresses are opened
OPENED = ["a.png", "./pipe:touch x", "/data/a b.tar", "file:///data/0.tar", "file:0.tar", "s3://b/{0..9}.tar", "~/x"]
OPENED += ["gs://b/0.tar", "hf://datasets/o/n/0.tar", "http://host/0.tar", "https://[::1]:80/a.png?of=ftp://b"]
OPENED += ["12:30.png", "a:b.tar"]
RUN = ["pipe:touch x", "PIPE:touch x", " pipe:touch x", "|touch x", "shell:touch x", "pipe://touch x", "pipe::touch x"]
OTHERS = ["ftp://host/a", "memory://a", "HTTP://h/a", "data:image/png;base64,AA", "local:///etc/passwd", "ssh://h/a"]
OTHERS += ["github://o:n@main/a", "s3a://b/a", " http://h/a", "simplecache::s3://b/a", "zip://a::http://h/b.zip"]
OTHERS += ["http:/h/a", "s3://b/a::file:///etc/passwd", "file:x::ftp://h", "./a://b", "s3:b", "file::ftp:x://y"]


def test_paths_and_urls_of_the_known_schemes_are_opened_anywhere_and_no_other_address():
    for address in OPENED:
        assert check_address(address) == check_address(address, pipes=True) == address
    said = dict.fromkeys(RUN, "only training shards may be commands") | dict.fromkeys(OTHERS, "")
    for address, why in {**said, "hf-hub:org/name": "only for models", "local-dir:runs/a": "only for models"}.items():
        with pytest.raises(ValueError, match="give a path .* or a URL of file, http, https, s3, gs or hf$") as refusal:
            check_address(address)
        assert repr(redacted(address)) in str(refusal.value) and why in str(refusal.value)
        if address[:5] != "pipe:":
            with pytest.raises(ValueError, match="s3, gs or hf, or a pipe: command$"):
                check_address(address, pipes=True)


def test_a_refusal_shows_no_secret():
    for address in ("pipe:curl -H SECRET x", "ftp://user:SECRET@host/0.tar", "s3://b/0.tar?sig=SECRET::zip://a"):
        with pytest.raises(ValueError, match="is not allowed") as refusal:
            check_address(address)
        assert "SECRET" not in str(refusal.value)
    with pytest.raises(ValueError, match=r"expands to .*") as refusal:
        expand_braces("https://user:SECRET@host/{0..99999999}.tar?sig=SECRET")
    assert "SECRET" not in str(refusal.value) and "{0..99999999}" in str(refusal.value)


@pytest.mark.parametrize(
    "pattern, said",
    [
        ("{0..2499}{a,b}{1..9..4}{c,d,e,f}{x,y}\\{{0..999}.tar", "120,000,000"),
        ("{0..99999999}.tar", "100,000,000 addresses: correct it, the limit is 10,000,000"),
        ("{0..3,{1..99999999999}}", "199,999,999,998"),
        ("{a,b}" * 60, r"more than 10\^15"),
        ("{" + "0" * 100_000 + "..9}", "more than"),
        ("{0..9999999}" + "x" * 2000, "expands to 10,000,000 addresses"),
        ("{" * 100_000, "more than 50 deep"),
        ("}{" * 1000, "unbalanced"),
    ],
)
def test_a_typing_error_in_braces_takes_no_memory(pattern, said):
    started = time.monotonic()
    with pytest.raises(ValueError, match=f"^brace pattern '.*{said}") as refusal:
        expand_braces(pattern)
    assert len(str(refusal.value)) < 500 and time.monotonic() - started < 2
