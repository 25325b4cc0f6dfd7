"""How a trained model compares its embeddings: scores of all pairs, the probability behind them, uncertainty, an index.

`prolip.measures` has the formulas; a score is one of them, or a network of its own, with what was trained for it. Which
score a model has is its method's business (`prolip.methods`) and stands in the model's config.json.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
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

#: The scale that is fitted where cosines say nothing of the pairs.
LEAST_SCALE = 1e-3
#: What a Gaussian is of.
Side = Literal["image", "text"]


class Score(nn.Module):
    """How queries and a gallery compare, larger is nearer; parameters, if any, are what was trained for it alone.

    scale, bias: a and b of the logit a * score + b as they enter it; bias None: a softmax confidence and no match
    probability, both None: neither. A subclass gives `pairwise`, and what of the rest differs.
    """

    #: What config.json and --similarity call it; with settings of its own, `NAME:setting=1`.
    name: str
    #: What it ranks by, for people; "": its name says it.
    words: ClassVar[str] = ""
    #: Settings that whoever asks for it may choose.
    choices: ClassVar[tuple[str, ...]] = ()
    #: How many of each query's nearest by `coarse` are scored by `paired`, the others staying behind them; 0: all are.
    shortlist: int = 0
    #: Whether queries and gallery may change places.
    symmetric: ClassVar[bool] = True
    #: Whether samples are drawn for it, so that it is an estimate.
    sampled: ClassVar[bool] = False
    #: The model's `prolip.uncertainty.readings.Reader`, where `prolip.score_of` found one.
    reader: Any = None
    #: Whether Gaussians of no extent have it.
    takes_points: ClassVar[bool] = False

    def __init__(self, scale: float | None = None, bias: float | None = None):
        super().__init__()
        self.scale, self.bias = scale, bias

    @classmethod
    def of(cls, model: Any) -> Score:
        """The score of a trained model, with its scale and bias where it has them."""
        scale, bias = (getattr(model, part, None) for part in ("logit_scale", "logit_bias"))
        return cls(None if scale is None else scale.exp().item(), None if bias is None else bias.item())

    def pairwise(self, queries: Gaussian, gallery: Gaussian) -> Tensor:
        """All scores in a bounded workspace, (Q, D), (G, D) -> (Q, G).

        Of images and texts the images are to stand first, as a score need not be symmetric.
        """
        raise NotImplementedError

    def coarse(self, queries: Gaussian, gallery: Gaussian) -> Tensor:
        """A cheap score of all pairs, (Q, D), (G, D) -> (Q, G), by which a score with a `shortlist` makes it."""
        raise NotImplementedError

    def paired(self, images: Gaussian, texts: Gaussian) -> Tensor:
        """The score of each pair of rows, (N, D), (N, D) -> (N,); only scores with a `shortlist` need it."""
        raise NotImplementedError

    def pair_uncertainty(self, images: Gaussian, texts: Gaussian) -> Tensor | None:
        """How unsure the score of each pair of rows is, (N, D), (N, D) -> (N,).

        None where a score knows of no uncertainty but that of either input.
        """
        return None

    def forward(self, queries: Gaussian, gallery: Gaussian) -> Tensor:
        """`pairwise`, for `torch.func.functional_call` with the parameters of a training step."""
        return self.pairwise(queries, gallery)

    def factors(self, z: Gaussian, side: Side = "image") -> Factors | None:
        """One side in factors, where the score has them: an inner product then serves it exactly."""
        return None

    def scaled(self, scores: Tensor) -> Tensor | None:
        """a * score, the logits of a softmax over the gallery; None where nothing was trained: such a score ranks."""
        return None if self.scale is None else self.scale * scores

    def logit(self, scores: Tensor) -> Tensor | None:
        """a * score + b, the log odds that pairs match; None where no bias was trained."""
        scaled = self.scaled(scores)
        return None if scaled is None or self.bias is None else scaled + self.bias

    def match_probability(
        self, scores: Tensor, doubt: Tensor | None = None, share: Tensor | float = 0.0
    ) -> Tensor | None:
        """The probability that pairs match, of their scores of any shape; None where no bias was trained.

        doubt: of the images (`doubts`); share: of all images that each text fits (`Units.share`); both broadcast
        against the scores. The probability is (1 - doubt) sigmoid(logit) + doubt share.
        """
        logit = self.logit(scores)
        if logit is None or doubt is None:
            return None if logit is None else torch.sigmoid(logit)
        return with_doubt(torch.sigmoid(logit), doubt, share)

    def doubts(self, evidence: Evidence | None, gallery: Evidence | None = None) -> Tensor | None:
        """Return the doubt of images, (N,), see `prolip.uncertainty.doubt`; None where the model has none.

        evidence: of these images, by the model's reader; gallery: of images of the same kind.
        """
        return None

    def probability(self, images: Gaussian, texts: Gaussian, gallery: Gaussian | None = None) -> Tensor | None:
        """Return how probably each text is true of each image, (N, D), (T, D) -> (N, T); None without a trained bias.

        It includes the model's doubt of images that are unlike its training. gallery: images of the same kind, eight or
        more, which make the doubt more accurate.
        """
        doubt, share = None, torch.zeros(())
        if self.reader is not None and self.units is not None:
            own, kind = (None if z is None else self.reader.evidence(z.mean) for z in (images, gallery))
            doubt, share = self.doubts(own, kind), self.units.share(texts.trace)
        scores = self.pairwise(images, texts)
        return self.match_probability(scores, None if doubt is None else doubt.unsqueeze(1), share)

    def uncertainty(self, z: Gaussian) -> Tensor:
        """How much room each input leaves, (N, D) -> (N,): its trace."""
        return z.trace

    @property
    def in_words(self) -> str:
        """What it ranks by, for people."""
        return self.words or self.name

    @property
    def units(self) -> Units | None:
        """What its uncertainty means to a person; None where it is a number that only orders."""
        return None

    def settings(self) -> dict[str, Any]:
        """Arguments that make an equal score but for its parameters, JSON-able."""
        return {"scale": self.scale, "bias": self.bias}

    def with_settings(self, words: str) -> Score:
        """An equal score but for these of its `choices`: `shortlist=100`, with a comma between several.

        It is called `NAME:shortlist=100`. ValueError for what may not be chosen.
        """
        values = self.to_dict()
        for word in words.split(","):
            key, _, value = word.partition("=")
            if key not in self.choices or not value.isdecimal():
                known = " or ".join(f"{self.name}:{choice}=NUMBER" for choice in self.choices)
                raise ValueError(
                    f"{word!r} is no setting of the score {self.name!r}: "
                    + (f"give {known}" if known else "it has none to choose")
                )
            values[key] = int(value)
        score = self.from_dict(values)
        score.name = f"{self.name}:{words}"
        return score

    def to_dict(self) -> dict[str, Any]:
        """JSON values from which `from_dict` makes the score, for embeddings that are kept without their model.

        state: what was trained for it, each tensor as its shape and its float32 numbers in base 64.
        """
        trained = {}
        for name, x in self.state_dict().items():
            numbers = base64.b64encode(x.float().cpu().numpy().tobytes()).decode()
            trained[name] = {"shape": list(x.shape), "float32": numbers}
        return {"name": self.name, **self.settings()} | ({"state": trained} if trained else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Score:
        """What `to_dict` wrote."""
        given = {key: value for key, value in values.items() if key not in ("name", "state")}
        score = cls(**given)
        state = {}
        for name, x in values.get("state", {}).items():
            numbers = np.frombuffer(base64.b64decode(x["float32"]), dtype=np.float32)
            state[name] = torch.from_numpy(numbers.copy()).reshape(x["shape"])
        score.load_state_dict(state)
        return score.requires_grad_(False)

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.settings().items())


class MeasureScore(Score):
    """One of `prolip.measures.MEASURES` as a score, with the sign that makes larger nearer."""

    measure: ClassVar[Measure]

    def pairwise(self, queries: Gaussian, gallery: Gaussian) -> Tensor:
        return self.measure.pairwise_scores(queries, gallery)


class CSDScore(MeasureScore):
    """Closed-form sampled distance as a similarity, mean.mean' - (trace + trace')/2, ProLIP (A.1)."""

    name, takes_points, words = "csd", True, "similarity of Gaussians (CSD)"
    measure = get_measure("csd_similarity")

    def factors(self, z: Gaussian, side: Side = "image") -> Factors:
        return csd_factors(z)


class MeanScore(MeasureScore):
    """Cosine of the means, which ignores the variances: SigLIP and CLIP."""

    name, takes_points, words = "mean", True, "cosine of the means"
    measure = get_measure("mean_cosine")

    def factors(self, z: Gaussian, side: Side = "image") -> Factors:
        return mean_factors(z)


class WassersteinScore(MeasureScore):
    """-W2, the squared 2-Wasserstein distance: |m - m'|^2 + |sigma - sigma'|^2."""

    name, takes_points = "wasserstein2", True
    measure = get_measure("wasserstein2")

    def factors(self, z: Gaussian, side: Side = "image") -> Factors:
        """Those of `losses.wasserstein2_factors`, which are of half of it: sqrt(2) [mean, sigma], -|mean|^2 - trace."""
        vector, offset = wasserstein2_factors(z)
        return Factors(2**0.5 * vector, 2 * offset)


class TrueMatchScore(Score):
    """mean.mean' + w trace of the text: the logit, but for scale and bias, that a text is true of an image.

    Where a text is true of n images, each of them gets a share of about 1/n of what the model knows, so that the
    probability to be true is n p(image | text): with a trace of (2/a) log n the logit is a mean.mean' + (a/2) trace
    and what belongs to the text alone. The weight w that matched and unmatched pairs confirm is kept with the model.
    unit, images, texts: as in `Units`; unit 0: the traces have none. doubt: numbers of a `Doubt`, if one was fitted.
    """

    name, symmetric, words = "true_match", False, "how likely the text is true of the image"

    def __init__(  # noqa: PLR0913, PLR0917 (what was trained)
        self,
        trace_weight: float,
        unit: float,
        images: int,
        texts: int,
        scale: float | None = None,
        bias: float | None = None,
        doubt: Doubt | Sequence[float] | None = None,
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
        own: dict[str, Any] = {
            "trace_weight": self.trace_weight,
            "unit": self.unit,
            "images": self.images,
            "texts": self.texts,
        }
        own |= {} if self.doubt is None else {"doubt": self.doubt.numbers}
        return super().settings() | own

    def doubts(self, evidence: Evidence | None, gallery: Evidence | None = None) -> Tensor | None:
        return None if self.doubt is None or evidence is None else self.doubt.of(evidence, gallery)


class MatchProbabilityScore(Score):
    """PCME's match probability, the mean of sigmoid(b - a |z - z'|) over samples of both, PCME (2) and (3).

    samples: of each Gaussian; seed: of their noise, so that equal inputs get equal scores. Its scores are
    probabilities. Blocks of a large gallery draw anew: their scores are estimates of the same number.
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
        """Scale and bias are in the scores already."""

    def match_probability(self, scores: Tensor, doubt: Tensor | None = None, share: Tensor | float = 0.0) -> Tensor:
        return scores

    def settings(self) -> dict[str, Any]:
        return {"scale": self.scale, "bias": self.bias, "samples": self.samples, "seed": self.seed}


#: How a score is asked for: nothing for that of the model's method, a name, or the score itself.
Similarity = str | Score | None


@cache
def measure_score(name: str) -> type[MeasureScore]:
    """The score of a measure by its name: it ranks, and has no logit. ValueError with the near ones if unknown."""
    measure = get_measure(name)
    asymmetric = name in ("kl", "log_inclusion", "inclusion_test")
    members = {"name": name, "measure": measure, "symmetric": not asymmetric, "__doc__": f"-{name}"}
    return type(f"{name}_score", (MeasureScore,), members)


globals().update((f"{name}_score", measure_score(name)) for name in MEASURES)  # where pickle looks for classes
#: Scores by name; every other name of `measures.MEASURES` is a score, too.
SCORES: dict[str, type[Score]] = {
    score.name: score for score in (CSDScore, MeanScore, WassersteinScore, MatchProbabilityScore)
}


def largest(scores: Tensor, count: int) -> Tensor:
    """The items of the `count` largest scores of each row, in falling order, equal ones by rising item: (b, G) ->
    (b, count or G). Unlike torch.topk this depends on no device, and only rows tied at the edge are sorted whole.
    """
    values, near = scores.topk(min(count + 1, scores.shape[1]), dim=1)
    near = near[:, :count].sort(dim=1).values
    near = near.gather(1, scores.gather(1, near).argsort(dim=1, descending=True, stable=True))
    if count < scores.shape[1]:
        tied = values[:, count - 1] == values[:, count]
        near[tied] = scores[tied].argsort(dim=1, descending=True, stable=True)[:, :count]
    return near


def index_vectors(
    score: Score, z: Gaussian, gallery: bool, distance: bool = False, side: Side = "image"
) -> Tensor | None:
    """Vectors (N, P + 1) whose inner product (or, with `distance`, smallest L2 distance) ranks a gallery as the score
    does; None where the score does not factor.

    Inner product: a query [u, 1], an item [v, b]. Distance: a query [u, 0], an item as `distance_vectors`; the
    gallery is to be given whole.
    """
    factors = score.factors(z, side)
    if factors is None:
        return None
    vector, offset = factors
    if distance and gallery:
        return distance_vectors(factors)
    last = offset if gallery else torch.full_like(offset, 0.0 if distance else 1.0)
    return torch.cat([vector, last.unsqueeze(-1)], -1)


def distance_vectors(items: Factors, constant: float | None = None) -> Tensor:
    """[v, sqrt(c - |v|^2 - 2 b)] of a gallery's factors, (N, P + 1): a query [u, 0] is nearest to what scores highest.

    |u - v|^2 + c - |v|^2 - 2 b = |u|^2 + c - 2 (u.v + b). constant: c, `least_constant` or more, where a gallery comes
    in parts; None: that of these items. ValueError where it leaves the root of a negative.
    """
    lengths = items.vector.square().sum(-1) + 2 * items.offset
    room = (lengths.amax() if constant is None else constant) - lengths
    if bool((room < 0).any()):
        raise ValueError(
            f"an item wants the constant {float(lengths.max())}, and it is {constant}: make all vectors"
            " anew with a larger one"
        )
    return torch.cat([items.vector, room.sqrt().unsqueeze(-1)], -1)


def least_constant(items: Factors) -> float:
    """The least c of `distance_vectors`, the largest |v|^2 + 2 b of the gallery; of csd and unit means 1 - trace."""
    return float((items.vector.square().sum(-1) + 2 * items.offset).max())
