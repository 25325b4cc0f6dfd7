"""First places of the corpus that are wrong, and what they are refused by."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from prolip.evaluation.metrics.blockwise import PairScores, Relevance
from prolip.evaluation.metrics.bootstrap import Statistic, auroc_of, risk_area_of
from prolip.evaluation.metrics.calibration import reliability
from prolip.evaluation.metrics.ranking import Ranking
from prolip.evaluation.metrics.selective import selective_metrics
from prolip.evaluation.metrics.study import study_retrieval
from prolip.uncertainty.novelty import refusal

if TYPE_CHECKING:
    from prolip.evaluation.suites.emoji.result import CorpusResult

WAYS = ("i2t", "t2i")
#: What intervals are given of.
WITH_INTERVALS = ("score", "all")


def cases(result: CorpusResult) -> Iterator[tuple[str, Ranking, dict[str, np.ndarray]]]:
    """Name, ranking and what speaks against first places: drawings and names, drawings and all texts, in both ways."""
    for name, rankings in result.rankings.items():
        for way, ranking in zip(WAYS, rankings):
            yield f"{name}_{way}", ranking, signs_against(result, name, way)


def metrics(result: CorpusResult) -> dict[str, float]:
    """`refusal/{names,captions}_{i2t,t2i}/...`: the first place of a drawing among the names and among all texts, and
    of a text among the drawings, right or wrong, and what it is refused by.

    As `study_retrieval`: `score`, `image`, `text` and `pair`; where the model knows of novelty `mean` and `first`, of
    the image asked about or found; where its traces have a unit `answer`, `Units.code_length` of the first place; and
    with both `all`, the nats of `prolip.uncertainty.novelty.refusal`. Of each AUROC and AURC, and of `answer` among the
    names, of which one is right, the calibration error `ece` of its probability.
    """
    out: dict[str, float] = {}
    for name, ranking, signs in cases(result):
        wrong = (~ranking.hit(1))[ranking.answerable]
        against = {key: x[ranking.answerable.numpy()] for key, x in signs.items()}
        found = selective_metrics(wrong, against, f"refusal/{name}")
        out |= {key: value for key, value in found.items() if key.endswith(("/auroc", "/aurc"))}
        if name.startswith("names") and "answer" in against:
            probability = np.exp(-against["answer"]).clip(max=1.0)  # rounding may leave a code length below 0
            out[f"refusal/{name}/answer/ece"] = reliability(probability, (~wrong).numpy()).ece
    return out


def calibration(result: CorpusResult) -> dict[str, float]:
    """`calibration/{names,captions}/match/...` of all pairs, `match_i2t` and `match_t2i` of first places: how well the
    score's match probability is kept, as `study_retrieval`; {} for a score without one.
    """
    out: dict[str, float] = {}
    for name, (texts, relation) in result.galleries.items():
        scores = PairScores.from_gaussians(result.image, texts, result.score)
        relevance = Relevance.from_dense(torch.from_numpy(relation).mT)
        found = study_retrieval(scores, relevance, None, None, result.score, result.model_score.uncertainty)[2]
        for key, kept in found.reliability.items():
            out |= kept.metrics(key.replace("calibration", f"calibration/{name}"))
    return out


def statistics(result: CorpusResult) -> dict[str, Statistic]:
    """Those of the metrics that intervals are given of, as functions of how often each drawing or text was drawn."""
    out: dict[str, Statistic] = {}
    for name, ranking, signs in cases(result):
        queries = "images" if name.endswith("_i2t") else name.removesuffix("_t2i")
        wrong = (~ranking.hit(1)).double().where(ranking.answerable, torch.nan)
        for key in (key for key in WITH_INTERVALS if key in signs):
            out[f"refusal/{name}/{key}/auroc"] = auroc_of(signs[key], wrong, queries)
            out[f"refusal/{name}/{key}/aurc"] = risk_area_of(signs[key], wrong, queries)
    return out


def signs_against(result: CorpusResult, gallery: str, way: str) -> dict[str, np.ndarray]:
    """What speaks against the first place of every drawing among the texts of a gallery ("i2t"), or of every text among
    the drawings ("t2i"), (N,) by name."""
    units, texts = result.model_score.units, result.galleries[gallery][0]
    top = result.ranked[gallery][WAYS.index(way)][1]
    first = top.item.numpy()  # NumPy takes a tensor of one element for a number
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
        nats = units.code_length(cosine if way == "i2t" else cosine.mT)
        answer = nats.gather(1, top.item.unsqueeze(1)).squeeze(1)
        out["answer"] = answer.numpy()
        if result.novelty:
            out["all"] = refusal(answer, {name: torch.from_numpy(out[name]) for name in result.novelty}).numpy()
    return out
