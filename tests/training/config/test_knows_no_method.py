"""A new method changes nothing here: the code names no method, none of its parameters and no part of a model."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from prolip.cli.main import VERBS
from prolip.methods import METHODS
from prolip.models.config import ProLIPCfg

SOURCE = Path(__file__).parents[3] / "src" / "training"
#: All modules but the settings of our own models.
FILES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "model_options.py")
#: Names of settings that are ordinary words here too: torch's `forward`.
ALLOWED = {"forward"}
PARAMETERS = {field.name for method in METHODS.values() for field in dataclasses.fields(method.config)}
PARAMETERS |= ProLIPCfg.model_fields.keys() - ALLOWED
#: Attributes by which a model of one kind has its towers.
PARTS = {"visual", "text"}
#: A method's name; not the package `prolip` of an import or an address in it, not a part of --grad-clip-norm, not the
#: command `prolip VERB`.
COMMAND = f"prolip (?:{'|'.join(verb for group in VERBS.values() for verb in group)})"
METHOD = re.compile(rf"(?<![\w-])(?!{COMMAND}\b)({'|'.join(METHODS)})(?!\w|\.[a-z_])", re.IGNORECASE)
WORD = re.compile(r"[\w-]+")


def found_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what is named) for every name, attribute, argument, keyword and string of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = {word.strip("-").replace("-", "_") for word in WORD.findall(node.value)}
            yield from ((node.lineno, match[0]) for match in METHOD.finditer(node.value))
            yield from ((node.lineno, word) for word in words & PARAMETERS)
        elif isinstance(node, ast.Attribute) and node.attr in PARTS | PARAMETERS:
            yield node.lineno, f".{node.attr}"
        for name in (getattr(node, key, None) for key in ("id", "attr", "arg", "name")):
            if isinstance(name, str) and not isinstance(node, ast.alias):
                # `clip` alone is a verb, as in clip_grad_norm
                named = [method for method in METHODS if method != "clip" or name.lower() == "clip"]
                package = isinstance(node, ast.Name) and name == "prolip"
                if name in PARAMETERS or (not package and any(m in name.lower().split("_") for m in named)):
                    yield node.lineno, name


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(SOURCE)) for path in FILES])
def test_no_method_and_no_parameter_of_one_is_named(path):
    assert list(found_in(ast.parse(path.read_text()))) == []


def test_a_name_would_be_seen_and_what_is_no_method_is_let_through():
    named = ("if config.method == 'siglip': pass", "model.visual.eval()", "help = 'give --mask-ratio'")
    assert all(list(found_in(ast.parse(line))) for line in named)
    free = "import prolip", "prolip.get_tokenizer(name)", "'--grad-clip-norm'", "nn.utils.clip_grads_with_norm_(p)"
    assert not [hit for line in free for hit in found_in(ast.parse(line))]
