"""Pairs of the corpus in which one is a kind of the other, with similar-looking negatives.

Text A is a kind of B if A's concepts are a proper subset of B's, and A is lower in the tree
group > subgroup > keyword > name (a text of several levels counts at its most general).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy import ndarray as Array
from numpy.random import Generator
from scipy.sparse import csr_matrix

from prolip.corpora.emoji.corpus import LEVELS, CaptionTable, Corpus
from prolip.corpora.emoji.evaluate import embed_drawings
from prolip.embedder import Embedder
from prolip.hierarchy.entailment import Entailment, KindPairs, entailment_of
from prolip.hierarchy.scores import items_of, scores_of

#: Levels of texts and of drawings.
NAMES = (*LEVELS, "image")
#: Most draws for each pair when searching a negative.
TRIES = 50


def evaluate_entailment(
    embedder: Embedder, corpus: Corpus, pairs: Mapping[str, KindPairs] | None = None, draws: int = 500
) -> Entailment:
    """Compute all scores of a model on the corpus: texts that are kinds of texts, and drawings of texts.

    The images that texts describe are the corpus's drawings, without their labels. pairs: default all `relations`.
    """
    table = corpus.caption_table()
    image, empty = embed_drawings(corpus, embedder)[0], embedder.embed_texts([""])
    text, drawn = items_of(embedder, embedder.embed_texts(table.texts), empty, image), items_of(embedder, image, empty)
    return entailment_of(embedder.name, scores_of(embedder), text, drawn, pairs or relations(corpus, table), draws)


def relations(corpus: Corpus, table: CaptionTable, most: int = 5000, seed: int = 0) -> dict[str, KindPairs]:
    """Return both relations of a corpus, the same for all models."""
    return {"texts": text_pairs(table, most, seed), "images": image_pairs(corpus, table, most, seed)}


def text_pairs(table: CaptionTable, most: int = 5000, seed: int = 0) -> KindPairs:
    """Return texts that are kinds of texts, at most `most` of them, drawn by `seed`.

    random: (A, B'), where B' is the outer text of another pair, drawn as often as it is one, and does not contain A, so
    that neither is more general than in a true pair. sibling: (A, C), where C is another kind of the same B at A's
    level and neither contains the other. ValueError without a true pair.
    """
    relation = csr_matrix(table.text_relation.astype(np.float32))
    count, level = table.true_matches, table.text_level
    both = (relation @ relation.T).tocoo()
    inside = both.data == count[both.row]
    codes = both.row[inside].astype(np.int64) * len(count) + both.col[inside]

    def contained(first: Array, second: Array) -> Array:
        return np.isin(first * len(count) + second, codes)

    true = inside & (count[both.row] < count[both.col]) & (level[both.row] > level[both.col])
    a, b = both.row[true].astype(np.int64), both.col[true].astype(np.int64)
    rng = np.random.default_rng(seed)
    kept = _some(len(a), most, rng)
    inner, family = a[kept], b * (len(LEVELS) + 1) + level[a]

    def related(row: Array, c: Array) -> Array:
        return contained(inner[row], c) | contained(c, inner[row])

    sibling = _draw_from(a, family, family[kept], rng, related)
    random = _draw_from(b, 0 * b, 0 * kept, rng, lambda row, c: contained(inner[row], c))
    shares = csr_matrix(relation[inner].multiply(1 / count[inner, None]))
    levels = np.stack([level[inner], level[b[kept]]], 1)
    return KindPairs(inner, b[kept], random, sibling, levels, NAMES, shares, len(a))


def image_pairs(corpus: Corpus, table: CaptionTable, most: int = 5000, seed: int = 0) -> KindPairs:
    """Return drawings with their matching texts: (image, text).

    random: a text of another pair that does not match the drawing; sibling: one at the level of the matching text that
    matches another concept of the same subgroup, but not this drawing. Not reversed, because which of the two is the
    image is known. ValueError without a drawing.
    """
    if not corpus.drawings:
        raise ValueError("the corpus has no drawings. Give shards that contain some")
    concept, level = corpus.drawing_concepts, table.text_level
    texts, concepts = np.nonzero(table.text_relation)
    order = np.argsort(concepts, kind="stable")
    texts, starts = texts[order], np.searchsorted(concepts[order], np.arange(len(corpus.concepts) + 1))
    a = np.repeat(np.arange(len(concept)), np.diff(starts)[concept])
    b = np.concatenate([texts[starts[k] : starts[k + 1]] for k in concept])
    rng = np.random.default_rng(seed)
    kept = _some(len(a), most, rng)
    subgroup = np.unique([c.subgroup for c in corpus.concepts], return_inverse=True)[1]
    family, own = subgroup[concept[a]] * (len(LEVELS) + 1) + level[b], concept[a[kept]]

    def is_true(row: Array, text: Array) -> Array:
        return table.text_relation[text, own[row]]

    sibling = _draw_from(b, family, family[kept], rng, is_true)
    random = _draw_from(b, 0 * b, 0 * kept, rng, is_true)
    one = (np.ones(len(kept), np.float32), (np.arange(len(kept)), own))
    shares = csr_matrix(one, shape=(len(kept), len(corpus.concepts)))
    levels = np.stack([np.full(len(kept), len(LEVELS)), level[b[kept]]], 1)
    return KindPairs(a[kept], b[kept], random, sibling, levels, NAMES, shares, len(a), ("random", "sibling"))


def _some(found: int, most: int, rng: Generator) -> Array:
    if not found:
        raise ValueError("no text of this corpus is a kind of another. Give concepts that share keywords or subgroups")
    if most < 1:
        raise ValueError(f"{most} pairs: give at least 1")
    return np.sort(rng.choice(found, most, replace=False)) if found > most else np.arange(found)


def _draw_from(
    values: Array, family: Array, needed: Array, rng: Generator, refused: Callable[[Array, Array], Array]
) -> Array:
    """Draw for each of `needed` a value of this family that is not refused(row, value); -1 if none was found."""
    order = np.argsort(family, kind="stable")
    start, end = (np.searchsorted(family[order], needed, side=side) for side in ("left", "right"))
    found = np.full(len(needed), -1, dtype=np.int64)
    for _ in range(TRIES):
        rows = np.flatnonzero(found < 0)
        drawn = values[order[rng.integers(start[rows], end[rows])]]
        good = ~refused(rows, drawn)
        found[rows[good]] = drawn[good]
    return found
