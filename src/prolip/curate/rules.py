"""Rules over columns: `match_probability < 0.2 and text_tokens > quantile(text_tokens, 0.9)`. Imports no torch."""

from __future__ import annotations

import ast
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt, ne
from typing import Any

import numpy as np

from prolip.utils.documents import shown
from prolip.utils.flags import did_you_mean
from prolip.utils.messages import first_few

#: Column -> meaning, for the help and the page.
MEANINGS = {
    "cosine": "cosine of the means (the CLIP score)",
    "score": "the model's own score of the pair",
    "match_probability": "probability that the pair matches, by the model's scale and bias",
    "normalised_score": "score minus the mean of its log-mean-exp over the batch's texts and over its images",
    "own_first": "1 if the image scores highest with its own caption within the batch",
    "image_uncertainty": "trace of the image, or the uncertainty of the model's method",
    "text_uncertainty": "trace of the caption, or the uncertainty of the model's method",
    "image_bits": "bits of information of the image about its caption (models with units)",
    "image_doubt": "weight of the base rate in the match probability; larger for unfamiliar images",
    "image_ambiguity": "ambiguity of the image in nats (models with general texts)",
    "image_novelty_first": "nats of novelty at the first tokens of the image: high for foreign images (fitted models)",
    "image_novelty_mean": "nats of novelty at its embedding: high for unfamiliar images (fitted models)",
    "text_bits": "bits of information of the caption about its image",
    "text_novelty_first": "nats of novelty at the first tokens of the caption (fitted models)",
    "text_novelty_mean": "nats of novelty at its embedding (fitted models)",
    "inclusion": "inclusion test of the image in its caption: above 0 if the caption includes it",
    "text_tokens": "tokens of the caption",
    "width": "image width in pixels",
    "height": "image height in pixels",
}
PLAIN = {"text_tokens", "width", "height"}  # columns that need no model
BINARY = {ast.Add: np.add, ast.Sub: np.subtract, ast.Mult: np.multiply, ast.Div: np.divide, ast.Pow: np.power}
COMPARISONS = {ast.Lt: lt, ast.LtE: le, ast.Gt: gt, ast.GtE: ge, ast.Eq: eq, ast.NotEq: ne}
FUNCTIONS: dict[str, Callable] = {"abs": np.abs, "log": np.log, "exp": np.exp, "sqrt": np.sqrt}
CHARACTERS, DEPTH = 20_000, 100  # most characters of a formula, and nested operations: each is a Python call
EXAMPLE = "such as match_probability < 0.2 or text_bits < quantile(text_bits, 0.1)"

Columns = Mapping[str, np.ndarray]
Quantiles = Mapping[tuple[str, float], float]


@dataclass(frozen=True)
class Expression:
    """A formula over the columns of a table; quantiles: the (column, share) pairs it needs."""

    text: str
    tree: ast.expr
    columns: frozenset[str]
    quantiles: frozenset[tuple[str, float]]

    @classmethod
    def parse(cls, text: str) -> Expression:
        """Parse a formula without executing anything. ValueError names the unsupported part."""
        text = text.strip()
        try:
            if len(text) > CHARACTERS:  # Python's parser may crash on much longer text
                raise ValueError(f"more than {CHARACTERS:,} characters")
            tree = ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = getattr(error, "msg", error)
            raise ValueError(f"{shown(text)} is not a rule ({why}). Give a formula, {EXAMPLE}") from None
        columns: defaultdict = defaultdict(lambda: np.zeros(1))  # records every key that is read
        quantiles: defaultdict = defaultdict(float)
        with np.errstate(all="ignore"):
            evaluate(tree, text, columns, quantiles)
        return cls(text, tree, frozenset([*columns, *(name for name, _ in quantiles)]), frozenset(quantiles))

    def check_columns(self, known: list[str]) -> None:
        """Raise ValueError for a column that a table lacks."""
        for name in sorted(self.columns - set(known)):
            raise ValueError(f"{shown(self.text)}: no column {name!r}: {did_you_mean(name, known)}")

    def __call__(self, columns: Columns, quantiles: Quantiles | None = None) -> np.ndarray:
        """Return the value for every row, (N,) float64, or booleans for comparisons; comparisons with NaN are false."""
        rows = len(next(iter(columns.values()))) if columns else 0
        with np.errstate(all="ignore"):
            return np.broadcast_to(evaluate(self.tree, self.text, columns, quantiles or {}), (rows,))


def constant(node: ast.expr) -> float:
    """Return the number of a node; NaN for other nodes and for numbers that no float can represent."""
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    return math.nan


def evaluate(node: Any, text: str, columns: Columns, quantiles: Quantiles, depth: int = 0) -> Any:
    """Return the value of a node of the formula `text`. ValueError outside the grammar of `Expression`."""

    def value(part: ast.expr) -> Any:
        return evaluate(part, text, columns, quantiles, depth + 1)

    def number(part: ast.expr) -> np.ndarray:  # NumPy cannot subtract booleans
        return np.asarray(value(part), np.float64)

    if depth > DEPTH:
        raise ValueError(f"{shown(text)} has more than {DEPTH} nested operations. Join parts by `or` or `and`")
    match node:
        case ast.Constant() if not math.isnan(constant(node)):
            return np.float64(constant(node))  # overflows to inf, whereas a Python float raises
        case ast.Name(id=name):
            return columns[name]
        case ast.Call(func=ast.Name(id="quantile"), args=[ast.Name(id=column), share], keywords=[]):
            if 0 <= constant(share) <= 1:
                return quantiles[column, constant(share)]
        case ast.Call(func=ast.Name(id=name), args=[part], keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](number(part))
        case ast.BoolOp(op=op, values=parts):
            join = np.logical_and if isinstance(op, ast.And) else np.logical_or
            return join.reduce(np.broadcast_arrays(*[np.asarray(value(part), dtype=bool) for part in parts]))
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return np.logical_not(value(part))
        case ast.UnaryOp(op=ast.USub(), operand=part):
            return -number(part)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return BINARY[type(op)](number(left), number(right))
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in COMPARISONS for op in ops):
            sides = [value(part) for part in (left, *others)]
            each = [COMPARISONS[type(op)](a, b) for op, a, b in zip(ops, sides, sides[1:])]
            return np.logical_and.reduce(np.broadcast_arrays(*each))
    functions = f"{', '.join(FUNCTIONS)}, quantile(COLUMN, SHARE from 0 to 1)"
    allowed = f"numbers, columns, + - * / **, comparisons, and, or, not, {functions}"
    what = shown(ast.get_source_segment(text, node))
    raise ValueError(f"{shown(text)}: {what} is not supported. A rule may use {allowed}, {EXAMPLE}")


@dataclass(frozen=True)
class Rule:
    """Drop the samples for which a formula is true; name: the reason in the tables."""

    name: str
    drop: Expression

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse `NAME: FORMULA`. ValueError with an example."""
        name, colon, formula = text.partition(":")
        if not colon or not name.strip().replace("-", "_").isidentifier():
            raise ValueError(f"--drop {shown(text)}: give NAME: FORMULA, such as mismatch: match_probability < 0.2")
        drop = Expression.parse(formula)
        is_not = isinstance(getattr(drop.tree, "op", None), ast.Not)
        if not isinstance(drop.tree, (ast.Compare, ast.BoolOp)) and not is_not:
            raise ValueError(f"--drop {shown(text)}: {shown(drop.text)} is not a comparison. Give one, {EXAMPLE}")
        return cls(name.strip(), drop)


def parse_rules(texts: list[str]) -> list[Rule]:
    """Return all rules of a command line. ValueError if two have the same name."""
    rules = [Rule.parse(text) for text in texts]
    names = [rule.name for rule in rules]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"--drop has {first_few(twice, 3)} twice. Give each rule a different name")
    return rules
