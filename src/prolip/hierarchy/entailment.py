"""How well scores tell what is a kind of what: AUC against each sort of negative, with intervals over concepts.

AUC: the chance that a true pair scores higher than a negative (Mann-Whitney), ties count half. A draw of the bootstrap
takes as many concepts as there are, with replacement; a pair counts as often as the concepts of its inner were drawn.

Text A is a kind of text B where both hold: the concepts that A is true of are a proper subset of those of B, at any
level; and A stands lower in the tree group > subgroup > keyword > name (a text of several levels counts at its most
general). Containment alone would make "kitty" a kind of every keyword of the one concept that carries it; the tree
alone would put a subgroup below a group that it is no part of. What is contained without being lower, or has the very
same concepts, is neither true nor a negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_matrix

from prolip.corpora.emoji.corpus import LEVELS, CaptionTable, Corpus
from prolip.corpora.emoji.evaluate import embed_drawings
from prolip.embedder import Embedder
from prolip.evaluation.metrics import bootstrap
from prolip.evaluation.metrics.bootstrap import Interval, Statistic
from prolip.hierarchy.scores import SCORES, Items, Scored, items_of, scores_of

#: Numbers that a block of draws may hold for all pairs.
ELEMENTS = 1 << 22
BLOCK = 4096
#: Most draws in search of a negative for each pair.
TRIES = 50


class Tested(NamedTuple):
    """Scores of the pairs of one relation by one score: positive (P,), and by negative (P,) with NaN where none is."""

    positive: np.ndarray
    negative: dict[str, np.ndarray]


class Entailment(NamedTuple):
    """One model: its AUCs with intervals by (relation, score, negative), and what they were estimated from.

    relation: texts or images; negative: one of the relation's or "mean", their mean.
    """

    model: str
    auc: dict[tuple[str, str, str], Interval]
    statistics: dict[tuple[str, str, str], Statistic]
    by_level: dict[tuple[str, str, str], float]


def evaluate_entailment(
    embedder: Embedder, corpus: Corpus, pairs: Mapping[str, KindPairs] | None = None, draws: int = 500
) -> Entailment:
    """All scores of a model on the corpus: texts that are kinds of texts, and drawings of texts.

    The images that texts speak of are the corpus's drawings, without their labels. pairs: as `relations` makes them of
    this corpus, which is what is taken without.
    """
    table = corpus.caption_table()
    image, empty = embed_drawings(corpus, embedder)[0], embedder.embed_texts([""])
    text = items_of(embedder, embedder.embed_texts(table.texts), empty, image)
    return entailment_of(
        embedder.name,
        scores_of(embedder),
        text,
        items_of(embedder, image, empty),
        pairs or relations(corpus, table),
        draws,
    )


def relations(corpus: Corpus, table: CaptionTable, most: int = 5000, seed: int = 0) -> dict[str, KindPairs]:
    """Both relations of a corpus, the same for all models."""
    return {"texts": text_pairs(table, most, seed), "images": image_pairs(corpus, table, most, seed)}


def entailment_of(  # noqa: PLR0913 (what is compared, and how)
    model: str,
    scores: Mapping[str, Scored],
    text: Items,
    image: Items,
    pairs: Mapping[str, KindPairs],
    draws: int = 500,
) -> Entailment:
    """AUCs of embeddings; text: rows of the table's texts, image: of the drawings; pairs: as `relations`."""
    statistics: dict[tuple[str, str, str], Statistic] = {}
    by_level: dict[tuple[str, str, str], float] = {}
    for relation, found in pairs.items():
        inner = image if relation == "images" else text
        for name, score in scores.items():
            test = score_pairs(score, inner, text, found)
            for kind, negative in test.negative.items():
                statistics[relation, name, kind] = auc_of(test.positive, negative, found.shares)
            every = [(1 / len(found.negatives), statistics[relation, name, kind]) for kind in found.negatives]
            statistics[relation, name, "mean"] = bootstrap.combine(every)
            by_level |= {(relation, name, levels): value for levels, value in level_means(test, found).items()}
    keys = {"/".join(key): statistic for key, statistic in statistics.items()}
    found_intervals = bootstrap.intervals(keys, draws)
    return Entailment(model, {key: found_intervals["/".join(key)] for key in statistics}, statistics, by_level)


def score_pairs(score: Scored, inner: Items, outer: Items, pairs: KindPairs) -> Tested:
    """A score of the true pairs and of their negatives."""

    def of(a: Items, rows: np.ndarray, b: Items, others: np.ndarray) -> np.ndarray:
        kept = np.flatnonzero((rows >= 0) & (others >= 0))
        out = np.full(len(rows), np.nan)
        for part in np.split(kept, range(BLOCK, len(kept), BLOCK)):
            if len(part):
                out[part] = score.pairs(a.select(rows[part]), b.select(others[part])).double().numpy()
        return out

    others = {
        "random": (inner, pairs.inner, outer, pairs.random),
        "reversed": (outer, pairs.outer, inner, pairs.inner),
        "sibling": (inner, pairs.inner, outer, pairs.sibling),
    }
    return Tested(of(inner, pairs.inner, outer, pairs.outer), {name: of(*others[name]) for name in pairs.negatives})


def auc_of(positive: np.ndarray, negative: np.ndarray, shares: csr_matrix) -> Statistic:
    """AUC of positive (P,) against negative (P,), as a function of how often each concept was drawn; shares: (P, K).

    A pair without a negative (NaN) counts on neither side. NaN for a draw without pairs.
    """
    kept = np.flatnonzero(~np.isnan(negative))
    spread, size = shares[kept].astype(np.float64), shares.shape[1]
    scores = np.concatenate([positive[kept], negative[kept]])
    true = np.repeat([1.0, 0.0], len(kept))
    one = bootstrap.auroc_of(scores, true, "pairs") if len(kept) else None

    def estimate(weights: bootstrap.Weights) -> np.ndarray:
        drawn, found = weights["concepts"], []
        if one is None:
            return np.full(len(drawn), np.nan)
        step = max(1, ELEMENTS // len(scores))
        for part in np.split(drawn, range(step, len(drawn), step)):
            of_pairs = (spread @ part.T).T
            found.append(one.estimate({"pairs": np.concatenate([of_pairs, of_pairs], 1)}))
        return np.concatenate(found)

    return Statistic({"concepts": size}, estimate)


def level_means(test: Tested, pairs: KindPairs) -> dict[str, float]:
    """The mean AUC over negatives of each two levels, `name in group`, without intervals."""
    names, out = (*LEVELS, "image"), {}
    for low, high in np.unique(pairs.levels, axis=0):
        rows = np.flatnonzero((pairs.levels == (low, high)).all(1))
        values = [auc_of(test.positive[rows], x[rows], pairs.shares[rows]).value for x in test.negative.values()]
        known = [value for value in values if not np.isnan(value)]
        out[f"{names[low]} in {names[high]}"] = float(np.mean(known)) if known else float("nan")
    return out


class Compared(NamedTuple):
    """A model's best score by the mean AUC of a relation, and how far it is above another on the same draws."""

    score: str
    other: str
    difference: Interval


def compare(
    first: Entailment, second: Entailment, relation: str, other: str | None = None, draws: int = 500
) -> Compared:
    """The best score of `first` minus the score `other` of `second`, or its best one where none is named."""
    best = best_score(first, relation)
    against = other or best_score(second, relation)
    ours, theirs = (x.statistics[relation, name, "mean"] for x, name in ((first, best), (second, against)))
    return Compared(best, against, bootstrap.paired({"mean": theirs}, {"mean": ours}, draws)["mean"])


def best_score(result: Entailment, relation: str) -> str:
    """The score with the highest mean AUC."""
    names = [name for kind, name, negative in result.auc if kind == relation and negative == "mean"]
    return max(names, key=lambda name: result.auc[relation, name, "mean"].value)


def format_entailment(results: Sequence[Entailment], pairs: Mapping[str, KindPairs], draws: int = 500) -> str:
    """One table of all models, a block for each relation; in the end, how far each model's best is above others."""
    lines: list[str] = []
    titles = {"texts": "Is text A a kind of text B?", "images": "Is text B true of image A?"}
    for relation, found in pairs.items():
        siblings = int((found.sibling >= 0).sum())
        columns = (*found.negatives, "mean")
        lines += [
            f"{titles[relation]} {len(found):,} of {found.found:,} true pairs, {siblings:,} with a sibling; AUC,"
            " 95% intervals over concepts",
            f"{'model':<28}{'score':<16}" + "".join(f"{kind:>22}" for kind in columns),
        ]
        for result in results:
            names = [name for kind, name, negative in result.auc if kind == relation and negative == "mean"]
            for name in names:
                cells = (result.auc[relation, name, kind] for kind in columns)
                row = "".join(f"{f'{x.value:.3f} [{x.low:.3f}, {x.high:.3f}]':>22}" for x in cells)
                lines.append(f"{short(result.model):<28}{name:<16}{row}")
        for result in results:
            rivals: list[tuple[Entailment, str | None]] = [(result, "root")]
            rivals += [(other, None) for other in results if other is not result]
            for other, score in rivals:
                c = compare(result, other, relation, score, draws)
                d = c.difference
                lines.append(
                    f"{short(result.model)} {c.score} - {short(other.model)} {c.other}:"
                    f" {d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"
                )
        lines.append("")
    lines += [f"{name:<16}{score.words}" for name, score in SCORES.items()]
    return "\n".join(lines).rstrip()


def short(model: str) -> str:
    """A name as it fits a column: of a run's folder, the run's."""
    parts = [part for part in model.removeprefix("local-dir:").split("/") if part not in ("", "model")]
    return (parts[-1] if parts else model)[-27:]


def as_json(results: Sequence[Entailment], pairs: Mapping[str, KindPairs]) -> dict[str, Any]:
    """All figures, JSON values."""
    return {
        "pairs": {
            name: {"used": len(x), "found": x.found, "with_sibling": int((x.sibling >= 0).sum())}
            for name, x in pairs.items()
        },
        "models": [
            {
                "model": result.model,
                "auc": {"/".join(key): list(value) for key, value in result.auc.items()},
                "by_level": {"/".join(key): value for key, value in result.by_level.items()},
            }
            for result in results
        ],
    }


# --- which texts are kinds of which, with pairs that only look like it -----------------------------------------------
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
    codes = shared.row[inside].astype(np.int64) * len(count) + shared.col[inside]

    def contained(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return np.isin(first * len(count) + second, codes)

    true = inside & (count[shared.row] < count[shared.col]) & (level[shared.row] > level[shared.col])
    a, b = shared.row[true].astype(np.int64), shared.col[true].astype(np.int64)
    rng = np.random.default_rng(seed)
    kept = _some(len(a), most, rng)
    family = b * (len(LEVELS) + 1) + level[a]
    siblings = _draw_from(
        a, family, family[kept], rng, lambda row, c: contained(a[kept][row], c) | contained(c, a[kept][row])
    )
    random = _draw_from(
        b, np.zeros_like(b), np.zeros(len(kept), np.int64), rng, lambda row, c: contained(a[kept][row], c)
    )
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
