"""Rules as people write them: `match_probability < 0.2 and text_tokens > quantile(text_tokens, 0.9)` over columns."""

from __future__ import annotations

import ast
import math
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from prolip.utils.documents import shown
from prolip.utils.messages import first_few

#: What a rule may hold beside numbers, columns, `and`, `or`, `not` and brackets.
BINARY: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: np.divide,
    ast.Pow: np.power,
}
COMPARISONS: dict[type, Callable] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
FUNCTIONS: dict[str, Callable] = {"abs": np.abs, "log": np.log, "exp": np.exp, "sqrt": np.sqrt}
QUANTILE = "quantile"
#: Characters of a formula, and operations in each other: every one is a call of Python.
CHARACTERS, DEPTH = 20_000, 100
EXAMPLE = "such as match_probability < 0.2 or text_bits < quantile(text_bits, 0.1)"

Columns = Mapping[str, np.ndarray]
Quantiles = Mapping[tuple[str, float], float]


@dataclass(frozen=True)
class Expression:
    """A formula over the columns of a table, read by `parse`.

    text: as it was given; columns: those that it reads; quantiles: (column, share) pairs whose values it wants.
    """

    text: str
    tree: ast.expr
    columns: frozenset[str]
    quantiles: frozenset[tuple[str, float]]

    @classmethod
    def parse(cls, text: str) -> Expression:
        """Read a formula; nothing in it is ever executed. ValueError saying what is not understood."""
        text = text.strip()
        try:
            if len(text) > CHARACTERS:  # Python's parser may crash at much more
                raise ValueError(f"more than {CHARACTERS:,} characters")
            tree = ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = getattr(error, "msg", error)
            raise ValueError(f"{shown(text)} is no rule ({why}): give a formula, {EXAMPLE}") from None
        columns: defaultdict = defaultdict(lambda: np.zeros(1))  # what is asked for stays as a key
        quantiles: defaultdict = defaultdict(float)
        with np.errstate(all="ignore"):
            evaluate(tree, text, columns, quantiles)
        return cls(text, tree, frozenset([*columns, *(name for name, _ in quantiles)]), frozenset(quantiles))

    def check_columns(self, known: list[str]) -> None:
        """ValueError for a column that a table does not have."""
        for name in sorted(self.columns - set(known)):
            near = get_close_matches(name, known, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"{shown(self.text)}: there is no column {name!r}: {hint}")

    def __call__(self, columns: Columns, quantiles: Quantiles | None = None) -> np.ndarray:
        """Its value for every row, (N,) float64, or booleans for comparisons; a comparison with NaN is false."""
        rows = len(next(iter(columns.values()))) if columns else 0
        with np.errstate(all="ignore"):
            value = evaluate(self.tree, self.text, columns, quantiles or {})
        return np.broadcast_to(value, (rows,))


def constant(node: ast.expr) -> float:
    """The number that a node is, NaN for any other node and for what no float can hold."""
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    return math.nan


def evaluate(node: Any, text: str, columns: Columns, quantiles: Quantiles, depth: int = 0) -> Any:
    """The value of a node of the formula `text`. ValueError for what a formula may not hold."""

    def value(part: ast.expr) -> Any:
        return evaluate(part, text, columns, quantiles, depth + 1)

    def number(part: ast.expr) -> np.ndarray:  # NumPy has no difference of booleans
        return np.asarray(value(part), np.float64)

    if depth > DEPTH:
        raise ValueError(f"{shown(text)} has more than {DEPTH} operations in each other: join parts by `or` or `and`")
    match node:
        case ast.Constant() if not math.isnan(constant(node)):
            return np.float64(constant(node))  # which overflows to inf, where Python's own raises
        case ast.Name(id=name):
            return columns[name]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in (QUANTILE, *FUNCTIONS):
            match args:
                case [ast.Name(id=column), share] if name == QUANTILE and 0 <= constant(share) <= 1:
                    return quantiles[column, constant(share)]
                case [part] if name != QUANTILE:
                    return FUNCTIONS[name](number(part))
            wanted = "quantile(COLUMN, SHARE), a share from 0 to 1" if name == QUANTILE else "one value"
            raise ValueError(f"{shown(text)}: {shown(ast.get_source_segment(text, node))} wants {wanted}")
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
    allowed = f"numbers, columns, + - * / **, comparisons, and, or, not, {', '.join((*FUNCTIONS, QUANTILE))}"
    what = shown(ast.get_source_segment(text, node))
    raise ValueError(f"{shown(text)}: {what} is not understood: a rule has {allowed}, {EXAMPLE}")


@dataclass(frozen=True)
class Rule:
    """Samples of which the formula is true are dropped; name: the reason that is written beside them."""

    name: str
    drop: Expression

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read `NAME: FORMULA`; ValueError with an example otherwise."""
        name, colon, formula = text.partition(":")
        if not colon or not name.strip().replace("-", "_").isidentifier():
            raise ValueError(f"--drop {shown(text)}: give NAME: FORMULA, such as mismatch: match_probability < 0.2")
        expression = Expression.parse(formula)
        tree = expression.tree
        if not isinstance(tree, (ast.Compare, ast.BoolOp)) and not isinstance(getattr(tree, "op", None), ast.Not):
            raise ValueError(
                f"--drop {shown(text)}: {shown(expression.text)} is no comparison: say when a sample is"
                f" dropped, {EXAMPLE}"
            )
        return cls(name.strip(), expression)


def parse_rules(texts: list[str]) -> list[Rule]:
    """All rules of a command line. ValueError where two have one name."""
    rules = [Rule.parse(text) for text in texts]
    names = [rule.name for rule in rules]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"--drop has {first_few(twice, 3)} twice: give each rule a name of its own")
    return rules
