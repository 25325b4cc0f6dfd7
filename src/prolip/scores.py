"""Scores that compare a model's embeddings: all pairs, match probabilities, uncertainty, index vectors.

A score is a measure of `prolip.measures`, or a network, with its trained numbers; the model's method chooses it.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from prolip.gaussian import Gaussian, without_autocast
from prolip.losses import Factors, csd_factors, mean_factors, wasserstein2_factors
from prolip.measures import MEASURES, Measure, get_measure
from prolip.measures.matching import pairwise_match_probability
from prolip.measures.pairwise import check_pairwise
from prolip.uncertainty.doubt import Doubt, Evidence, with_doubt
from prolip.uncertainty.units import Units

LEAST_SCALE = 1e-3  # scale to fit if cosines do not predict the pairs
Side = Literal["image", "text"]  # the modality of a Gaussian


class Score(nn.Module):
    """A comparison of queries and a gallery, larger is nearer; its parameters, if any, were trained only for it.

    scale, bias: a and b of the logit a * score + b; bias None: a softmax confidence, no match probability; both None:
    neither. A subclass implements `pairwise`, and overrides the rest as needed.
    """

    name: str  # its name in config.json and for --similarity; with settings, `NAME:setting=1`
    words: ClassVar[str] = ""  # description for a person; "": its name
    choices: ClassVar[tuple[str, ...]] = ()  # settings that a user may choose
    #: Number of each query's nearest by `coarse` that `paired` scores and ranks first; 0: all.
    shortlist: int = 0
    symmetric: ClassVar[bool] = True  # whether queries and gallery are exchangeable
    sampled: ClassVar[bool] = False  # whether it draws samples and so is an estimate
    reader: Any = None  # the model's `prolip.uncertainty.readings.FittedReader`, if `prolip.score_of` found one
    supports_points: ClassVar[bool] = False  # whether it is defined for points, without variance

    def __init__(self, scale: float | None = None, bias: float | None = None):
        super().__init__()
        self.scale, self.bias = scale, bias

    @classmethod
    def of(cls, model: Any) -> Score:
        """Return the score of a trained model, with its scale and bias if it has them."""
        scale, bias = (getattr(model, part, None) for part in ("logit_scale", "logit_bias"))
        return cls(None if scale is None else scale.exp().item(), None if bias is None else bias.item())

    def pairwise(self, queries: Gaussian, gallery: Gaussian) -> Tensor:
        """Compute all scores in a bounded workspace, (Q, D), (G, D) -> (Q, G); images first if it is not symmetric."""
        raise NotImplementedError

    def pair_uncertainty(self, images: Gaussian, texts: Gaussian) -> Tensor | None:
        """Compute the uncertainty of each pair of rows, (N, D), (N, D) -> (N,); None: only each input's is known."""
        return None

    def forward(self, queries: Gaussian, gallery: Gaussian) -> Tensor:
        """Apply `pairwise`, for `torch.func.functional_call` with the parameters of a training step."""
        return self.pairwise(queries, gallery)

    def factors(self, z: Gaussian, side: Side = "image") -> Factors | None:
        """Return one side in factors, whose inner product is exactly the score; None if it does not factor."""
        return None

    def scaled(self, scores: Tensor) -> Tensor | None:
        """Compute a * score, the logits of a softmax over the gallery; None without a trained scale."""
        return None if self.scale is None else self.scale * scores

    def logit(self, scores: Tensor) -> Tensor | None:
        """Compute a * score + b, the log odds of matches; None without a trained bias."""
        scaled = self.scaled(scores)
        return None if scaled is None or self.bias is None else scaled + self.bias

    def match_probability(
        self, scores: Tensor, doubt: Tensor | None = None, share: Tensor | float = 0.0
    ) -> Tensor | None:
        """Compute (1 - d) sigmoid(logit) + d share of scores of any shape; None without a trained bias.

        The second argument, d: the share of each image's probability that is not the model's; share: of all images,
        that each text matches (`Units.share`); both broadcast.
        """
        logit = self.logit(scores)
        if logit is None or doubt is None:
            return None if logit is None else torch.sigmoid(logit)
        return with_doubt(torch.sigmoid(logit), doubt, share).clamp(max=1)  # rounding may give 1 + 1e-7

    def doubts(self, evidence: Evidence | None, gallery: Evidence | None = None) -> Tensor | None:
        """Return d of images, (N,), from their evidence and that of a gallery; None without a fit."""
        return None

    def probability(self, images: Gaussian, texts: Gaussian, gallery: Gaussian | None = None) -> Tensor | None:
        """Compute the match probability of each text and image, (N, D), (T, D) -> (N, T); None without a trained bias.

        gallery: at least eight images of the same kind, which improve the probabilities of unfamiliar ones.
        """
        doubt, share = None, torch.zeros(())
        if self.reader is not None and self.units is not None:
            own, kind = (None if z is None else self.reader.evidence(z.mean) for z in (images, gallery))
            doubt, share = self.doubts(own, kind), self.units.share(texts.trace)
        scores = self.pairwise(images, texts)
        return self.match_probability(scores, None if doubt is None else doubt.unsqueeze(1), share)

    def uncertainty(self, z: Gaussian) -> Tensor:
        """Return the uncertainty of each input, (N, D) -> (N,): its trace."""
        return z.trace

    @property
    def in_words(self) -> str:
        """A short description of the score."""
        return self.words or self.name

    @property
    def units(self) -> Units | None:
        """The units of its uncertainty; None if it only orders inputs."""
        return None

    def settings(self) -> dict[str, Any]:
        """Return the JSON values of an equal score's arguments, without its parameters."""
        return {"scale": self.scale, "bias": self.bias}

    def with_settings(self, words: str) -> Score:
        """Return an equal score with other `choices` in its name, such as `shortlist=100` (separated by commas)."""
        values = self.to_dict()
        for word in words.split(","):
            key, _, value = word.partition("=")
            if key not in self.choices or not value.isdecimal():
                known = " or ".join(f"{self.name}:{choice}=NUMBER" for choice in self.choices)
                remedy = f"give {known}" if known else "it has no settings"
                raise ValueError(f"{word!r} is not a setting of the score {self.name!r}: {remedy}")
            values[key] = int(value)
        score = self.from_dict(values)
        score.name = f"{self.name}:{words}"
        return score

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values for `from_dict`, stored with features; state: trained tensors, float32 in base 64."""
        trained = {}
        for name, x in self.state_dict().items():
            numbers = base64.b64encode(x.float().cpu().numpy().tobytes()).decode()
            trained[name] = {"shape": list(x.shape), "float32": numbers}
        return {"name": self.name, **self.settings()} | ({"state": trained} if trained else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Score:
        """Read the values of `to_dict`."""
        given = {key: value for key, value in values.items() if key not in ("name", "state")}
        score = cls(**given)
        state = {}
        for name, x in values.get("state", {}).items():
            numbers = np.frombuffer(base64.b64decode(x["float32"]), dtype=np.float32)
            state[name] = torch.from_numpy(numbers.copy()).reshape(x["shape"])
        score.load_state_dict(state)
        return score.requires_grad_(False)


class MeasureScore(Score):
    """A measure of `prolip.measures.MEASURES` as a score, with the sign that makes larger nearer."""

    measure: ClassVar[Measure]

    def pairwise(self, queries: Gaussian, gallery: Gaussian) -> Tensor:
        return self.measure.pairwise_scores(queries, gallery)


class CSDScore(MeasureScore):
    """Closed-form sampled distance as a similarity, mean.mean' - (trace + trace')/2, ProLIP (A.1)."""

    name, supports_points, words = "csd", True, "similarity of Gaussians (CSD)"
    measure = get_measure("csd_similarity")

    def factors(self, z: Gaussian, side: Side = "image") -> Factors:
        return csd_factors(z)


class MeanScore(MeasureScore):
    """Cosine of the means, which ignores the variances, as in SigLIP and CLIP."""

    name, supports_points, words = "mean", True, "cosine of the means"
    measure = get_measure("mean_cosine")

    def factors(self, z: Gaussian, side: Side = "image") -> Factors:
        return mean_factors(z)


class WassersteinScore(MeasureScore):
    """-W2, the squared 2-Wasserstein distance: |m - m'|^2 + |sigma - sigma'|^2."""

    name, supports_points = "wasserstein2", True
    measure = get_measure("wasserstein2")

    def factors(self, z: Gaussian, side: Side = "image") -> Factors:
        """Return twice `losses.wasserstein2_factors` of half the distance: sqrt(2) [mean, sigma], -|mean|^2 - trace."""
        vector, offset = wasserstein2_factors(z)
        return Factors(2**0.5 * vector, 2 * offset)


class TrueMatchScore(Score):
    """mean.mean' + w trace of the text: the logit, without scale and bias, that a text matches an image.

    A text that matches n images gives each of them about 1/n of p(image | text): with a trace of (2/a) log n the match
    logit is a mean.mean' + (a/2) trace + terms of the text. unit, images, texts: as in `Units`, or 0.
    """

    name, symmetric, words = "true_match", False, "likelihood that the text matches the image"

    def __init__(  # noqa: PLR0913, PLR0917 (what was trained)
        self, trace_weight: float, unit: float, images: int, texts: int, scale=None, bias=None, doubt: Any = None
    ):
        super().__init__(scale, bias)
        self.trace_weight, self.unit, self.images, self.texts = trace_weight, unit, images, texts
        self.doubt = doubt if doubt is None or isinstance(doubt, Doubt) else Doubt.from_numbers(list(doubt))

    def pairwise(self, queries: Gaussian, gallery: Gaussian) -> Tensor:
        queries, gallery = check_pairwise(queries, gallery, ("images", "texts"))
        (u, _), (v, offset) = self.factors(queries, "image"), self.factors(gallery, "text")
        with without_autocast(u.device):
            return u @ v.mT + offset

    def factors(self, z: Gaussian, side: Side = "image") -> Factors:
        vector, offset = mean_factors(z)
        return Factors(vector, offset + self.trace_weight * z.trace if side == "text" else offset)

    @property
    def units(self) -> Units | None:
        return Units(self.unit, self.images, self.texts) if self.unit else None

    def settings(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("trace_weight", "unit", "images", "texts")}
        return super().settings() | own | ({} if self.doubt is None else {"doubt": self.doubt.numbers})

    def doubts(self, evidence: Evidence | None, gallery: Evidence | None = None) -> Tensor | None:
        return None if self.doubt is None or evidence is None else self.doubt.of(evidence, gallery)


class MatchProbabilityScore(Score):
    """PCME's match probability, the mean of sigmoid(b - a |z - z'|) over samples of both, PCME (2) and (3).

    seed: of the noise, so that equal inputs get equal scores. Every block of a large gallery draws its own samples.
    """

    name, sampled, choices = "match_probability", True, ("samples", "seed")

    def __init__(self, scale: float = 1.0, bias: float = 0.0, samples: int = 8, seed: int = 0):
        super().__init__(scale, bias)
        self.samples, self.seed = samples, seed

    def pairwise(self, queries: Gaussian, gallery: Gaussian) -> Tensor:
        generator = torch.Generator(queries.mean.device).manual_seed(self.seed)
        assert self.scale is not None and self.bias is not None
        return pairwise_match_probability(queries, gallery, self.scale, self.bias, self.samples, generator)

    def scaled(self, scores: Tensor) -> None:
        """Return None, because the scores already contain scale and bias."""

    def match_probability(self, scores: Tensor, doubt: Tensor | None = None, share: Tensor | float = 0.0) -> Tensor:
        return scores

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"samples": self.samples, "seed": self.seed}


Similarity = str | Score | None  # a score or its name; None: the score of the model's method


@cache
def measure_score(name: str) -> type[MeasureScore]:
    """Return the score of a measure by name: it ranks, without a logit. ValueError with similar names if unknown."""
    measure = get_measure(name)
    asymmetric = name in ("kl", "log_inclusion", "inclusion_test")
    members = {"name": name, "measure": measure, "symmetric": not asymmetric, "__doc__": f"-{name}"}
    return type(f"{name}_score", (MeasureScore,), members)


globals().update((f"{name}_score", measure_score(name)) for name in MEASURES)  # where pickle looks for classes
SCORES: dict[str, type[Score]] = {
    score.name: score for score in (CSDScore, MeanScore, WassersteinScore, MatchProbabilityScore)
}


def largest(scores: Tensor, count: int) -> Tensor:
    """Return the items of the `count` largest scores of each row, ties by rising item: (b, G) -> (b, count or G)."""
    values, near = scores.topk(min(count + 1, scores.shape[1]), dim=1)
    near = near[:, :count].sort(dim=1).values
    near = near.gather(1, scores.gather(1, near).argsort(dim=1, descending=True, stable=True))
    if count < scores.shape[1]:
        tied = values[:, count - 1] == values[:, count]
        near[tied] = scores[tied].argsort(dim=1, descending=True, stable=True)[:, :count]
    return near


def index_vectors(score: Score, z: Gaussian, gallery: bool, distance=False, side: Side = "image") -> Tensor | None:
    """Return vectors (N, P + 1) whose inner product (`distance`: L2 distance) ranks a gallery as the score, or None.

    Inner product: a query [u, 1], an item [v, b]. Distance: a query [u, 0], an item as `distance_vectors`.
    """
    factors = score.factors(z, side)
    if factors is None or distance and gallery:
        return None if factors is None else distance_vectors(factors)
    vector, offset = factors
    last = offset if gallery else torch.full_like(offset, 0.0 if distance else 1.0)
    return torch.cat([vector, last.unsqueeze(-1)], -1)


def distance_vectors(items: Factors, constant: float | None = None) -> Tensor:
    """Return [v, sqrt(c - |v|^2 - 2 b)] of a gallery's factors, (N, P + 1): the nearest to [u, 0] scores highest.

    |u - v|^2 + c - |v|^2 - 2 b = |u|^2 + c - 2 (u.v + b). constant: c, at least `least_constant` of the whole gallery;
    None: that of these items. ValueError for a smaller one.
    """
    lengths = items.vector.square().sum(-1) + 2 * items.offset
    room = (lengths.amax() if constant is None else constant) - lengths
    if bool((room < 0).any()):
        least = f"constant {constant} is below {float(lengths.max())}"
        raise ValueError(f"{least}. Rebuild all vectors with a larger one")
    return torch.cat([items.vector, room.sqrt().unsqueeze(-1)], -1)


def least_constant(items: Factors) -> float:
    """Return the least c of `distance_vectors`: the gallery's largest |v|^2 + 2 b; for csd and unit means 1 - trace."""
    return float((items.vector.square().sum(-1) + 2 * items.offset).max())
