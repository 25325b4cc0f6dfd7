"""Whether a model would answer, and what speaks against it, in nats that add up."""
from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prolip.explorer.gallery import number
from prolip.gaussian import Gaussian
from prolip.measures import pairwise_mean_cosine
from prolip.scores import Score, Side
from prolip.uncertainty.novelty import ODDS, refusal

#: In words, what each end of a tower knows.
ENDS = {"first": "what it is made of", "mean": "what it shows or says"}


class Answer(NamedTuple):
    """The first of some candidates. code_length: nats, -log p(it is right); among: how many candidates; way: by what
    this is known, in a word that `WAYS` explains.
    """

    code_length: float
    among: int
    way: str


WAYS = {
    "units": "the first one's share of the model's confidence; what is as good shares it",
    "match": "the match probability by the model's trained scale and bias",
    "share": "the first one's share of the softmax by the model's trained scale",
}


def first_answer(asked: Gaussian, candidates: Iterable[Gaussian], own: Score, side: Side) -> Answer | None:
    """How sure the first of all candidates, batches (N, D), is of a question (1, D) of a side; None where nothing was
    trained that says so.

    Of a text the match probability, as a text is true of many images, whose shares of a softmax are small. Of a picture
    with units the softmax of the cosines (`Units.code_length`), in which captions that are as good share what one has:
    too low, not too high, where several are right. Where a score has none of this, the softmax by its trained scale.
    """
    units, among, best, total = own.units, 0, -math.inf, torch.tensor(-math.inf, dtype=torch.float64)
    way = "match" if own.match_probability(torch.zeros(1)) is not None else "share"
    if units is not None and (side == "image" or way == "share"):
        way = "units"
    for z in candidates:
        if way == "units":
            assert units is not None
            scores: Tensor | None = pairwise_mean_cosine(asked, z).flatten() * (2 / units.unit)
        else:
            own_scores = own.pairwise(*((asked, z) if side == "image" else (z, asked))).flatten()
            scores = own.match_probability(own_scores) if way == "match" else own.scaled(own_scores)
        if scores is None:
            return None
        among, best = among + len(scores), max(best, float(scores.max()))
        total = torch.logaddexp(total, scores.double().logsumexp(0))
    if not among:
        return None
    if way == "match":
        return Answer(-math.log(min(1.0, max(best, 1e-300))), among, way)
    return Answer(max(0.0, float(total) - best), among, way)


def judge(answer: Answer | None, novelty: dict[str, float]) -> dict[str, Any]:
    """What speaks against answering, a part each, and the probability that is left: exp(-their sum).

    novelty: nats by end of the tower. `prolip.uncertainty.novelty.refusal` is the sum.
    """
    parts, strange = [], 0.0
    if answer is not None:
        sure = f"{math.exp(-answer.code_length):.0%}"
        parts.append({"name": "The answer", "nats": number(answer.code_length),
                      "text": f"{sure}: {WAYS[answer.way]}, among {answer.among:,}."})  # fmt: skip
    for end, nats in novelty.items():
        alone = float(refusal(torch.zeros(1), {end: torch.tensor([nats])}))
        strange += alone
        name = f"Unlike the training: {ENDS.get(end, end)}"
        parts.append({"name": name, "nats": number(alone), "text": rarity(nats)})
    against = strange + (0.0 if answer is None else answer.code_length)
    return {"parts": parts, "nats": number(against),
            "probability": None if answer is None else math.exp(-against),
            "familiar": math.exp(-strange) if novelty else None}  # fmt: skip


def rarity(nats: float) -> str:
    """Novelty in words."""
    if nats < math.log(2):
        return "Nothing unusual: more than half of the training's own kind are further out."
    if nats < 20:
        share = f"1 in {float(f'{math.exp(nats):.2g}'):,.0f} of the training's own kind is"
    else:
        share = "None of the training's own kind would be"
    return f"{share} this far out; 1 input in {ODDS + 1} is taken to be foreign before it is seen."
