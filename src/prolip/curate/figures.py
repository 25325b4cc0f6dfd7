"""What a model says of pairs of an image and its caption: a few numbers each."""

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


class Figures:
    """What an embedder says of batches of pairs: those of `columns`, and novelties, where it has any."""

    def __init__(self, embedder: Embedder):
        self.embedder = embedder
        self.pad = embedder.tokenizer([""])[0, -1]
        self.planes: Tensor | None = None

    def __call__(self, pixels: Tensor, captions: Sequence[str]) -> dict[str, np.ndarray | pa.Array]:
        """Columns of a batch, pixels (B, 3, H, W) and B captions."""
        model = self.embedder
        ids = model.tokenizer(list(captions))
        (z, image_novelty), (t, text_novelty) = model.encode(pixels, "image"), model.encode(ids, "text")
        found = pair_figures(model.score, z, t, model.probabilistic, model.reader)
        found["text_tokens"] = lengths_of(ids, self.pad)
        _, first, own = np.unique(np.array(captions, dtype=object), return_index=True, return_inverse=True)
        found["own_first"] = model.score.pairwise(z, t.select(first)).argmax(1) == torch.from_numpy(own)
        for side, novelty in (("image", image_novelty), ("text", text_novelty)):
            found |= {f"{side}_novelty_{end}": nats for end, nats in novelty.items()}
        columns: dict[str, np.ndarray | pa.Array] = {name: x.float().numpy() for name, x in found.items()}
        columns[SIGNATURE] = self.signatures(z.mean)
        return columns

    def signatures(self, mean: Tensor) -> pa.Array:
        """BITS signs of projections on random planes, packed: for unit vectors at an angle w a bit differs with
        probability w / pi (Charikar 2002). (B, D) -> (B,) binary.
        """
        if self.planes is None:
            self.planes = torch.randn(mean.shape[1], BITS, generator=torch.Generator().manual_seed(0))
        bits = np.packbits((mean @ self.planes > 0).numpy(), axis=1)
        return pa.array([row.tobytes() for row in bits], pa.binary(BITS // 8))


def pair_figures(
    score: Score, image: Gaussian, text: Gaussian, probabilistic: bool, reader: Reader | None = None
) -> dict[str, Tensor]:
    """The columns that a batch of embedded pairs (B, D) has, (B,) each. reader: the model's.

    normalised_score compares a pair with the others of its batch, as Wang et al. 2024 (arXiv 2405.19547) do; means
    in place of their sums give a smaller last batch about the same numbers.
    """
    matrix = score.pairwise(image, text)
    own = matrix.diagonal()
    found = {
        "cosine": (image.mean * text.mean).sum(1),
        "score": own,
        "match_probability": score.match_probability(own),
        "normalised_score": normalised(score.scaled(matrix)),
    }
    evidence = None if reader is None else reader.evidence(image.mean)
    if (doubt := score.doubts(evidence, evidence)) is not None and score.units is not None:
        probability = score.match_probability(own, doubt, score.units.share(score.uncertainty(text)))
        found |= {"match_probability": probability, "image_doubt": doubt}
    if reader is not None:
        found["image_ambiguity"] = reader.ambiguity(image.mean)
    if probabilistic:
        found |= side_figures(score, score.uncertainty(image), "image")
        found |= side_figures(score, score.uncertainty(text), "text")
        found["inclusion"] = inclusion_test(image, text)
    return {name: x for name, x in found.items() if x is not None}


def side_figures(score: Score, trace: Tensor, side: Side) -> dict[str, Tensor]:
    """What uncertainties (B,) of one side say: themselves, and bits where the score has units."""
    found = {f"{side}_uncertainty": trace}
    if score.units is not None:
        found[f"{side}_bits"] = score.units.information(trace, "texts" if side == "image" else "images", bits=True)
    return found


def normalised(logits: Tensor | None) -> Tensor | None:
    """l_ii - 1/2 (log mean_j exp l_ij + log mean_j exp l_ji) of logits (B, B) -> (B,); None for None."""
    if logits is None:
        return None
    both = logits.logsumexp(1) + logits.logsumexp(0)
    return logits.diagonal() - (both / 2 - math.log(len(logits)))
