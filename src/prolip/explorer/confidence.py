"""The probability that the first answer is right, and what speaks against it, in nats that add up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prolip.explorer.gallery import number
from prolip.gaussian import Gaussian
from prolip.measures import pairwise_mean_cosine
from prolip.scores import Score, Side
from prolip.uncertainty.doubt import with_doubt
from prolip.uncertainty.novelty import ODDS, refusal

#: What each end of a tower knows.
ENDS = {"first": "what it is made of", "mean": "what it shows or says"}
WAYS = {
    "units": "the first one's share of the model's confidence; what is as good shares it",
    "match": "the match probability by the model's trained scale and bias",
    "share": "the first one's share of the softmax by the model's trained scale",
}


class FirstAnswer(NamedTuple):
    """The best of `among` candidates. code_length: -log p(it is right), nats; way: how it is known, of WAYS."""

    code_length: float
    among: int
    way: str


def first_answer(
    asked: Gaussian, candidates: Iterable[Gaussian], own: Score, side: Side, doubts: Callable = lambda image: None
) -> FirstAnswer | None:
    """The confidence of the best of all candidates, batches (N, D), for a query (1, D); None if none was trained. A
    text has the match probability, as it is true of many images; an image of a model with units the softmax of the
    cosines (`Units.code_length`), which equally good captions share; others the softmax by the trained scale.
    doubts: of unit means (1, D), the querying image or else the best one.
    """
    first, units, among, best, total = asked, own.units, 0, -math.inf, torch.tensor(-math.inf, dtype=torch.float64)
    way = "match" if own.match_probability(torch.zeros(1)) is not None else "share"
    if units is not None and (side == "image" or way == "share"):
        way = "units"
    for z in candidates:
        if way == "units" and units is not None:
            scores: Tensor | None = pairwise_mean_cosine(asked, z).flatten() * (2 / units.unit)
        else:
            own_scores = own.pairwise(*((asked, z) if side == "image" else (z, asked))).flatten()
            scores = own.match_probability(own_scores) if way == "match" else own.scaled(own_scores)
        if scores is None:
            return None
        if way == "match" and float(scores.max()) > best:
            first = z.select(scores.argmax().unsqueeze(0))
        among, best = among + len(scores), max(best, float(scores.max()))
        total = torch.logaddexp(total, scores.double().logsumexp(0))
    if not among:
        return None
    nats = -math.log(min(1.0, max(best, 1e-300))) if way == "match" else max(0.0, float(total) - best)
    doubt = doubts(first.mean) if side == "image" or way == "match" else None
    if units is not None and doubt is not None:
        other = units.share(asked.trace) if way == "match" else 1 / among
        nats = -float(with_doubt(torch.tensor(math.exp(-nats)), doubt, other).log())
    return FirstAnswer(nats, among, way)


def judge(answer: FirstAnswer | None, novelty: Mapping[str, float]) -> dict[str, Any]:
    """What speaks against answering, and the remaining probability exp(-sum). novelty: nats by end of the tower."""
    parts, foreign = [], 0.0
    if answer is not None:
        text = f"{math.exp(-answer.code_length):.0%}: {WAYS[answer.way]}, among {answer.among:,}."
        parts.append({"name": "The answer", "nats": number(answer.code_length), "text": text})
    for end, nats in novelty.items():
        alone = float(refusal(torch.zeros(1), {end: torch.tensor([nats])}))
        foreign += alone
        name = f"Unlike the training: {ENDS.get(end, end)}"
        parts.append({"name": name, "nats": number(alone), "text": rarity(nats)})
    against = foreign + (0.0 if answer is None else answer.code_length)
    probability, familiar = None if answer is None else math.exp(-against), math.exp(-foreign) if novelty else None
    return {"parts": parts, "nats": number(against), "probability": probability, "familiar": familiar}


def rarity(nats: float) -> str:
    """Novelty in words."""
    if nats < math.log(2):
        return "Nothing unusual: more than half of the training's own kind are further out."
    share = "None of the training's own kind would be"
    if nats < 20:
        share = f"1 in {float(f'{math.exp(nats):.2g}'):,.0f} of the training's own kind is"
    return f"{share} this far out; 1 input in {ODDS + 1} is taken to be foreign before it is seen."
