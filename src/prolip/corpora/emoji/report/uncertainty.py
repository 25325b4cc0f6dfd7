"""Uncertainty of a model with units: the first section of its page, from the evaluation's embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from prolip.corpora.emoji.corpus import LEVELS
from prolip.corpora.emoji.report.examples import Inputs, QueryExample, SetExamples, amount, both_ends, example, show
from prolip.corpora.emoji.result import CorpusResult
from prolip.corpora.emoji.uncertainty import matches_metrics, signs_against
from prolip.evaluation.metrics.selective import by_decile, spread
from prolip.evaluation.metrics.streaming import Relevance
from prolip.uncertainty.units import Units, in_words
from prolip.utils.style import picture

#: Quantiles of the first example texts among all that match a drawing, ordered by expected matches. Most match one, so
#: equal steps would show five similar texts.
QUANTILES = (0.5, 0.8, 0.9, 0.97, 0.995)
WEAK = 0.1  # |Spearman| below which no order is claimed
FLAT = 1.02  # ratio of traces below which they count as equal


def section(result: CorpusResult, seed: int = 0) -> dict[str, Any] | None:
    """Return the section's contents; None if the traces have no unit. For each level's texts that match any drawing:
    errors in doublings (log2), mean with and without sign, and those of the best constant number.
    """
    units, expected = result.model_score.units, result.expected_matches
    if units is None or expected is None:
        return None
    against, true, errors = signs_against(result, "names", "i2t"), result.text_relation.sum(1), []
    constant = 2 ** float(np.log2(true[true > 0]).mean())
    for i, level in enumerate(LEVELS):
        if len(own := np.flatnonzero((result.table.text_level == i) & (true > 0))):
            off = (np.log2(numbers / true[own]) for numbers in (expected[own], constant))
            model, flat = ((float(x.mean()), float(np.abs(x).mean())) for x in off)
            errors.append((level, len(own), float(true[own].mean()), model, flat))
    sure = np.exp(-against["answer"]).clip(max=1.0)
    return {
        "units": units,
        "texts": texts(result, units, expected),
        "thirds": thirds(result, units, against.get("all", against["answer"]), sure, seed),
        "errors": errors,
        "constant": constant,
    }


def drawn(result: CorpusResult) -> Inputs:
    """Return the drawings of the corpus, as the model saw them, by name."""
    shown = result.corpus.drawings
    names = [result.corpus.concepts[one.concept].name for one in shown]
    return Inputs(result.image, names, lambda row: picture(shown[row].image(), lossless=True))


def show_corpus(result: CorpusResult) -> SetExamples:
    """Return examples of the drawings and all texts, as for any other test set."""
    own, texts = result.model_score if result.probabilistic else None, Inputs(result.text, result.table.texts)
    relevance = Relevance.from_dense(torch.from_numpy(result.text_relation.T))
    shown, nats = show(drawn(result), texts, relevance, result.score, own), result.read.get("ambiguity")
    if nats is not None and not np.isnan(nats).any():
        ends = both_ends(drawn(result), torch.from_numpy(nats), [f"{x:.1f} nats" for x in nats])
        shown.ends.append(("image", "their ambiguity", *ends))
    return shown


def texts(
    result: CorpusResult, units: Units, expected: np.ndarray, top: int = 8
) -> list[tuple[QueryExample, str, float, float]]:
    """Return the texts at QUANTILES of the expected matches, of those that match any drawing, specific first: with the
    first drawings, the matching share in words, the expected matches and the information of the text.
    """
    relation, own, table = torch.from_numpy(result.text_relation), drawn(result), result.table
    shown = np.flatnonzero(relation.any(1))
    order = shown[expected[shown].argsort(kind="stable")]
    bits, share = units.information(result.text.trace, bits=True).tolist(), units.share(result.text.trace).tolist()
    found = []
    for i in (int(order[round(quantile * (len(order) - 1))]) for quantile in QUANTILES):
        (scores,) = result.score.pairwise(result.image, result.text.select([i])).mT
        said = example(scores, relation[i], own, table.texts[i], "", LEVELS[table.text_level[i]], top)
        found.append((said, in_words(share[i]), float(expected[i]), bits[i]))
    return found


def thirds(
    result: CorpusResult, units: Units, unsure: np.ndarray, sure: np.ndarray, seed: int = 0, each: int = 6
) -> list[tuple[int, float, list[tuple[QueryExample, float, float]]]]:
    """Split the drawings into three equal groups (fewer drawings: one each) by `unsure` (N,): their number,
    the share named right, and random ones, each with its first name, its certainty `sure` (N,), and expected texts.
    """
    own, (names, named) = drawn(result), result.galleries["names"]
    gallery = Inputs(names, [concept.name for concept in result.corpus.concepts])
    rng, found = np.random.default_rng(seed + 3), []
    right = by_decile(unsure, result.rankings["names"][0].hit(1).numpy(), 3).value
    for part, share in zip(np.array_split(unsure.argsort(kind="stable"), len(right)), right):
        rows = sorted(rng.choice(part, size=min(each, len(part)), replace=False).tolist())
        z = result.image.select(rows)
        fits = units.matches(z.trace, len(result.table.texts), of="texts").tolist()
        drawings = [
            (example(x, torch.from_numpy(named[:, i]), gallery, own.labels[i], own.picture(i), top=1), sure[i], number)
            for x, i, number in zip(result.score.pairwise(z, names), rows, fits)
        ]
        found.append((len(part), float(share), drawings))
    return found


def read_all(result: CorpusResult) -> dict[str, str]:
    """Return the sentences about the figures by name, as `readings.txt.j2` writes them from the numbers."""
    m, table, units, expected = result.metrics, result.table, result.model_score.units, result.expected_matches
    trace, lengths, true = result.uncertainty(result.text), result.token_lengths, result.text_relation.sum(1)
    usual = int(np.bincount(lengths).argmax())
    alike, means = trace[lengths == usual], [m[f"trace/{level}"] for level in LEVELS]
    orders = {"paper": sorted(means, reverse=True), "reversed": sorted(means)}
    order = next((name for name, wanted in orders.items() if wanted == means), "mixed")
    numbers: dict[str, Any] = {"m": m, "means": sorted(zip(LEVELS, means), key=lambda pair: -pair[1])}
    numbers |= {"order": "flat" if max(means) <= FLAT * min(means) else order, "similarity": result.similarity}
    numbers |= {"flat": FLAT, "weak": WEAK, "alike": len(alike), "usual": usual, "typical": ()}
    numbers |= {"spread": spread(alike), "overall": spread(trace)}
    if units is not None and expected is not None:
        shares = (float(units.share(result.text.trace[table.text[table.rows(level)]].median())) for level in LEVELS)
        numbers |= {"typical": list(zip(LEVELS, map(in_words, shares))), "found": matches_metrics(expected, true)}
        numbers["single"] = (true[true > 0] == 1).mean()
    loader = PackageLoader("prolip.corpora.emoji.report", ".")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["amount"] = amount
    said = environment.get_template("readings.txt.j2").make_module(numbers)
    names = ("modality", "levels", "length", "matches", "expected", "verdict")
    return {name: " ".join(getattr(said, name)().split()) for name in names}
