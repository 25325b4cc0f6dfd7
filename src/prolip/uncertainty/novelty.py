"""Novelty: distance of an input from the training data, which no variance of its embedding shows.

A distance at one end of a tower becomes -log p nats: only a share p of new training-like inputs is farther away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from prolip.gaussian import upcast, without_autocast
from prolip.scores import Side
from prolip.uncertainty.token_stats import Encoded, encode_with_stats, innermost

KNOTS, TAIL = 64, 0.1  # quantiles of a reference, up to the one exceeded by a share TAIL of new familiar inputs
FEWEST = 20  # fewest distances for a reference
SHRINK = 1e-2  # addition to the variance of each direction, as a share of the mean variance
SAMPLE, FOLDS = 8192, 5  # most rows of a fit (a sample of more); folds held out in turn
ROUNDS, ROWS = 10, 4  # rounds of k-means; fewest rows of a class on average
BLOCK = 1024
ODDS = 10  # prior odds that an input is familiar
MOST = 1 << 23  # most numbers for torch's quantiles


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Sizes of a novelty."""

    mean: int  # width of the means
    first: int  # width of the token statistics
    centres: int = 512  # classes at either end
    rank: int = 256  # directions at either end

    @property
    def depths(self) -> dict[str, int]:
        return {"mean": self.mean, "first": self.first}


class Distance(nn.Module):
    """min_c |W'z - c|^2 - |b z|^2 + (D - R) |x - m - V z|^2 / e,  z = V'(x - m).

    The relative Mahalanobis distance (Ren et al. 2021, arXiv 2106.09022) in the R main directions V of D: W and b
    whiten the variance within classes and that of all inputs, c are the class means. The last term is the energy in the
    other directions over its mean e (probabilistic PCA).
    """

    if TYPE_CHECKING:  # buffers are tensors

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, width: int, centres: int, rank: int):
        super().__init__()
        rank = min(rank, width)
        shapes: dict[str, tuple[int, ...]] = {"middle": (width,), "basis": (width, rank), "within": (rank, rank)}
        shapes |= {"background": (rank,), "centres": (centres, rank), "rest": ()}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        """Return distances (B,) of features (B, D), float32."""
        x = upcast(x.detach()) - self.middle
        with without_autocast(x.device):
            main = x @ self.basis
            near = main @ self.within
            squared = near.square().sum(1, keepdim=True) - 2 * near @ self.centres.T + self.centres.square().sum(1)
            other = (x - main @ self.basis.T).square().sum(1)
            return squared.amin(1) - (main * self.background).square().sum(1) + self.rest * other


class DegenerateFeatures(ValueError):
    """Error for inputs too similar to estimate a tail of distances."""


class Reference(nn.Module):
    """Distance -> -log P(a held-out familiar input is farther), in nats: quantiles, then an exponential tail."""

    knots: Tensor
    excess: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("knots", torch.linspace(0, 1, KNOTS))
        #: Mean excess of numbers over the last knot; 0: not fitted.
        self.register_buffer("excess", torch.zeros(()))

    def fit(self, numbers: Tensor) -> Reference:
        """Fit to the numbers (N,) of held-out inputs. ValueError for fewer than FEWEST; `DegenerateFeatures`."""
        numbers = numbers.double()
        if numbers.ndim != 1 or len(numbers) < FEWEST or not numbers.isfinite().all():
            raise ValueError(f"a reference needs {FEWEST} or more finite numbers (N,), got {tuple(numbers.shape)}")
        levels = torch.linspace(0, 1 - TAIL, KNOTS, dtype=torch.float64, device=numbers.device)
        knots = numbers[:: 1 + len(numbers) // MOST].quantile(levels)
        beyond = numbers[numbers > knots[-1]] - knots[-1]
        if not len(beyond):
            raise DegenerateFeatures("the distances have no tail: more than a tenth are the largest")
        self.knots.copy_(knots)
        self.excess.copy_(beyond.mean())
        return self

    def forward(self, numbers: Tensor) -> Tensor:
        """Map (...,) to nats (...,), which rise with the number."""
        numbers = upcast(numbers.detach())
        above = torch.searchsorted(self.knots, numbers.contiguous()).clamp(1, KNOTS - 1)
        low, high = self.knots[above - 1], self.knots[above]
        part = ((numbers - low) / (high - low).clamp(min=torch.finfo(low.dtype).tiny)).clamp(0, 1)
        share = 1 - (1 - TAIL) * (above - 1 + part) / (KNOTS - 1)
        return (numbers - self.knots[-1]).clamp(min=0) / self.excess - share.log()


class Novelty(nn.Module):
    """Novelty of an image or a text at both ends of its tower, in nats; buffers only, 3.7 MB for a ViT-B's images.

    `first`, at the first tokens, detects foreign inputs: photographs, noise, unknown words. `mean`, at the embedding,
    detects unfamiliar ones, whose answers are often wrong.
    """

    def __init__(self, widths: Widths):
        super().__init__()
        self.widths = widths
        self.distances = nn.ModuleDict(
            {name: Distance(width, widths.centres, widths.rank) for name, width in widths.depths.items()}
        )
        self.references = nn.ModuleDict({name: Reference() for name in widths.depths})

    @property
    def fitted(self) -> bool:
        return all(bool(x > 0) for name, x in self.references.named_buffers() if name.endswith("excess"))

    def forward(self, hidden: Encoded) -> dict[str, Tensor]:
        """Return nats of both ends by name, (B,) each, for a batch of `encode_hidden`. ValueError for another width."""
        found = {}
        for name, x in (("mean", hidden.z.mean), ("first", hidden.token_stats)):
            check_width(name, x, self.widths.depths[name], "but this novelty needs")
            found[name] = self.references[name](self.distances[name](x))
        return found


def novelty_of(model: nn.Module, batch: Tensor, side: Side = "image") -> dict[str, Tensor]:
    """Return the novelty of a batch of pixels (B, 3, H, W), or of token ids (B, L) as the side "text": nats at the
    `first` tokens and at the `mean`, (B,) each.
    """
    novelty = fitted_novelty(model, side)
    if novelty is None:
        remedy = f"fit it with prolip uncertainty, to any model with a {side} tower of OpenCLIP's or ours"
        raise ValueError(f"this model has no novelty of {side}s: {remedy}")
    return novelty(encode_with_stats(model, batch, side))


def fitted_novelty(model: nn.Module, side: Side = "image") -> Novelty | None:
    """Return the fitted novelty of a model or its wrapper, or None."""
    name = "novelty" if side == "image" else "text_novelty"
    found = [getattr(part, name, None) for part in (model, innermost(model))]
    return next((part for part in found if isinstance(part, Novelty) and part.fitted), None)


def refusal(code_length: Tensor, novelty: Mapping[str, Tensor]) -> Tensor:
    """Return -log P(the input is familiar and the answer right), in nats; refuse inputs with the largest.

    code_length: -log p(answer) among the candidates for a familiar input (`Units.code_length`), (B,); novelty: a
    `Novelty`'s nats h, (B,) each. At prior odds of ODDS to 1 that an input is familiar, -log P(it is) =
    log(1 + e^h / ODDS).
    """
    strange = [softplus(upcast(h) - math.log(ODDS)) for h in novelty.values()]
    return upcast(code_length) + torch.stack(strange).sum(0)


def fit_novelty(mean: Tensor, first: Tensor, widths: Widths, classes: Tensor | None = None, seed: int = 0) -> Novelty:
    """Fit the novelty of inputs unlike these N, from their unit means (N, D) and token statistics (N, 2 W), on the CPU.

    classes: (N,) int64, equal for inputs that show the same, for instance with the same text, below 0: unknown. k-means
    makes the classes at the first tokens, and where some are unknown, too many or too small.
    """
    for name, x in (("mean", mean), ("first", first)):
        check_width(name, x, widths.depths[name], "but the widths need")
        if broken := sum(int((~y.isfinite().all(1)).sum()) for y in x.split(BLOCK)):
            raise ValueError(f"{broken} rows of {name} are not finite: remove them")
    if len(first) != len(mean) or classes is not None and classes.shape != mean.shape[:1]:
        counts = [len(x) for x in (mean, first, classes) if x is not None]
        raise ValueError(f"{counts} means, rows of first tokens and classes differ: give one of each per input")
    random = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(mean), generator=random)[:SAMPLE].sort().values
    folds = torch.randperm(len(rows), generator=random) % FOLDS
    model = Novelty(widths)
    with without_autocast(mean.device):
        for name, whole in (("mean", mean), ("first", first)):
            x = whole[rows].detach()  # in its own dtype: functions convert one block at a time to float32
            main = principal(x, widths.rank)
            kinds = classes[rows] if classes is not None and name == "mean" else None
            most = min(widths.centres, max(1, len(x) // ROWS))  # classes of ROWS rows or more on average
            if kinds is None or kinds.amin() < 0 or len(kinds.unique()) > most:
                # One clustering serves all folds; the class means exclude the held-out rows.
                kinds = cluster(reduce_features(x, main), most, seed)
            model.references[name] = Reference().fit(held_out(x, kinds, folds, widths))
            model.distances[name] = fit_distance(x, main, kinds, widths.centres)
    return model


def held_out(x: Tensor, classes: Tensor, folds: Tensor, widths: Widths) -> Tensor:
    """Return the distance of every row (N, D) from a fit without its fold (N,), (N,)."""
    apart = torch.zeros(len(x))
    for fold in folds.unique():
        inside, y = folds == fold, x[folds != fold]
        distance = fit_distance(y, principal(y, widths.rank), classes[folds != fold], widths.centres)
        apart[inside] = torch.cat([distance(z) for z in x[inside].split(BLOCK)])
    return apart


class Principal(NamedTuple):
    """Main directions of features: their mean (D,), the directions (D, R), the variances of all D, largest first."""

    middle: Tensor
    basis: Tensor
    variance: Tensor


def principal(x: Tensor, rank: int) -> Principal:
    """Find the `rank` main directions of features (N, D). `DegenerateFeatures` where they differ by rounding alone."""
    middle = x.mean(0, dtype=torch.float32)
    whole = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64)
    for y in x.split(BLOCK):
        apart = upcast(y) - middle
        whole += apart.T @ apart
    rounding = 8 * torch.finfo(torch.float32).eps * middle.norm()
    if not whole.trace() > len(x) * rounding**2:
        raise DegenerateFeatures("all inputs are equal: give different ones")
    covariance = whole.div_(len(x)).float()
    del whole  # frees the largest tensor
    variance, basis = torch.linalg.eigh(covariance)
    return Principal(middle, basis.flip(1)[:, :rank], variance.flip(0))


def reduce_features(x: Tensor, main: Principal) -> Tensor:
    return torch.cat([(upcast(y) - main.middle) @ main.basis for y in x.split(BLOCK)])


def fit_distance(x: Tensor, main: Principal, classes: Tensor, most: int) -> Distance:
    """Fit the distance to features (N, D) by their main directions and the `most` largest classes (N,)."""
    _, numbered, size = classes.unique(return_inverse=True, return_counts=True)
    number, kept = torch.full_like(size, -1), min(most, len(size))
    number[size.argsort(descending=True, stable=True)[:most]] = torch.arange(kept)
    classes = number[numbered]  # from 0; -1 for smaller classes
    rank, shrink = main.basis.shape[1], SHRINK * main.variance.mean()
    distance = Distance(x.shape[1], most, rank)
    z = reduce_features(x, main)
    means = class_means(z, classes, kept)
    inside = (z - means[classes])[classes >= 0]
    free = max(len(inside) - kept, 1)  # degrees of freedom
    distance.middle.copy_(main.middle)
    distance.basis.copy_(main.basis)
    distance.background.copy_((main.variance[:rank] + shrink).rsqrt())
    covariance, eye = (inside.T @ inside).double() / free, torch.eye(rank, dtype=torch.float64)
    lower = torch.linalg.cholesky(covariance + shrink * eye)
    distance.within.copy_(torch.linalg.solve_triangular(lower, eye, upper=False).T)  # w W' = (covariance + shrink)^-1
    distance.centres[:kept] = means @ distance.within
    distance.centres[kept:] = distance.centres[0]  # unused rows
    if rank < len(main.variance):
        distance.rest.copy_(1 / (main.variance[rank:].mean() + shrink))
    return distance


def cluster(x: Tensor, count: int, seed: int = 0) -> Tensor:
    """Cluster features (N, D) by k-means, (N,) int64: ROUNDS rounds from random rows."""
    centres = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:count]]
    for _ in range(ROUNDS + 1):
        parts = [(2 * y @ centres.T - centres.square().sum(1)).argmax(1) for y in x.split(BLOCK)]
        nearest = torch.cat(parts)
        filled = torch.bincount(nearest, minlength=count).unsqueeze(1) > 0
        centres = torch.where(filled, class_means(x, nearest, count), centres)
    return nearest


def class_means(x: Tensor, classes: Tensor, count: int) -> Tensor:
    """Return the mean of the rows (N, D) of each of `count` classes (N,), (count, D); 0 without rows; < 0: no class."""
    own = classes >= 0
    total = x.new_zeros(count, x.shape[1]).index_add_(0, classes[own], x[own])
    return total / torch.bincount(classes[own], minlength=count).clamp(min=1).unsqueeze(1)


def check_width(name: str, x: Any, width: int, who: str) -> None:
    """Raise ValueError unless x is a batch (B, width)."""
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] != width:
        found = tuple(x.shape) if isinstance(x, Tensor) else x
        raise ValueError(f"{name} is {found}, {who} (B, {width})")
