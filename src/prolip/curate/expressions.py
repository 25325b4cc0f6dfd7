"""Rules as people write them: `match_probability < 0.2 and text_tokens > quantile(text_tokens, 0.9)` over columns."""
from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from prolip.utils.documents import shown
from prolip.utils.messages import first_few

#: What a rule may hold beside numbers, columns, `and`, `or`, `not` and brackets.
BINARY: dict[type, Callable] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: np.divide, ast.Pow: np.power,
}  # fmt: skip
COMPARISONS: dict[type, Callable] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
FUNCTIONS: dict[str, Callable] = {"abs": np.abs, "log": np.log, "exp": np.exp, "sqrt": np.sqrt}
QUANTILE = "quantile"
#: Characters of a formula, and operations in each other: every one is a call of Python.
CHARACTERS, DEPTH = 20_000, 100
EXAMPLE = "such as match_probability < 0.2 or text_bits < quantile(text_bits, 0.1)"

Columns = Mapping[str, np.ndarray]


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
        check(tree, text)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        quantiles = frozenset(quantile_of(node) for node in calls if name_of(node.func) == QUANTILE)
        names = {name_of(node) for node in ast.walk(tree)} - {name_of(node.func) for node in calls} - {""}
        return cls(text, tree, frozenset(names), quantiles)

    def check_columns(self, known: list[str]) -> None:
        """ValueError for a column that a table does not have."""
        for name in sorted(self.columns - set(known)):
            near = get_close_matches(name, known, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"{shown(self.text)}: there is no column {name!r}: {hint}")

    def __call__(self, columns: Columns, quantiles: Mapping[tuple[str, float], float] | None = None) -> np.ndarray:
        """Its value for every row, (N,) float64, or booleans for comparisons; a comparison with NaN is false."""
        rows = len(next(iter(columns.values()))) if columns else 0
        with np.errstate(all="ignore"):
            value = evaluate(self.tree, columns, quantiles or {})
        return np.broadcast_to(value, (rows,))


def name_of(node: ast.AST) -> str:
    """A name, or nothing for what is none."""
    return node.id if isinstance(node, ast.Name) else ""


def quantile_of(node: ast.Call) -> tuple[str, float]:
    """Column and share of a call that `is_quantile`."""
    share: Any = node.args[1]
    return name_of(node.args[0]), float(share.value)


def check(node: ast.expr, text: str, depth: int = 0) -> None:
    """ValueError for what a formula may not hold."""
    if depth > DEPTH:
        raise ValueError(f"{shown(text)} has more than {DEPTH} operations in each other: join parts by `or` or `and`")
    if is_number(node) or isinstance(node, ast.Name):
        return
    parts = parts_of(node)
    if isinstance(node, ast.Call) and not node.keywords and (name := name_of(node.func)) in (QUANTILE, *FUNCTIONS):
        parts = [] if name == QUANTILE else node.args
        if not is_quantile(node.args) if name == QUANTILE else len(parts) != 1:
            wanted = "quantile(COLUMN, SHARE), a share from 0 to 1" if name == QUANTILE else "one value"
            raise ValueError(f"{shown(text)}: {shown(ast.get_source_segment(text, node))} wants {wanted}")
    if parts is None:
        allowed = f"numbers, columns, + - * / **, comparisons, and, or, not, {', '.join((*FUNCTIONS, QUANTILE))}"
        what = shown(ast.get_source_segment(text, node))
        raise ValueError(f"{shown(text)}: {what} is not understood: a rule has {allowed}, {EXAMPLE}")
    for part in parts:
        check(part, text, depth + 1)


def is_number(node: ast.expr) -> bool:
    """Whether a node is a number that a float can hold."""
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_quantile(args: list[Any]) -> bool:
    """Whether these are a column and a share."""
    return len(args) == 2 and isinstance(args[0], ast.Name) and is_number(args[1]) and 0 <= args[1].value <= 1


def parts_of(node: ast.expr) -> list[ast.expr] | None:
    """The operands of an operation that is known, None for any other node."""
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        return [node.operand]
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        return [node.left, node.right]
    if isinstance(node, ast.Compare) and all(type(op) in COMPARISONS for op in node.ops):
        return [node.left, *node.comparators]
    return None


def evaluate(node: Any, columns: Columns, quantiles: Mapping[tuple[str, float], float]) -> Any:
    """The value of a node that `check` has passed."""

    def value(part: ast.expr) -> Any:
        return evaluate(part, columns, quantiles)

    if isinstance(node, ast.Constant):
        number: Any = node.value
        return np.float64(number)  # which overflows to inf, where Python's own raises
    if isinstance(node, ast.Name):
        return columns[node.id]
    if isinstance(node, ast.Call):
        name = name_of(node.func)
        return quantiles[quantile_of(node)] if name == QUANTILE else FUNCTIONS[name](value(node.args[0]))
    if isinstance(node, ast.BoolOp):
        join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
        return join.reduce(np.broadcast_arrays(*[np.asarray(value(part), dtype=bool) for part in node.values]))
    if isinstance(node, ast.UnaryOp):
        return np.logical_not(value(node.operand)) if isinstance(node.op, ast.Not) else -value(node.operand)
    if isinstance(node, ast.BinOp):
        return BINARY[type(node.op)](value(node.left), value(node.right))
    sides = [value(part) for part in (node.left, *node.comparators)]
    each = [COMPARISONS[type(op)](a, b) for op, a, b in zip(node.ops, sides, sides[1:])]
    return np.logical_and.reduce(np.broadcast_arrays(*each))


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
        if not isinstance(expression.tree, (ast.Compare, ast.BoolOp)) and not (
            isinstance(expression.tree, ast.UnaryOp) and isinstance(expression.tree.op, ast.Not)
        ):
            raise ValueError(f"--drop {shown(text)}: {shown(expression.text)} is no comparison: say when a sample is"
                             f" dropped, {EXAMPLE}")  # fmt: skip
        return cls(name.strip(), expression)


def parse_rules(texts: list[str]) -> list[Rule]:
    """All rules of a command line. ValueError where two have one name."""
    rules = [Rule.parse(text) for text in texts]
    names = [rule.name for rule in rules]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"--drop has {first_few(twice, 3)} twice: give each rule a name of its own")
    return rules
