"""Which texts of the corpus are kinds of which, from its complete truth, with pairs that only look like it.

Text A is a kind of text B where both hold: the concepts that A is true of are a proper subset of those of B, at any
level; and A stands lower in the tree group > subgroup > keyword > name (a text of several levels counts at its most
general). Containment alone would make "kitty" a kind of every keyword of the one concept that carries it; the tree
alone would put a subgroup below a group that it is no part of. What is contained without being lower, or has the very
same concepts, is neither true nor a negative.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix

from prolip.data.emoji import LEVELS, CaptionTable, Corpus

#: Most draws in search of a negative for each pair.
TRIES = 50


@dataclass(frozen=True)
class KindPairs:
    """P pairs (inner, outer) of which the first is a kind of the second, each with negatives.

    inner, outer: (P,) rows; random, sibling: (P,) rows in the outer's place, -1 where there is none; levels: (P, 2) of
    inner and outer as indices into (*LEVELS, "image"); shares: (P, K), how the pair is spread over the concepts of its
    inner, rows of sum 1: intervals draw concepts. found: true pairs before any sampling.
    """

    inner: np.ndarray
    outer: np.ndarray
    random: np.ndarray
    sibling: np.ndarray
    levels: np.ndarray
    shares: csr_matrix
    found: int
    negatives: tuple[str, ...] = ("random", "reversed", "sibling")

    def __len__(self) -> int:
        return len(self.inner)


def text_pairs(table: CaptionTable, most: int = 5000, seed: int = 0) -> KindPairs:
    """Texts that are kinds of texts, at most `most` of them, drawn by `seed`.

    random: (A, B') where B' is the outer of another pair, drawn as often as it is one, and does not contain A: neither
    how general A nor how general B' is tells it from a true pair. sibling: (A, C), C another kind of the same B at A's
    level, neither containing the other. ValueError where no pair is true.
    """
    relation = csr_matrix(table.text_relation.astype(np.float32))
    count, level = table.true_matches, table.text_level
    shared = (relation @ relation.T).tocoo()
    inside = shared.data == count[shared.row]
    contained = _Codes(shared.row[inside], shared.col[inside], len(count))
    true = inside & (count[shared.row] < count[shared.col]) & (level[shared.row] > level[shared.col])
    a, b = shared.row[true].astype(np.int64), shared.col[true].astype(np.int64)
    rng = np.random.default_rng(seed)
    kept = _some(len(a), most, rng)
    family = b * (len(LEVELS) + 1) + level[a]
    siblings = _draw_from(a, family, family[kept], rng, lambda row, c: contained.has(a[kept][row], c)
                          | contained.has(c, a[kept][row]))  # fmt: skip
    random = _draw_from(b, np.zeros_like(b), np.zeros(len(kept), np.int64), rng,
                        lambda row, c: contained.has(a[kept][row], c))  # fmt: skip
    shares = csr_matrix(relation[a[kept]].multiply(1 / count[a[kept], None]))
    return KindPairs(a[kept], b[kept], random, siblings, np.stack([level[a[kept]], level[b[kept]]], 1), shares, len(a))


def image_pairs(corpus: Corpus, table: CaptionTable, most: int = 5000, seed: int = 0) -> KindPairs:
    """Drawings with the texts that are true of them: (image, text).

    random: a text of another pair that is not true of the drawing; sibling: one at the level of the true text that is
    true of another concept of the same subgroup, and not of this drawing. Not reversed: which of the two is the image
    is known. ValueError without a drawing.
    """
    if not corpus.drawings:
        raise ValueError("the corpus has no drawing: give shards that hold some")
    concept, level = corpus.drawing_concepts, table.text_level
    texts, concepts = np.nonzero(table.text_relation)
    order = np.argsort(concepts, kind="stable")
    texts, starts = texts[order], np.searchsorted(concepts[order], np.arange(len(corpus.concepts) + 1))
    a = np.repeat(np.arange(len(concept)), np.diff(starts)[concept])
    b = np.concatenate([texts[starts[k] : starts[k + 1]] for k in concept])
    rng = np.random.default_rng(seed)
    kept = _some(len(a), most, rng)
    subgroup = np.unique([c.subgroup for c in corpus.concepts], return_inverse=True)[1]
    family = subgroup[concept[a]] * (len(LEVELS) + 1) + level[b]

    def is_true(row: np.ndarray, text: np.ndarray) -> np.ndarray:
        return table.text_relation[text, concept[a[kept][row]]]

    sibling = _draw_from(b, family, family[kept], rng, is_true)
    random = _draw_from(b, np.zeros_like(b), np.zeros(len(kept), np.int64), rng, is_true)
    rows = np.arange(len(kept))
    one = (np.ones(len(kept), np.float32), (rows, concept[a[kept]]))
    shares = csr_matrix(one, shape=(len(kept), len(corpus.concepts)))
    levels = np.stack([np.full(len(kept), len(LEVELS)), level[b[kept]]], 1)
    return KindPairs(a[kept], b[kept], random, sibling, levels, shares, len(a), ("random", "sibling"))


class _Codes:
    """A set of pairs of rows."""

    def __init__(self, first: np.ndarray, second: np.ndarray, size: int):
        self.size = size
        self.codes = np.unique(first.astype(np.int64) * size + second)

    def has(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        wanted = first.astype(np.int64) * self.size + second
        place = np.searchsorted(self.codes, wanted).clip(max=len(self.codes) - 1)
        return self.codes[place] == wanted


def _some(found: int, most: int, rng: np.random.Generator) -> np.ndarray:
    if not found:
        raise ValueError("no text of this corpus is a kind of another: give concepts that share keywords or subgroups")
    if most < 1:
        raise ValueError(f"{most} pairs: give 1 or more")
    return np.sort(rng.choice(found, most, replace=False)) if found > most else np.arange(found)


def _draw_from(values: np.ndarray, family: np.ndarray, wanted: np.ndarray, rng: np.random.Generator, refused):
    """For each of `wanted`, one of the values of this family that is not refused(row, value), -1 if none was found."""
    order = np.argsort(family, kind="stable")
    start, end = (np.searchsorted(family[order], wanted, side=side) for side in ("left", "right"))
    found = np.full(len(wanted), -1, dtype=np.int64)
    for _ in range(TRIES):
        rows = np.flatnonzero(found < 0)
        if not len(rows):
            break
        drawn = values[order[rng.integers(start[rows], end[rows])]]
        good = ~refused(rows, drawn)
        found[rows[good]] = drawn[good]
    return found
