"""Faults that json, yaml and str.splitlines accept silently."""

import json
import os
import random

import pytest

from prolip.data.sets import read_lines
from prolip.evaluation.datasets.base import DamagedData
from prolip.evaluation.datasets.own import lines_beside
from prolip.evaluation.datasets.sources import find_place
from prolip.evaluation.datasets.webdataset import parse
from prolip.utils.documents import entries, read_json, read_yaml, text_lines
from prolip.utils.flags import FlagError
from training.config import read_config_file

SETTINGS = {"model": {"model": "ProLIP-ViT-test"}, "optim": {"lr": 0.1, "wd": 0.2}, "run": {"epochs": 3}}


def written(kind, sections):
    """Sections as pairs of a name and pairs of settings, as JSON or YAML."""
    if kind == "yaml":
        return "".join(f"{name}:\n" + "".join(f"  {k}: {v}\n" for k, v in pairs) for name, pairs in sections)
    parts = ((name, ", ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in pairs)) for name, pairs in sections)
    return "{" + ",\n".join(f"{json.dumps(name)}: {{{inside}}}" for name, inside in parts) + "}"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["json", "yaml"])
def test_a_key_that_stands_twice_in_a_config_file_is_refused(tmp_path, kind, seed):
    """The last one counted, so a learning rate that was changed above it had no effect."""
    rng = random.Random(f"{kind} {seed}")
    sections = [(name, list(settings.items())) for name, settings in SETTINGS.items()]
    path = tmp_path / f"config.{kind}"
    path.write_text(written(kind, sections))
    assert read_config_file(str(path)) == SETTINGS
    pairs = rng.choice([sections, *(settings for _, settings in sections)])
    key, value = rng.choice(pairs)
    pairs.insert(rng.randint(0, len(pairs)), (key, value if pairs is sections else 77))
    path.write_text(written(kind, sections))
    with pytest.raises(FlagError, match=rf"config.{kind} .*the key '{key}' occurs twice.*: remove"):
        read_config_file(str(path))


def bomb(levels):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    return "\n".join(lines + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)])


TRAPS = {bomb(9): "more than 100,000 values", "a: &a [*a]": "nested more than 50 levels", "[" * 5000: "too deeply"}
TRAPS |= {
    "a: !!python/object/apply:os.system [true]": "constructor",
    "a: [": "is not valid YAML",
    "\x00": "is not valid YAML",
}
TRAPS |= {"a: 1\nb: 2\na: 3": "the key 'a' occurs twice", "a: " + "x" * 2**17: "more than 131,072 bytes"}


@pytest.mark.parametrize("text", TRAPS, ids=TRAPS.values())
def test_yaml_that_traps_is_refused_in_a_line(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=TRAPS[text]) as caught:
        read_yaml(tmp_path / "c.yaml")
    assert "c.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_pipe_or_a_folder_in_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    for name, message in (("pipe.json", "is a pipe or a device"), (".", "Is a directory")):
        with pytest.raises((ValueError, OSError), match=message):
            read_json(tmp_path / name)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_entries_end_at_line_breaks_alone(tmp_path, end):
    """U+2028, U+0085 and form feeds within a name made two classes, or two captions, of one."""
    names = ["polar bear", "a\u2028b", "c\x85d", "e\x0cf", "g\x1ch"]
    text = end.join(names) + end + end
    (tmp_path / "classnames.txt").write_bytes(("\ufeff" + text).encode())
    assert lines_beside(tmp_path, "classnames.txt") == tuple(names)
    assert find_place(tmp_path).lines("classnames.txt") == tuple(names)
    (tmp_path / "captions.txt").write_bytes(text.encode())
    assert read_lines(tmp_path / "captions.txt") == list(names)
    raw = {"__key__": "a", "png": b"", "txt": text.encode()}
    assert parse("retrieval", 0, raw).captions == tuple(names)
    assert text_lines("") == text_lines(" \n") == []


@pytest.mark.parametrize("at", range(4))
def test_a_blank_line_among_entries_is_named(tmp_path, at):
    """It was a class of its own, without a name, and shifted the later ones."""
    lines = ["cat", "dog", "cow", "pig"]
    lines.insert(at, " ")
    (tmp_path / "classnames.txt").write_text("\n".join(lines) + "\n\n")
    with pytest.raises(ValueError, match=rf"line {at + 1} of .*classnames.txt is blank"):
        lines_beside(tmp_path, "classnames.txt")
    with pytest.raises(DamagedData, match=rf"line {at + 1} of .*classnames.txt is blank"):
        find_place(tmp_path).lines("classnames.txt")
    with pytest.raises(ValueError, match="line 2 of x is blank"):
        entries("a\n\nb", "x")
