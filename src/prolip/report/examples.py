"""Examples for the report, chosen by a seeded generator and never by how they look."""
from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from prolip.data.emoji import LEVELS
from prolip.evaluation.suites.emoji.result import CorpusResult


class Answer(NamedTuple):
    """One retrieved item. mark: "right", "near" (another concept of the same subgroup) or "wrong"."""

    label: str
    score: float
    mark: str
    picture: str = ""


class Example(NamedTuple):
    """A query and its first answers; rank: where the first right answer stands."""

    label: str
    level: str
    answers: list[Answer]
    rank: int
    picture: str = ""
    matches: int = 1


class Extreme(NamedTuple):
    """An input with its trace; said: the trace in print, or what it counts where it has a unit."""

    label: str
    trace: float
    said: str
    picture: str = ""
    level: str = ""


class Extremes(NamedTuple):
    """The ends of a list sorted by trace, both from the outside in; a short list stands whole in `least`."""

    title: str
    least: Sequence[Extreme]
    most: Sequence[Extreme] = ()


def data_uri(data: bytes, kind: str) -> str:
    """An encoded picture, png or webp, as it stands in a self-contained page."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def picture(result: CorpusResult, drawing: int) -> str:
    """One drawing for the page, as the model saw it: a browser shows transparency as the page, and opens no TIFF."""
    encoded = io.BytesIO()
    result.corpus.drawings[drawing].image().save(encoded, "WEBP", lossless=True)
    return data_uri(encoded.getvalue(), "webp")


def pick(rows: np.ndarray, count: int, rng: np.random.Generator) -> list[int]:
    """At most `count` of the rows, at random, in their order."""
    return sorted(rng.choice(rows, size=min(count, len(rows)), replace=False).tolist()) if len(rows) else []


def image_examples(
    result: CorpusResult, count: int = 8, failures: int = 4, top: int = 5, seed: int = 0
) -> list[list[Example]]:
    """Drawings with their best names: [random ones, random ones among those whose first answer is wrong]."""
    rng = np.random.default_rng(seed)
    ranking = result.rankings["names"][0]
    wrong = np.flatnonzero(ranking.answerable.numpy() & ~ranking.hit(1).numpy())
    groups = [pick(np.arange(len(result.corpus.drawings)), count, rng)]
    groups.append(pick(np.setdiff1d(wrong, groups[0]), failures, rng))
    return [[image_example(result, i, top) for i in group] for group in groups]


def image_example(result: CorpusResult, drawing: int, top: int) -> Example:
    """One drawing against all names."""
    concepts = result.corpus.concepts
    truth = concepts[result.corpus.drawings[drawing].concept]
    names = result.text.select(result.name_texts)
    scores = result.score.pairwise(result.image.select([drawing]), names)[0]
    answers = []
    for i in best_rows(scores, top):
        near = "near" if concepts[i].subgroup == truth.subgroup else "wrong"
        mark = "right" if concepts[i] == truth else near
        answers.append(Answer(concepts[i].name, float(scores[i]), mark))
    rank = int(result.rankings["names"][0].first[drawing])
    return Example(truth.name, "drawing", answers, rank, picture(result, drawing))


def text_examples(
    result: CorpusResult, each: int = 2, failures: int = 4, top: int = 8, seed: int = 0
) -> list[list[Example]]:
    """Texts with their best drawings: [random ones of every level, random ones whose first answer is wrong]."""
    rng = np.random.default_rng(seed + 1)
    ranking, table = result.rankings["captions"][1], result.table
    possible, missed = ranking.answerable.numpy(), ~ranking.hit(1).numpy()
    chosen = []
    for level in LEVELS:
        texts = np.unique(table.text[table.rows(level)])
        chosen += [(i, level) for i in pick(texts[possible[texts]], each, rng)]
    wrong = np.setdiff1d(np.flatnonzero(possible & missed), [i for i, _ in chosen])
    failed = [(i, LEVELS[table.text_level[i]]) for i in pick(wrong, failures, rng)]
    return [[text_example(result, i, level, top) for i, level in group] for group in (chosen, failed)]


def text_example(result: CorpusResult, text: int, level: str, top: int) -> Example:
    """One text against all drawings, complete labels."""
    scores = result.score.pairwise(result.image, result.text.select([text]))[:, 0]
    answers = []
    for i in best_rows(scores, top):
        name = result.corpus.concepts[result.corpus.drawings[i].concept].name
        mark = "right" if result.text_relation[text, i] else "wrong"
        answers.append(Answer(name, float(scores[i]), mark, picture(result, i)))
    ranking = result.rankings["captions"][1]
    matches = int(ranking.matches[text])
    return Example(result.table.texts[text], level, answers, int(ranking.first[text]), matches=matches)


def extremes(result: CorpusResult, pictures: int = 12, texts: int = 8) -> list[Extremes]:
    """Least and most uncertain drawings, then captions of every level."""
    trace, concepts = result.uncertainty(result.image), result.corpus.concepts
    order = trace.argsort(kind="stable").tolist()

    said, texts_said = in_print(result)

    def drawing(i: int) -> Extreme:
        name = concepts[result.corpus.drawings[i].concept].name
        return Extreme(name, float(trace[i]), said[i], picture(result, i))

    pictures = min(pictures, len(order) // 2)
    least, most = ([drawing(i) for i in rows[:pictures]] for rows in (order, order[::-1]))
    out = [Extremes("drawings", least, most)]
    traces = result.uncertainty(result.text)
    for level in LEVELS:
        rows = np.unique(result.table.text[result.table.rows(level)])
        ordered = rows[traces[rows].argsort(kind="stable")]
        shown = [Extreme(result.table.texts[i], float(traces[i]), texts_said[i], level=level) for i in ordered]
        whole = len(shown) <= texts
        out.append(Extremes(level, shown) if whole else Extremes(level, shown[:texts], shown[::-1][:texts]))
    return out


def in_print(result: CorpusResult) -> tuple[list[str], list[str]]:
    """What the page prints for the uncertainty of every drawing and every text: its trace, or how many it fits."""
    units = result.model_score.units
    if units is None:
        images, texts = ([f"{x:#.4g}" for x in result.uncertainty(z)] for z in (result.image, result.text))
        return images, texts
    of_images = units.matches(result.image.trace, len(result.table.texts), of="texts").tolist()
    of_texts = units.matches(result.text.trace, len(result.corpus.drawings)).tolist()
    return [amount(x) for x in of_images], [amount(x) for x in of_texts]


def amount(number: float) -> str:
    """An expected number of things: 0.82, 3.4, 28."""
    return f"{number:,.0f}" if number >= 9.95 else f"{number:.1f}" if number >= 0.995 else f"{number:.2f}"


def best_rows(scores: Tensor, top: int) -> list[int]:
    """Indices of the highest scores, equal ones by index."""
    return scores.argsort(descending=True, stable=True)[:top].tolist()
