"""Rules of curation: what they mean, against NumPy by hand; what they refuse; that nothing in them is executed."""

from __future__ import annotations

import numpy as np
import pytest

from prolip.curate.rules import Expression, Rule, parse_rules

COLUMNS = {"a": np.array([1.0, 2.0, np.nan, -4.0]), "b": np.array([0.5, 2.0, 1.0, 1.0])}


@pytest.mark.parametrize(
    "text,want",
    [
        ("a < b", [False, False, False, True]),
        ("not a < b", [True, True, True, False]),
        ("0 <= a < 2 or b == 2", [True, True, False, False]),
        ("a > quantile(a, 0.5) and b >= 0.5", [False, True, False, False]),
        ("-a * 2 + b ** 2 / 4", [-1.9375, -3.0, np.nan, 8.25]),
        ("abs(a) - sqrt(b) + log(exp(b))", [1 - 0.5**0.5 + 0.5, 4 - 2**0.5, np.nan, 4.0]),
        ("-(a < b) + (a < 2) - log(b > 0)", [1.0, 0.0, 0.0, 0.0]),
        ("1", [1.0] * 4),
    ],
)
def test_a_formula_is_that_of_numpy(text, want):
    got = Expression.parse(text)(COLUMNS, {("a", 0.5): 1.0})
    np.testing.assert_allclose(got, want)
    assert got.shape == (4,)


def test_what_a_formula_reads_is_known_before_any_column_is():
    expression = Expression.parse("a > quantile(b, 0.9) and abs(c) < 1")
    assert expression.columns == {"a", "b", "c"} and expression.quantiles == {("b", 0.9)}
    with pytest.raises(ValueError, match=r"no column 'c': choose from a, b"):
        expression.check_columns(["a", "b"])
    with pytest.raises(ValueError, match="no column 'match_probabilty': did you mean match_probability"):
        Expression.parse("match_probabilty < 1").check_columns(["match_probability", "b"])


NONE = ["__import__('os').system('true')", "a.b", "a[0]", "'text'", "a <", "", "abs(a, b)", "quantile(a, 2)", "True"]
NONE += ["quantile(a + 1, 0.5)", "(a := 1)", "abs(x=a)", "a" * 50 + "(" * 300]


@pytest.mark.parametrize("text", NONE)
def test_what_is_no_formula_is_refused_and_never_run(text):
    with pytest.raises(ValueError, match="such as match_probability"):
        Expression.parse(text)


def test_a_rule_has_a_name_and_compares():
    rule = Rule.parse("mismatch: a < b")
    assert rule.name == "mismatch" and rule.drop(COLUMNS).tolist() == [False, False, False, True]
    for text in ("a < b", ": a < b", "two words: a < b", "mismatch: a + b"):
        with pytest.raises(ValueError, match="--drop .*: .*(give NAME: FORMULA|is not a comparison)"):
            Rule.parse(text)
    with pytest.raises(ValueError, match="--drop has x twice"):
        parse_rules(["x: a < 1", "x: b < 1"])
