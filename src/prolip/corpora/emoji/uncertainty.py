"""Metrics of uncertainty on the corpus: refusal of wrong first answers, calibration, traces, inclusion, matches."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import torch

from prolip.corpora.emoji.corpus import LEVELS, CaptionTable, Corpus
from prolip.evaluation.metrics.bootstrap import Statistic, auroc_of, risk_area_of
from prolip.evaluation.metrics.calibration import Matching, Reliability, reliability
from prolip.evaluation.metrics.ranking import Ranking
from prolip.evaluation.metrics.selective import partial_spearman, selective_metrics, spearman, spread
from prolip.evaluation.metrics.streaming import PairScores, Relevance
from prolip.evaluation.metrics.study import study_retrieval
from prolip.measures import inclusion_test
from prolip.uncertainty.novelty import refusal

if TYPE_CHECKING:
    from prolip.corpora.emoji.result import CorpusResult

WAYS = ("i2t", "t2i")
#: Metrics with intervals.
WITH_INTERVALS = ("score", "all")
#: Pairs tested at a time.
PAIRS = 1 << 14


def cases(result: CorpusResult) -> Iterator[tuple[str, Ranking, dict[str, np.ndarray]]]:
    """Yield name, ranking and refusal signals: drawings and names, drawings and all texts, in both directions."""
    for name, rankings in result.rankings.items():
        for way, ranking in zip(WAYS, rankings):
            yield f"{name}_{way}", ranking, signs_against(result, name, way)


def metrics(result: CorpusResult) -> dict[str, float]:
    """Compute `refusal/{names,captions}_{i2t,t2i}/SIGN/{auroc,aurc}`: how well each sign predicts wrong first answers.

    Signs as in `study_retrieval` (`score`, `image`, `text`, `pair`); `mean` and `first`, the novelty of the drawing;
    `answer`, `Units.code_length` of the first answer; and `all` of `prolip.uncertainty.novelty.refusal`. `answer/ece`:
    the calibration error of its probability among the names, one of which is right.
    """
    out: dict[str, float] = {}
    for name, ranking, signs in cases(result):
        wrong = (~ranking.hit(1))[ranking.answerable]
        against = {key: x[ranking.answerable.numpy()] for key, x in signs.items()}
        found = selective_metrics(wrong, against, f"refusal/{name}")
        out |= {key: value for key, value in found.items() if key.endswith(("/auroc", "/aurc"))}
        if name.startswith("names") and "answer" in against:
            probability = np.exp(-against["answer"]).clip(max=1.0)  # rounding can make a code length negative
            out[f"refusal/{name}/answer/ece"] = reliability(probability, (~wrong).numpy()).ece
    return out


def calibration(result: CorpusResult) -> dict[str, float]:
    """Compute `calibration/{names,captions}/{match,match_i2t,match_t2i}/...` as in `study_retrieval`, adjusted for
    unfamiliar drawings; {} for a score without match probability.
    """
    return {
        name: value
        for gallery in result.galleries
        for key, kept in reliabilities(result, gallery).items()
        for name, value in kept.metrics(key.replace("calibration", f"calibration/{gallery}")).items()
    }


def reliabilities(result: CorpusResult, gallery: str) -> dict[str, Reliability]:
    """Return the bins of `calibration` of a gallery."""
    texts, relation = result.galleries[gallery]
    scores = PairScores.from_gaussians(result.image, texts, result.score)
    relevance = Relevance.from_dense(torch.from_numpy(relation).mT)
    units, doubt = result.model_score.units, result.doubt
    matches = Matching(result.score, doubt, None if units is None else units.share(texts.trace))
    return study_retrieval(scores, [relevance], matches)[2].reliability


def undoubted(result: CorpusResult) -> dict[str, float]:
    """Compute `undoubted/{names,captions}/match...`, `undoubted/names_i2t/answer/ece`: of unadjusted probabilities."""
    if result.doubt is None:
        return {}
    (bare := copy(result)).read = {}  # keeps the rankings that are already computed
    answer = {key: value for key, value in metrics(bare).items() if key.endswith("i2t/answer/ece")}
    return {f"undoubted/{key.partition('/')[2]}": x for key, x in (calibration(bare) | answer).items()}


def ambiguity(result: CorpusResult) -> dict[str, Statistic]:
    """Compute `ambiguity/{auroc,trace_auroc,neighbour_auroc}`: how well a drawing's ambiguity, its trace, and minus the
    cosine of the two predict that its nearest other drawing has another subgroup; {} without readings.
    """
    nats, concepts = result.read.get("ambiguity", np.array([np.nan])), result.corpus.concepts
    if np.isnan(nats).any() or len(nats) < 2:
        return {}
    subgroups = np.array([concepts[drawing.concept].subgroup for drawing in result.corpus.drawings])
    near, place = (result.image.mean @ result.image.mean.mT).fill_diagonal_(-torch.inf).max(1)
    signs = {"auroc": nats, "trace_auroc": result.uncertainty(result.image), "neighbour_auroc": -near.numpy()}
    return {f"ambiguity/{key}": auroc_of(sign, subgroups != subgroups[place], "images") for key, sign in signs.items()}


def statistics(result: CorpusResult) -> dict[str, Statistic]:
    """Return the metrics with intervals, as functions of how often each drawing or text was drawn."""
    out = ambiguity(result)
    for name, ranking, signs in cases(result):
        queries = "images" if name.endswith("_i2t") else name.removesuffix("_t2i")
        wrong = (~ranking.hit(1)).double().where(ranking.answerable, torch.nan)
        for key in (key for key in WITH_INTERVALS if key in signs):
            out[f"refusal/{name}/{key}/auroc"] = auroc_of(signs[key], wrong, queries)
            out[f"refusal/{name}/{key}/aurc"] = risk_area_of(signs[key], wrong, queries)
    return out


def signs_against(result: CorpusResult, gallery: str, way: str) -> dict[str, np.ndarray]:
    """Return the refusal signals of the first answer of every drawing among the texts of a gallery ("i2t"), or of every
    text among the drawings ("t2i"): (N,) by name.
    """
    units, texts = result.model_score.units, result.galleries[gallery][0]
    top = result.ranked[gallery][WAYS.index(way)][1]
    first = top.item.numpy()  # NumPy takes a one-element tensor for a number
    image, text = (slice(None), first) if way == "i2t" else (first, slice(None))
    out = {"score": -top.score.numpy()}
    if result.probabilistic:
        out |= {"image": result.uncertainty(result.image)[image], "text": result.uncertainty(texts)[text]}
        out["pair"] = out["image"] + out["text"]
    together = result.model_score.pair_uncertainty(result.image.select(image), texts.select(text))
    if together is not None:
        out["pair"] = together.numpy()
    out |= {name: nats[image] for name, nats in result.novelty.items()}
    if units is not None:
        cosine = result.image.mean @ texts.mean.mT
        nats = units.code_length(cosine, result.doubt) if way == "i2t" else units.code_length(cosine.mT)
        answer = nats.gather(1, top.item.unsqueeze(1)).squeeze(1)
        out["answer"] = answer.numpy()
        if result.novelty:
            out["all"] = refusal(answer, {name: torch.from_numpy(out[name]) for name in result.novelty}).numpy()
    return out


def traces_of_levels(trace: np.ndarray, table: CaptionTable) -> dict[str, np.ndarray]:
    """Return the traces of every level's captions, general to specific; a text of two levels is in both."""
    return {level: trace[table.text[table.rows(level)]] for level in LEVELS}


def hierarchy_pairs(corpus: Corpus, table: CaptionTable, inner: str, outer: str) -> np.ndarray:
    """Return distinct (inner, outer) pairs of one concept, no text with itself, (P, 2): rows of texts or drawings."""
    text_of = {text: i for i, text in enumerate(table.texts)}
    captions = [[[text_of[t] for t in concept.captions(level)] for level in LEVELS] for concept in corpus.concepts]
    outer_level = LEVELS.index(outer)
    if inner == "image":
        pairs = [(i, t) for i, k in enumerate(corpus.drawing_concepts) for t in captions[k][outer_level]]
    else:
        inner_level = LEVELS.index(inner)
        pairs = [(s, t) for texts in captions for s in texts[inner_level] for t in texts[outer_level] if s != t]
    return np.array(list(dict.fromkeys(pairs)), dtype=np.int64).reshape(-1, 2)


def trace_metrics(result: CorpusResult) -> dict[str, float]:
    """Compute `trace/...`, `spearman/...`, `inclusion/...` of the method's uncertainty, here called trace.

    `trace/..._spread`: width of the middle 90% over the median; `spearman/trace_true_matches`: of a text, with the log
    number of its concepts; `..._given_tokens`: at equal numbers of tokens, as general captions here are longer;
    `spearman/trace_generality`: with its level (name 0 ... group 3), positive in the order of the paper;
    `inclusion/...`: of H(inner in outer) at eps = 0 for all true pairs, ProLIP (4), the positive share and the median.
    """
    image, text, table, token_lengths = result.image, result.text, result.table, result.token_lengths
    image_trace, text_trace = result.uncertainty(image), result.uncertainty(text)
    out = {"trace/image": float(image_trace.mean()), "trace/text": float(text_trace.mean())}
    out |= {"trace/image_spread": spread(image_trace), "trace/text_spread": spread(text_trace)}
    out |= {f"trace/{level}": float(x.mean()) for level, x in traces_of_levels(text_trace, table).items()}
    out["trace/text_over_image"] = out["trace/text"] / out["trace/image"] if out["trace/image"] else float("nan")
    matches = np.log(table.true_matches)
    keywords = table.text[table.rows("keyword")]
    out["spearman/trace_true_matches"] = spearman(text_trace, matches)
    out["spearman/trace_true_matches_given_tokens"] = partial_spearman(text_trace, matches, token_lengths)
    out["spearman/trace_true_matches_of_keywords"] = spearman(text_trace[keywords], matches[keywords])
    generality = len(LEVELS) - 1 - table.level  # of every caption: from 0 for a name to 3 for a group
    out["spearman/trace_generality"] = spearman(text_trace[table.text], generality)
    out["spearman/trace_tokens"] = spearman(text_trace, token_lengths)
    out["spearman/trace_characters"] = spearman(text_trace, [len(t) for t in table.texts])
    true_captions = table.text_relation.sum(0)[result.corpus.drawing_concepts]
    out["spearman/trace_true_captions_of_images"] = spearman(image_trace, true_captions)
    for inner, outer in combinations(("image", *reversed(LEVELS)), 2):  # image, name, keyword, subgroup, group
        pairs = hierarchy_pairs(result.corpus, table, inner, outer)
        z, blocks = image if inner == "image" else text, np.split(pairs, range(PAIRS, len(pairs), PAIRS))
        h = np.concatenate([inclusion_test(z.select(x[:, 0]), text.select(x[:, 1])).numpy() for x in blocks])
        if len(h):
            out[f"inclusion/{inner}_in_{outer}"] = float((h > 0).mean())
            out[f"inclusion/{inner}_in_{outer}/median"] = float(np.median(h))
    return out


def matches_metrics(expected: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Compare the expected and true matches of texts that match any drawing: (T,).

    `matches/within_factor_2`: a share of the texts; `matches/chance_within_factor_2`: of the best constant prediction
    (oracle); `matches/median_factor`: of the larger over the smaller; `matches/expected_over_true`: geometric mean.
    """
    kept = true > 0
    log_ratio = np.log(expected[kept] / true[kept])
    # n is correct for numbers from n / 2 to 2 n: the smallest of them may be used as n / 2
    chance = max(((true[kept] >= least) & (true[kept] <= 4 * least)).mean() for least in np.unique(true[kept]))
    return {
        "matches/within_factor_2": float((np.abs(log_ratio) <= np.log(2)).mean()),
        "matches/chance_within_factor_2": float(chance),
        "matches/median_factor": float(np.exp(np.median(np.abs(log_ratio)))),
        "matches/expected_over_true": float(np.exp(log_ratio.mean())),
    }


def inside_interval(result: CorpusResult) -> dict[str, float]:
    """Compute `matches/inside_interval`, also by level: the share of matching texts whose true value is inside."""
    if "share_low" not in result.read:
        return {}
    share, levels = result.text_relation.mean(1), result.table.text_level
    inside = (result.read["share_low"] <= share) & (share <= result.read["share_high"])
    of = {"": share > 0} | {f"/{level}": (share > 0) & (levels == i) for i, level in enumerate(LEVELS)}
    return {f"matches/inside_interval{name}": float(inside[rows].mean()) for name, rows in of.items() if rows.any()}
