"""Sources of data by one word, and bare addresses whose kind is recognised."""

import pytest
from tiny_tars import png

from prolip.data.reading.named import KINDS, NamedSource, parse_source, without_word


def make(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(png(1) if name.endswith(".png") else b"1\n")


@pytest.mark.parametrize("kind", KINDS)
def test_every_word_names_its_kind_whatever_the_address_looks_like(kind):
    assert parse_source(f"{kind}:a.csv,b::c") == NamedSource(kind, "a.csv,b::c")
    assert str(parse_source(f"{kind}:a")) == f"{kind}:a" and KINDS[kind].startswith(f"{kind}:")
    assert without_word(f"{kind}:pipe:cat a") == "pipe:cat a" and without_word("pipe:cat a") == "pipe:cat a"
    with pytest.raises(ValueError, match=rf"--train-data '{kind}:' has no address: write {kind}:"):
        parse_source(f"{kind}:", "--train-data")


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("a.csv", "csv"),
        ("a.TSV", "csv"),
        ("a.parquet", "parquet"),
        ("a.jsonl", "jsonl"),
        ("a.tar", "shards"),
        ("a.tar.gz", "shards"),
        ("d/{000..099}.tar", "shards"),
        ("a.tar::b.tar", "shards"),
        ("pipe:cat x", "shards"),
        ("https://h/x", "shards"),
        ("s3://b/{0..9}.tar?sig=1", "shards"),
        ("{s3://b/0.tar,http://h/1.tar}", "shards"),
    ],
)
def test_bare_addresses_are_recognised_by_their_form(address, kind):
    assert parse_source(address) == (kind, address)


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["0.tar", "index.json"], "shards"),
        (["classnames.txt", "test/0.tar"], "wds"),
        (["train/nshards.txt"], "wds"),
        (["0.tar", "nshards.txt"], "wds"),
        (["cat/1.png"], "images"),
        (["1.png", "1.txt"], "images"),
        (["train-0.parquet"], "parquet"),
        (["classnames.txt", "cat/1.png"], "images"),
        (["test/1.png"], "images"),
    ],
)
def test_folders_are_recognised_by_what_they_hold(tmp_path, files, kind):
    make(tmp_path, *files)
    assert parse_source(str(tmp_path)).kind == kind


def test_an_unknown_word_names_the_near_ones_and_all_forms(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^--data 'image:x': 'image' is no kind of data, did you mean images:FOLDER"):
        parse_source("image:x")
    with pytest.raises(ValueError, match="There are csv:FILE, .*, emoji:TARS"):
        parse_source("cvs:x.csv")
    make(tmp_path, "cvs:x.csv")  # a file that is there is meant
    assert parse_source("cvs:x.csv").kind == "csv"


def test_a_kind_that_a_flag_does_not_take_is_refused_with_those_that_it_takes():
    with pytest.raises(ValueError, match="of the kind texts, .*give one of csv:FILE, shards:TARS$"):
        parse_source("texts:a.txt", "--val-data", ("csv", "shards"))


def test_missing_paths_and_files_of_no_known_form_are_refused(tmp_path):
    make(tmp_path, "a.zip")
    with pytest.raises(FileNotFoundError, match=r"--data '.*a.zi' is missing .*Did you mean a.zip"):
        parse_source(f"{tmp_path}/a.zi")
    with pytest.raises(ValueError, match=r"ends in none of .csv, .*: check the name, or say what it is by a word"):
        parse_source(f"{tmp_path}/a.zip")


def test_secrets_of_an_address_are_not_shown():
    with pytest.raises(ValueError) as refused:
        parse_source("https://user:word@h/a.csv?key=5", kinds=("shards",))
        parse_source("wds:https://user:word@h/a", kinds=("shards",))
    assert "word@" not in str(refused.value)
