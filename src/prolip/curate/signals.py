"""The signals of pairs of an image and its caption: a few numbers each, by a model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from prolip.curate.tables import BITS, SIGNATURE
from prolip.embedder import Embedder, lengths_of
from prolip.gaussian import Gaussian
from prolip.measures import inclusion_test
from prolip.scores import Score, Side
from prolip.uncertainty.readings import Reader


class PairSignals:
    """Computes the columns of batches of pairs: `prolip.curate.rules.MEANINGS`, novelties and signatures."""

    def __init__(self, embedder: Embedder):
        self.embedder = embedder
        self.pad = embedder.tokenizer([""])[0, -1]

    def __call__(self, pixels: Tensor, captions: Sequence[str]) -> dict[str, np.ndarray | pa.Array]:
        """Columns of a batch, pixels (B, 3, H, W) and B captions."""
        model, ids = self.embedder, self.embedder.tokenizer(list(captions))
        image, text = model.encode(pixels, "image"), model.encode(ids, "text")
        found = pair_columns(model.score, image.z, text.z, model.probabilistic, model.reader)
        found["text_tokens"] = lengths_of(ids, self.pad)
        _, first, own = np.unique(np.array(captions, dtype=object), return_index=True, return_inverse=True)
        found["own_first"] = model.score.pairwise(image.z, text.z.select(first)).argmax(1) == torch.from_numpy(own)
        for side, novelty in (("image", image.novelty), ("text", text.novelty)):
            found |= {f"{side}_novelty_{end}": nats for end, nats in novelty.items()}
        return {name: x.float().numpy() for name, x in found.items()} | {SIGNATURE: signatures(image.z.mean)}


def signatures(mean: Tensor) -> pa.Array:
    """BITS signs of projections on random planes, packed, (B, D) -> (B,) binary. A bit of two unit vectors at an angle
    w differs with probability w / pi (Charikar 2002).
    """
    planes = torch.randn(mean.shape[1], BITS, generator=torch.Generator().manual_seed(0))
    bits = np.packbits((mean @ planes > 0).numpy(), axis=1)
    return pa.array([row.tobytes() for row in bits], pa.binary(BITS // 8))


def pair_columns(
    score: Score, image: Gaussian, text: Gaussian, probabilistic: bool, reader: Reader | None = None
) -> dict[str, Tensor]:
    """The columns of a batch of embedded pairs (B, D), (B,) each. reader: the model's. normalised_score compares a pair
    with the others of its batch (Wang et al. 2024, arXiv 2405.19547): l_ii - 1/2 (log mean_j exp l_ij + log mean_j exp
    l_ji) of logits l, by means in place of sums, so that a smaller last batch has about the same numbers.
    """
    matrix = score.pairwise(image, text)
    own, logits = matrix.diagonal(), score.scaled(matrix)
    found = {"cosine": (image.mean * text.mean).sum(1), "score": own, "match_probability": score.match_probability(own)}
    if logits is not None:
        both = logits.logsumexp(1) + logits.logsumexp(0)
        found["normalised_score"] = logits.diagonal() - (both / 2 - math.log(len(logits)))
    evidence = None if reader is None else reader.evidence(image.mean)
    if (doubt := score.doubts(evidence, evidence)) is not None and score.units is not None:
        probability = score.match_probability(own, doubt, score.units.share(score.uncertainty(text)))
        found |= {"match_probability": probability, "image_doubt": doubt}
    if reader is not None:
        found["image_ambiguity"] = reader.ambiguity(image.mean)
    if probabilistic:
        found |= side_columns(score, score.uncertainty(image), "image")
        found |= side_columns(score, score.uncertainty(text), "text")
        found["inclusion"] = inclusion_test(image, text)
    return {name: x for name, x in found.items() if x is not None}


def side_columns(score: Score, trace: Tensor, side: Side) -> dict[str, Tensor]:
    """The columns of uncertainties (B,) of one side: themselves, and bits if the score has units."""
    found = {f"{side}_uncertainty": trace}
    if score.units is not None:
        found[f"{side}_bits"] = score.units.information(trace, "texts" if side == "image" else "images", bits=True)
    return found
