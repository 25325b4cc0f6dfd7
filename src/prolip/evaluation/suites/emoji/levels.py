"""What the traces of the corpus say: by level, by length, against the number of true matches, by inclusion."""
from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

import numpy as np

from prolip.data.emoji import LEVELS, CaptionTable, Corpus
from prolip.evaluation.metrics.traces import partial_spearman, spearman, spread
from prolip.gaussian import Gaussian
from prolip.measures import inclusion_test

#: (inner, outer) along a concept's hierarchy: image, name, keyword, subgroup, group.
INCLUSIONS = tuple(combinations(("image", *reversed(LEVELS)), 2))
#: Pairs that are tested at a time.
PAIRS = 1 << 14


class Inclusion(NamedTuple):
    """H(inner in outer) over all true pairs: `rate` is the share with H > 0, `median` the median H."""

    inner: str
    outer: str
    pairs: int
    rate: float
    median: float


class Expected(NamedTuple):
    """Texts that are expected to fit `low` to `high` drawings: how many they are, and the means of both numbers."""

    low: float
    high: float
    texts: int
    expected: float
    true: float


def traces_of_levels(trace: np.ndarray, table: CaptionTable) -> dict[str, np.ndarray]:
    """The traces of every level's captions, general to specific; a text of two levels counts in both. trace: (T,)."""
    return {level: trace[table.text[table.rows(level)]] for level in LEVELS}


def hierarchy_pairs(corpus: Corpus, table: CaptionTable, inner: str, outer: str) -> np.ndarray:
    """Distinct (inner, outer) pairs that stand in one concept's hierarchy: (P, 2) int.

    Captions are rows of `table.texts`, images rows of `corpus.drawings`. A text is no pair with itself (the keyword
    "heart" and the subgroup "heart").
    """
    text_of = {text: i for i, text in enumerate(table.texts)}
    captions = [[[text_of[t] for t in concept.captions(level)] for level in LEVELS] for concept in corpus.concepts]
    outer_level = LEVELS.index(outer)
    if inner == "image":
        pairs = [(i, t) for i, k in enumerate(corpus.drawing_concepts) for t in captions[k][outer_level]]
    else:
        inner_level = LEVELS.index(inner)
        pairs = [(s, t) for texts in captions for s in texts[inner_level] for t in texts[outer_level] if s != t]
    return np.array(list(dict.fromkeys(pairs)), dtype=np.int64).reshape(-1, 2)


def hierarchy_inclusion(image: Gaussian, text: Gaussian, corpus: Corpus, table: CaptionTable) -> list[Inclusion]:
    """The inclusion test of every pair of levels, ProLIP figure 8 for texts. image (N, D), text (T, D).

    H in its exact form at eps = 0, ProLIP (4).
    """
    out = []
    for inner, outer in INCLUSIONS:
        pairs = hierarchy_pairs(corpus, table, inner, outer)
        if len(pairs):
            z = image if inner == "image" else text
            blocks = np.split(pairs, range(PAIRS, len(pairs), PAIRS))
            h = np.concatenate([inclusion_test(z.select(x[:, 0]), text.select(x[:, 1])).numpy() for x in blocks])
            out.append(Inclusion(inner, outer, len(pairs), float((h > 0).mean()), float(np.median(h))))
    return out


def trace_metrics(
    image: Gaussian,
    text: Gaussian,
    corpus: Corpus,
    table: CaptionTable,
    token_lengths: np.ndarray,
    uncertainty: Callable[[Gaussian], np.ndarray] = lambda z: z.trace.numpy(),
) -> dict[str, float]:
    """Every scalar of the uncertainty study; token_lengths (T,). Keys `trace/...`, `spearman/...`, `inclusion/...`.

    uncertainty: what the model's method reads off its Gaussians, called trace here;
    `trace/..._spread`: width of the middle 90% over the median;
    `spearman/trace_true_matches`: trace of a text against the logarithm of the number of concepts it is true of;
    `..._given_tokens`: the same at equal numbers of tokens, as general captions here are longer than names;
    `spearman/trace_generality`: against its level (name 0 ... group 3); positive is the order the paper finds.
    """
    image_trace, text_trace = uncertainty(image), uncertainty(text)
    out = {"trace/image": float(image_trace.mean()), "trace/text": float(text_trace.mean())}
    out |= {"trace/image_spread": spread(image_trace), "trace/text_spread": spread(text_trace)}
    out |= {f"trace/{level}": float(x.mean()) for level, x in traces_of_levels(text_trace, table).items()}
    out["trace/text_over_image"] = out["trace/text"] / out["trace/image"] if out["trace/image"] else float("nan")
    matches = np.log(table.true_matches)
    keywords = table.text[table.rows("keyword")]
    out["spearman/trace_true_matches"] = spearman(text_trace, matches)
    out["spearman/trace_true_matches_given_tokens"] = partial_spearman(text_trace, matches, token_lengths)
    out["spearman/trace_true_matches_of_keywords"] = spearman(text_trace[keywords], matches[keywords])
    generality = len(LEVELS) - 1 - table.level  # of every caption: 0 for a name up to 3 for a group
    out["spearman/trace_generality"] = spearman(text_trace[table.text], generality)
    out["spearman/trace_tokens"] = spearman(text_trace, token_lengths)
    out["spearman/trace_characters"] = spearman(text_trace, [len(t) for t in table.texts])
    true_captions = table.text_relation.sum(0)[corpus.drawing_concepts]
    out["spearman/trace_true_captions_of_images"] = spearman(image_trace, true_captions)
    for row in hierarchy_inclusion(image, text, corpus, table):
        out[f"inclusion/{row.inner}_in_{row.outer}"] = row.rate
        out[f"inclusion/{row.inner}_in_{row.outer}/median"] = row.median
    return out


def by_expected(expected: np.ndarray, true: np.ndarray) -> list[Expected]:
    """Texts in groups of doubling expected numbers of drawings, below 1 in one group, few first. expected, true: (T,).

    Texts that fit no drawing count, too: what a group is expected to fit is to be what it does fit on average.
    """
    doubling = np.floor(np.log2(np.maximum(expected, 0.5)))
    groups = ((2.0**k if k >= 0 else 0.0, 2.0 ** (k + 1), doubling == k) for k in np.unique(doubling).tolist())
    return [
        Expected(low, high, int(rows.sum()), float(expected[rows].mean()), float(true[rows].mean()))
        for low, high, rows in groups
    ]


def matches_metrics(expected: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """How near the expected number of drawings that a text fits comes to the true one, over texts that fit any: (T,).

    Keys `matches/within_factor_2`, a share of the texts; `matches/chance_within_factor_2`, of the one number for all
    that suits most texts, known in hindsight; `matches/median_factor`, of the larger over the smaller;
    `matches/expected_over_true`, the geometric mean: above 1, texts are taken for more general than they are.
    """
    kept = true > 0
    log_ratio = np.log(expected[kept] / true[kept])
    # n suits the numbers from n / 2 to 2 n, so that the least of those that it suits may be taken for n / 2
    chance = max(((true[kept] >= least) & (true[kept] <= 4 * least)).mean() for least in np.unique(true[kept]))
    return {
        "matches/within_factor_2": float((np.abs(log_ratio) <= np.log(2)).mean()),
        "matches/chance_within_factor_2": float(chance),
        "matches/median_factor": float(np.exp(np.median(np.abs(log_ratio)))),
        "matches/expected_over_true": float(np.exp(log_ratio.mean())),
    }
