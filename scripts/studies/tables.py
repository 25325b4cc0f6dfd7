"""Helpers for the tables of all studies: cells, differences with intervals, and writing a table into a page."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from prolip.utils.outputs import replacing

if TYPE_CHECKING:
    from prolip.corpora.emoji.result import CorpusResult
    from prolip.evaluation.metrics.bootstrap import Statistic

    Found = Sequence[Mapping[str, Statistic]]

DRAWS = 1000
MARK = "<!-- {}: by scripts/{}.py -->"


def cell(values: Sequence[float], digits: int | None = 1) -> str:
    """Format the mean, and each value in brackets; a dash without values. digits None: 1 for 10 or more, 3 below."""
    if not len(values) or np.isnan(values).any():
        return "-"
    if digits is None:
        digits = 1 if np.mean(np.abs(values)) >= 10 else 3
    each = f" ({' '.join(f'{x:.{digits}f}' for x in values)})" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{each}"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose first column is aligned to the left."""
    return [
        f"| {' | '.join(h.strip() for h in heads)} |",
        f"|---|{'---:|' * (len(heads) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def statistics(result: CorpusResult) -> dict[str, Statistic]:
    """Return the metrics with intervals, by name: retrieval among names and among all captions."""
    from prolip.evaluation.metrics.bootstrap import clustered
    from prolip.evaluation.metrics.ranking import statistics_of

    return {
        f"{name}/{key}": clustered(one, result.clusters)
        for name, (i2t, t2i) in result.rankings.items()
        for key, one in statistics_of(i2t, t2i, name).items()
    }


def value_of(statistic: Statistic) -> float:
    """Compute the metric with each query counted once."""
    return float(statistic.estimate({name: np.ones((1, size)) for name, size in statistic.sizes.items()})[0])


def gain(first: Found, second: Found, keys: Sequence[str]) -> dict[str, str]:
    """Format second - first with its interval, seeds averaged, shares in points; a dash if seeds are missing."""
    from prolip.evaluation.metrics.bootstrap import combine, intervals

    if not first or len(first) != len(second):
        return dict.fromkeys(keys, "-")
    ways, change = [(-1.0, first), (1.0, second)], {}
    for key in keys:
        scale = 1.0 if key.endswith("rsum") else 100.0
        terms = [(sign * scale / len(found), result) for sign, found in ways for result in found]
        change[key] = combine([(factor, result[key]) for factor, result in terms])
    found = intervals(change, DRAWS)
    return {key: "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(round(x, 1) + 0.0 for x in found[key])) for key in found}


def write(page: Path, tables: dict[str, list[str]], script: str) -> None:
    """Write each table between the two marks of its name and script. SystemExit if the page lacks them."""
    text = page.read_text(encoding="utf-8")
    for name, lines in tables.items():
        mark = MARK.format(name, script)
        if text.count(mark) != 2:
            sys.exit(f"error: {page} has {text.count(mark)} lines {mark!r}, expected two. Put them around the table")
        before, _, after = text.split(mark)
        text = mark.join([before, "\n" + "\n".join(lines) + "\n", after])
    with replacing(page) as temporary:
        temporary.write_text(text, encoding="utf-8")
