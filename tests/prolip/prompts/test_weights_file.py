"""Weights of prompts in a file: what is read is what was written, and others' weights are refused by what differs."""

import json
from dataclasses import replace

import pytest
import torch
from commands import run

from prolip.prompts.bprw import Reweighing
from prolip.prompts.weights import PromptWeights

NAMES, TEMPLATES = ("cat", "dog", "dog"), ("a {c}.", "{c}")


@pytest.fixture
def kept():
    table = torch.rand(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    table /= table.sum(1, keepdim=True)
    return PromptWeights(NAMES, TEMPLATES, table, "local-dir:m", "f" * 32, Reweighing(5), "data/wds_pets", "d" * 32)


def test_a_file_holds_every_digit(kept, tmp_path):
    path = tmp_path / "below" / "w.json"
    kept.save(path)
    found = PromptWeights.load(path)
    assert torch.equal(found.table, kept.table) and found.table.dtype == torch.float64
    assert found.to_dict() == kept.to_dict() and str(found) == str(kept) and "bprw:5 by data/wds_pets" in str(kept)
    assert replace(kept, table=kept.table.flip(0)).digest != kept.digest
    assert torch.equal(kept.weights(torch.zeros(2, 2), 1), kept.table[1:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"classnames": ("cat", "dog", "cow")}, "3 classes, these are 3, and number 3 is 'dog' there and 'cow' here"),
        ({"classnames": ("cat", "dog")}, "3 classes, these are 2, and number 3 is 'dog' there and None here"),
        ({"templates": ("a {}.", "the {}")}, "number 2 is '{c}' there and 'the {c}' here"),
        ({"fingerprint": "0" * 32}, "weights for prompts of local-dir:m"),
        ({"data": "d" * 32}, "these very images"),
    ],
)
def test_other_classes_prompts_models_and_the_same_images_are_refused(kept, change, words):
    fits = {"classnames": NAMES, "templates": ("a {}.", "{}"), "fingerprint": "f" * 32, "data": "e" * 32}
    kept.check(**fits)
    with pytest.raises(ValueError, match=words.replace("{", r"\{")):
        kept.check(**(fits | change))


def damaged(**change):
    return lambda values: values | change


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damaged(format="other"), "not prolip-prompts-1"),
        (lambda values: [], "not prolip-prompts-1"),
        (lambda values: {k: v for k, v in values.items() if k != "model"}, "it has no 'model'"),
        (damaged(classes=[{"name": "cat", "weights": [0.5, 0.6]}]), "that sum to one"),
        (damaged(classes=[{"name": "cat", "weights": [1.5, -0.5]}]), "numbers of 0 or more"),
        (damaged(classes=[{"name": "cat", "weights": [1.0]}]), "are not 2 numbers"),
        (damaged(classes=[{"name": "cat", "weights": ["x", "y"]}]), "is not a file of prompt weights"),
        (damaged(classes=[]), "are not 2 numbers"),
        (damaged(contents=[3]), "is not a text"),
        (damaged(templates=["a {c}.", "a"]), "its prompt 'a' has no {c}"),
        (damaged(settings="5,alpha=x"), "bprw"),
    ],
)
def test_a_file_that_is_none_says_what_is_wrong(kept, tmp_path, damage, words):
    path = tmp_path / "w.json"
    with pytest.raises(FileNotFoundError, match="no file .*w.json"):
        PromptWeights.load(path)
    path.write_text(json.dumps(damage(kept.to_dict())))
    with pytest.raises(ValueError, match=words) as raised:
        PromptWeights.load(path)
    assert "w.json is not a file of prompt weights" in str(raised.value)


def test_a_file_from_before_contents_were_kept_is_read(kept, tmp_path):
    values = kept.to_dict()
    assert values.pop("contents") == []
    (tmp_path / "w.json").write_text(json.dumps(values))
    assert PromptWeights.load(tmp_path / "w.json").to_dict() == kept.to_dict()


def test_names_of_classes_are_told_apart_and_shown_without_escape_sequences(kept, tmp_path, capsys):
    replace(kept, classnames=("a\x1b[31m\nb", *kept.classnames[1:])).save(tmp_path / "w.json")
    run("prompts", "show", tmp_path / "w.json")
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "a\\x1b[31m\\nb" in printed
    lines = [line.split(" (entropy")[0] for line in printed.splitlines()][-2:]
    assert lines == ["dog (class 1)", "dog (class 2)"]
