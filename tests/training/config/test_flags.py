"""Flags from dataclass fields: types, files, and what an unknown flag is answered."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from prolip.utils.flags import FlagError, Parser, add_flags, build, explain_unknown
from training.main import RETIRED


@dataclass(kw_only=True)
class Example:
    """One field of every kind."""

    train_data: str | None = None
    lr: float = field(default=1e-3, metadata={"help": "learning rate, 100% of it"})
    steps: int = 3
    resampled: bool = False
    shape: Literal["cosine", "const"] = "cosine"
    form: str = field(default="exact", metadata={"choices": ("exact", "printed")})
    sizes: tuple[int, ...] = ()
    range: tuple[float, float] = (0.0, 1.0)
    names: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    clip: float | None = None


def parse(*words: str) -> Example:
    parser = Parser(RETIRED)
    add_flags(parser, "example", Example)
    given = vars(parser.parse_strictly(list(words)))
    return build(Example, "example", {name.split(".")[1]: value for name, value in given.items()})


def test_every_kind_of_field_is_read_from_its_flag():
    words = "--train-data a.tar --lr 1e-4 --steps 5 --resampled --shape const --form printed --sizes 1 2 --names x"
    got = parse(*shlex.split(words), "--clip", "1", "--options", "scale=(0.8,1.0)", "gray=0.2", "mode=fast")
    want = {"train_data": "a.tar", "lr": 1e-4, "steps": 5, "resampled": True, "shape": "const", "form": "printed"}
    want |= {"sizes": (1, 2), "names": ["x"], "clip": 1.0}
    want |= {"options": {"scale": (0.8, 1.0), "gray": 0.2, "mode": "fast"}}
    assert got == Example(**want)


@pytest.mark.parametrize("word", ["-3", "-.5", "-2E-3"])
def test_negative_numbers_are_no_flags(word):
    assert parse("--lr", word).lr == float(word)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train_data", "x"], "unknown flag --train_data: use --train-data"),
        (["--trian-data", "x"], "did you mean --train-data"),
        (["--horovod"], "start with torchrun"),
        (["--coca-caption-loss-weight", "2"], "CoCa is not supported"),
        (["--qqqq"], "--help lists all flags"),
        (["--step", "3"], "did you mean --steps"),
        (["stray"], "without a flag"),
        (["--lr", "fast"], "invalid float value: 'fast'"),
        (["--shape", "round"], "invalid choice: 'round'"),
        (["--options", "scale"], "give key=value"),
    ],
)
def test_a_wrong_flag_is_answered_with_the_right_one(words, message):
    with pytest.raises(FlagError, match=message):
        parse(*words)


def test_every_retired_flag_names_its_replacement():
    for name, remedy in RETIRED.items():
        assert remedy in explain_unknown(f"--{name.replace('*', 'x')}", ["--output"], RETIRED)
        assert remedy in explain_unknown(f"--{name.replace('*', 'x').replace('-', '_')}=1", ["--output"], RETIRED)


def test_a_file_is_checked_as_flags_are():
    assert build(Example, "example", {"lr": "1e-3", "sizes": [1, 2], "clip": None}).sizes == (1, 2)
    for values, message in (
        ({"lrr": 1.0}, "has no setting 'lrr': did you mean lr"),
        ({"steps": "many"}, "example.steps is 'many', a str: give a int"),
        ({"steps": True}, "example.steps is True, a bool: give a int"),
        ({"shape": "round"}, "give one of cosine, const"),
        ({"resampled": 1}, "give a bool"),
        ({"range": [0.5]}, r"example.range is \[0.5\]: give 2 values"),
    ):
        with pytest.raises(FlagError, match=message):
            build(Example, "example", values)


def test_help_shows_the_text_and_the_default():
    parser = Parser()
    add_flags(parser, "example", Example)
    text = parser.format_help()
    assert "One field of every kind." in text
    assert "learning rate, 100% of it (default: 0.001)" in text
