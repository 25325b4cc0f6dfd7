"""What the figures of one run say, in a sentence each, written from the numbers and not from what was hoped for."""
from __future__ import annotations

import math

import numpy as np

from prolip.data.emoji import LEVELS
from prolip.evaluation.metrics.traces import spread
from prolip.evaluation.suites.emoji.levels import matches_metrics
from prolip.evaluation.suites.emoji.result import CorpusResult
from prolip.report.examples import amount
from prolip.uncertainty.units import in_words

WEAK = 0.1  # |Spearman| below which no order is claimed
FLAT = 1.02  # ratio of traces below which they count as equal
ALIKE = 0.1  # spread of equally long texts over that of all, below which a trace tells the length alone


def read_all(result: CorpusResult) -> dict[str, str]:
    """A sentence per figure."""
    return {
        "modality": modality(result),
        "levels": levels(result),
        "length": length(result),
        "matches": matches(result),
        "expected": expected(result),
        "verdict": verdict(result),
    }


def verdict(result: CorpusResult) -> str:
    """One sentence on whether the uncertainties can be read as the paper reads them."""
    if result.similarity == "mean":
        return "Drawings and texts were ranked by their means alone: the traces below played no part in it."
    met = [
        order_of_levels(result) == "paper",
        result.metrics["trace/text_over_image"] > FLAT,
        result.metrics["spearman/trace_true_matches"] > WEAK,
    ]
    words = ("none of three", "one of three", "two of three", "all three")[sum(met)]
    ends = {3: "Here they can be read as generality.", 0: "Here a trace must not be read as generality."}
    levels_do, texts_do, matches_do = ("yes" if one else "no" for one in met)
    return (
        f"The traces of this run meet {words} expectations of the paper: general captions more uncertain than specific "
        f"ones ({levels_do}), texts more uncertain than images ({texts_do}), and captions with more true matches more "
        f"uncertain ({matches_do}). {ends.get(sum(met), 'Read them with care.')}"
    )


def order_of_levels(result: CorpusResult) -> str:
    """"paper" if the mean trace falls from group to name, "reversed" if it rises, "flat" or "mixed" otherwise."""
    means = [result.metrics[f"trace/{level}"] for level in LEVELS]
    if max(means) <= FLAT * min(means):
        return "flat"
    if all(a >= b for a, b in zip(means, means[1:])):
        return "paper"
    return "reversed" if all(a <= b for a, b in zip(means, means[1:])) else "mixed"


def modality(result: CorpusResult) -> str:
    """Texts against images."""
    ratio = result.metrics["trace/text_over_image"]
    if not math.isfinite(ratio) or 1 / FLAT <= ratio <= FLAT:
        return "Here both are about equally uncertain."
    if ratio > 1:
        return f"Here texts are more uncertain than drawings, {ratio:.2g} times on average, as in the paper."
    return f"Here it is the other way round: drawings are {1 / ratio:.2g} times as uncertain as texts on average."


def expected(result: CorpusResult) -> str:
    """Expected against true numbers of drawings; nothing where traces have no unit."""
    units, numbers = result.model_score.units, result.expected_matches
    if units is None or numbers is None:
        return ""
    true = result.text_relation.sum(1)
    found = matches_metrics(numbers, true)
    within, chance, bias = (
        found[f"matches/{key}"] for key in ("within_factor_2", "chance_within_factor_2", "expected_over_true")
    )
    single = (true[true > 0] == 1).mean()
    at = {level: result.text.trace[result.table.text[result.table.rows(level)]] for level in LEVELS}
    said = ", ".join(f"a {level} {in_words(float(units.share(trace).median()))}" for level, trace in at.items())
    return (
        f"Here {within:.0%} of the texts lie in the band. As {single:.0%} of them fit a single drawing, one number for "
        f"all could reach {chance:.0%}: the diamonds say more. The expected number is {amount(bias)} times the true "
        f"one on average (geometric mean). What a typical text of each level fits of the drawings: {said}."
    )


def levels(result: CorpusResult) -> str:
    """The order of the four levels."""
    means = {level: result.metrics[f"trace/{level}"] for level in LEVELS}
    ranked = " > ".join(f"{level} {means[level]:.4g}" for level in sorted(means, key=lambda level: -means[level]))
    said = {
        "paper": "This is the order that the paper predicts.",
        "reversed": "This is the reverse of the paper's order: specific captions came out as the uncertain ones.",
        "flat": "The four levels hardly differ, so no order should be read into them.",
        "mixed": "This is neither the paper's order nor its reverse.",
    }
    return f"Here {ranked}. {said[order_of_levels(result)]}"


def length(result: CorpusResult) -> str:
    """Short against long texts, and whether the length is all that a trace tells, which need not be a rising order."""
    rho = result.metrics["spearman/trace_tokens"]
    direction = _direction(rho, "longer", "shorter")
    said = f"Here the rank correlation with the number of tokens is {_signed(rho)}: {direction}."
    trace, lengths = result.uncertainty(result.text), result.token_lengths
    usual = int(np.bincount(lengths).argmax())
    alike, overall = trace[lengths == usual], spread(trace)
    if len(alike) < 20 or not spread(alike) < ALIKE * overall:
        return said
    return (
        f"{said} The middle 90% of the {len(alike):,} texts of {usual} tokens lie within "
        f"{_share(spread(alike))} of their median, of all texts within {_share(overall)}: each length has "
        "a trace of its own, and what a text says hardly changes it."
    )


def matches(result: CorpusResult) -> str:
    """Trace against the number of true matches."""
    rho, within = (result.metrics[f"spearman/trace_true_matches{part}"] for part in ("", "_of_keywords"))
    return (
        f"Here Spearman's correlation is {_signed(rho)} over all texts and {_signed(within)} among the keywords alone: "
        f"{_direction(rho, 'widely applicable', 'rarely applicable')}."
    )


def _direction(rho: float, positive: str, negative: str) -> str:
    if not math.isfinite(rho) or abs(rho) < WEAK:
        return "no clear relation"
    return f"{positive if rho > 0 else negative} texts are the more uncertain ones"


def _signed(value: float) -> str:
    return f"{value:+.2f}" if math.isfinite(value) else "undefined (constant)"


def _share(value: float) -> str:
    """A share of one as percent with two significant digits, however small."""
    return f"{float(f'{100 * value:.1e}'):g}%" if value >= 1e-6 else "less than 0.0001%"
