"""Novelty: how far an input is from what the model was trained on, which no variance of its embedding says.

A distance at each depth of a tower, and what it means: the information -log p, in nats, of "only a share p of new
inputs of the training's kind is further". 0.7 nats: half of them are; 4.6 nats: 1 in 100. The shares come from training
inputs that were held out of the fit in turns, as the distances of those that took part are too small.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prolip.gaussian import upcast, without_autocast
from prolip.uncertainty.hidden import Hidden

#: Distances that a reference keeps, up to the one that the share TAIL of new own inputs exceeds.
KNOTS, TAIL = 64, 0.1
#: Rows of the nearest neighbours that `Disagreement` asks.
NEIGHBOURS = 20
#: What is added to the variance of each direction, as a share of the mean variance.
SHRINK = 1e-2
#: Rows that a novelty is fitted to, a sample where there are more.
SAMPLE = 16384
#: Rounds of k-means, where no classes are known.
ROUNDS = 10
#: Random parts that are held out in turns, where none are given.
FOLDS = 5
BLOCK = 4096
#: Numbers that torch takes quantiles of, at most.
MOST = 1 << 23


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a novelty looks at: widths of a `Hidden`'s parts, 0: not at that.

    centres: classes that are kept of each; rank: directions that are kept of each.
    """

    mean: int
    pooled: int = 0
    first: int = 0
    centres: int = 512
    rank: int = 256

    def __post_init__(self) -> None:
        if min(self.mean, self.pooled, self.first) < 0 or not self.depths:
            raise ValueError(f"{self} looks at nothing: give the width of mean, pooled or first")
        if min(self.centres, self.rank) < 1:
            raise ValueError(f"{self}: centres and rank are 1 or more")

    @property
    def depths(self) -> dict[str, int]:
        """Width of every depth that is looked at."""
        return {name: width for name in Hidden._fields if (width := getattr(self, name))}


class Distance(nn.Module):
    """min_c |W'z - c|^2 - |B'z|^2 + (D - R) |x - m - V z|^2 / e,  z = V'(x - m).

    The relative Mahalanobis distance (Ren et al. 2021, arXiv 2106.09022) in the R main directions V of D, W and B
    whiten what classes vary by within and what all inputs vary by, c are the classes' means; and the energy in the
    other directions over its mean e, of which all counts, as there no class is known (probabilistic PCA).
    """

    middle: Tensor
    basis: Tensor
    within: Tensor
    background: Tensor
    centres: Tensor
    missing: Tensor
    rest: Tensor

    def __init__(self, width: int, centres: int, rank: int):
        super().__init__()
        rank = min(rank, width)
        shapes = {
            "middle": (width,), "basis": (width, rank), "within": (rank, rank), "background": (rank, rank),
            "centres": (centres, rank), "missing": (centres,), "rest": (),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, D) -> (B,) float32."""
        x = upcast(x.detach()) - self.middle
        with without_autocast(x.device):
            main = x @ self.basis
            near = main @ self.within
            squared = near.square().sum(1, keepdim=True) - 2 * near @ self.centres.T + self.centres.square().sum(1)
            other = (x - main @ self.basis.T).square().sum(1)
            return (squared + self.missing).amin(1) - (main @ self.background).square().sum(1) + self.rest * other


class Reference(nn.Module):
    """-log of the share of new own inputs with a larger number, in nats: quantiles, beyond them an exponential tail.

    A number below all has 0 nats; above all it has as many as the tail says, so that far and further stay apart.
    """

    knots: Tensor
    excess: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("knots", torch.linspace(0, 1, KNOTS))
        self.register_buffer("excess", torch.ones(()))

    def fit(self, numbers: Tensor) -> Reference:
        """Take the numbers (N,) of held-out inputs as those of new ones. ValueError for fewer than 20 or one value."""
        numbers = numbers.double()
        if numbers.ndim != 1 or len(numbers) < 2 / TAIL or not numbers.isfinite().all():
            raise ValueError(f"a reference takes {2 / TAIL:.0f} finite numbers or more, (N,), got"
                             f" {tuple(numbers.shape)}")
        levels = torch.linspace(0, 1 - TAIL, KNOTS, dtype=torch.float64, device=numbers.device)
        knots = numbers[:: 1 + len(numbers) // MOST].quantile(levels)
        beyond = numbers[numbers > knots[-1]] - knots[-1]
        if not len(beyond):
            raise ValueError("the numbers of new inputs have no tail: more than a tenth of them are the largest")
        self.knots.copy_(knots)
        self.excess.copy_(beyond.mean())
        return self

    def forward(self, numbers: Tensor) -> Tensor:
        """(...,) -> nats (...,), which rise with the number."""
        numbers = upcast(numbers.detach())
        above = torch.searchsorted(self.knots, numbers.contiguous()).clamp(1, KNOTS - 1)
        low, high = self.knots[above - 1], self.knots[above]
        part = ((numbers - low) / (high - low).clamp(min=torch.finfo(low.dtype).tiny)).clamp(0, 1)
        share = 1 - (1 - TAIL) * (above - 1 + part) / (KNOTS - 1)
        return (numbers - self.knots[-1]).clamp(min=0) / self.excess - share.log()


class Novelty(nn.Module):
    """How new an input is at every depth that the parts name, in nats.

    `first` tells what is foreign: photographs, noise, blank pictures among drawings. `mean` tells what is unfamiliar:
    which answers are wrong. They stay two numbers, as the larger of both does either worse.
    """

    def __init__(self, parts: Parts):
        super().__init__()
        self.parts = parts
        self.distances = nn.ModuleDict({
            name: Distance(width, parts.centres, parts.rank) for name, width in parts.depths.items()
        })  # fmt: skip
        self.references = nn.ModuleDict({name: Reference() for name in parts.depths})

    def forward(self, hidden: Hidden) -> dict[str, Tensor]:
        """A batch as `encode_hidden` gives it -> nats of every depth by its name, (B,) each. ValueError for others."""
        found = {}
        for name, width in self.parts.depths.items():
            x = getattr(hidden, name)
            if x.ndim != 2 or x.shape[1] != width:
                raise ValueError(f"{name} is {tuple(x.shape)}, this novelty was made for (B, {width})")
            found[name] = self.references[name](self.distances[name](x))
        return found


class Refusal(nn.Module):
    """Nats against an answer: the sum of -log p over what speaks against it (Fisher 1925 on combined tests, section
    21.1), where p is the share of own inputs of which the same says more.

    The score of the answer, the ambiguity of the input and its novelty at every depth, all with the same weight.
    """

    def __init__(self):
        super().__init__()
        self.score, self.ambiguity = Reference(), Reference()

    def forward(self, score: Tensor, ambiguity: Tensor, novelty: Mapping[str, Tensor]) -> Tensor:
        """Score of each answer and ambiguity of its input (B,), a `Novelty`'s nats -> (B,); more: refuse earlier."""
        return self.score(-score) + self.ambiguity(ambiguity) + torch.stack(list(novelty.values())).sum(0)


def fit_refusal(score: Tensor, ambiguity: Tensor) -> Refusal:
    """What is usual: best scores and ambiguities (N,) of own inputs, augmented as in training where they were trained
    on, as those of the plain ones are too good. Raises ValueError for too few.
    """
    found = Refusal().to(score.device)
    found.score.fit(-score)
    found.ambiguity.fit(ambiguity)
    return found


class Disagreement(nn.Module):
    """Nats of the classes of the NEIGHBOURS nearest inputs of a bank, -sum_c p_c log p_c: what the neighbourhood of a
    mean leaves open. It tells whether a nearest neighbour can be trusted, which no distance to the training data does.
    """

    bank: Tensor
    classes: Tensor

    def __init__(self, dim: int, rows: int):
        super().__init__()
        self.register_buffer("bank", torch.zeros(rows, dim))
        self.register_buffer("classes", torch.zeros(rows, dtype=torch.int64))

    def forward(self, mean: Tensor) -> Tensor:
        """Unit means (B, D) -> (B,)."""
        mean = upcast(mean.detach())
        with without_autocast(mean.device):
            near = (mean @ self.bank.T).topk(min(NEIGHBOURS, len(self.bank)), dim=1).indices
        share = nn.functional.one_hot(self.classes[near]).float().mean(1)
        return torch.special.entr(share).sum(1)


def fit_disagreement(mean: Tensor, classes: Tensor, most: int = 4096, seed: int = 0) -> Disagreement:
    """The bank of at most `most` of the unit means (N, D) with their classes (N,), a sample where there are more."""
    if classes.shape != mean.shape[:1] or classes.dtype != torch.int64:
        raise ValueError(f"classes are {classes.dtype} {tuple(classes.shape)}, want ({len(mean)},) int64")
    order = torch.randperm(len(mean), generator=torch.Generator().manual_seed(seed))
    chosen = order[:most].sort().values.to(mean.device)
    found = Disagreement(mean.shape[1], len(chosen)).to(mean.device)
    found.bank.copy_(mean[chosen])
    found.classes.copy_(classes.unique(return_inverse=True)[1][chosen])
    return found


def fit_novelty(
    hidden: Hidden, parts: Parts, classes: Tensor | None = None, folds: Tensor | None = None, seed: int = 0
) -> Novelty:
    """The novelty of inputs of the kind of these N, in closed formulas.

    classes: (N,) int64, which of them show the same, for instance have the same text. The first tokens know nothing of
    it: there, and without classes, those of k-means.
    folds: (N,) int64, what a new input has not in common with any training input, such as its designer: each is held
    out of a fit in turn; five random parts without. Raises ValueError for what does not fit.
    """
    classes, folds = _checked(hidden, parts, classes, folds, seed)
    rows = torch.randperm(len(folds), generator=torch.Generator().manual_seed(seed))[:SAMPLE].sort().values
    folds = folds[rows]
    model = Novelty(parts).to(hidden.mean.device)
    for name in parts.depths:
        x = upcast(getattr(hidden, name)[rows].detach())
        # Clusters are found once for all folds: their means are taken without what is held out.
        kinds = cluster(x, _how_many(x, parts), seed) if classes is None or name == "first" else classes[rows]
        apart = x.new_zeros(len(x))
        for fold in folds.unique():
            inside, outside = folds == fold, folds != fold
            distance = fit_distance(x[outside], parts, kinds[outside])
            apart[inside] = torch.cat([distance(y) for y in x[inside].split(BLOCK)])
        model.references[name] = Reference().to(x.device).fit(apart)
        model.distances[name] = fit_distance(x, parts, kinds)
    return model


def fit_distance(x: Tensor, parts: Parts, classes: Tensor) -> Distance:
    """The distance from features (N, D) that fall into classes (N,), of which the largest are kept."""
    classes, kept = _largest(classes, parts.centres)
    distance = Distance(x.shape[1], parts.centres, parts.rank).to(x.device)
    middle, rank = x.mean(0), distance.within.shape[1]
    means = class_means(x, classes, kept) - middle
    whole = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64, device=x.device)
    for y in x.split(BLOCK):
        whole += ((y - middle).T @ (y - middle)).double()
    variance, basis = torch.linalg.eigh(whole / len(x))
    shrink = SHRINK * variance.mean()
    variance, basis = variance.flip(0), basis.flip(1)[:, :rank].float()
    within = torch.zeros(rank, rank, dtype=torch.float64, device=x.device)
    for y, c in zip(x.split(BLOCK), classes.split(BLOCK)):
        z = (y - middle - means[c])[c >= 0] @ basis
        within += (z.T @ z).double()
    distance.middle.copy_(middle)
    distance.basis.copy_(basis)
    distance.background.copy_(torch.diag((variance[:rank] + shrink).rsqrt()))
    free = ((classes >= 0).sum() - kept).clamp(min=1)  # each mean has taken a row's freedom
    distance.within.copy_(_whiten(within / free, shrink))
    distance.centres[:kept] = means @ basis @ distance.within
    distance.missing[kept:] = torch.inf
    distance.rest.copy_(1 / (variance[rank:].mean() + shrink) if rank < len(variance) else variance.new_zeros(()))
    return distance


def cluster(x: Tensor, count: int, seed: int = 0) -> Tensor:
    """Classes of features (N, D) by k-means, (N,) int64: ROUNDS rounds from rows that the seed draws."""
    centres = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:count].to(x.device)]
    for _ in range(ROUNDS):
        nearest = _nearest(x, centres)
        filled = torch.bincount(nearest, minlength=count).unsqueeze(1) > 0
        centres = torch.where(filled, class_means(x, nearest, count), centres)
    return _nearest(x, centres)


def class_means(x: Tensor, classes: Tensor, count: int) -> Tensor:
    """Mean of the rows (N, D) of each of `count` classes (N,), (count, D); 0 for one without; below 0: of none."""
    total, size = x.new_zeros(count, x.shape[1]), x.new_zeros(count)
    for y, c in zip(x.split(BLOCK), classes.split(BLOCK)):
        total.index_add_(0, c[c >= 0], y[c >= 0])
        size += torch.bincount(c[c >= 0], minlength=count)
    return total / size.clamp(min=1).unsqueeze(1)


def _how_many(x: Tensor, parts: Parts) -> int:
    """Clusters of rows (N, D): as many as are kept, of four rows or more on average."""
    return min(parts.centres, max(1, len(x) // 4))


def _nearest(x: Tensor, centres: Tensor) -> Tensor:
    """Row of the nearest centre of each row, (N,)."""
    return torch.cat([(2 * y @ centres.T - centres.square().sum(1)).argmax(1) for y in x.split(BLOCK)])


def _largest(classes: Tensor, most: int) -> tuple[Tensor, int]:
    """Classes (N,) numbered from 0, the `most` with most rows; -1 for the others; and how many there are."""
    _, classes, size = classes.unique(return_inverse=True, return_counts=True)
    order = size.argsort(descending=True, stable=True)
    number = torch.full_like(size, -1)
    number[order[:most]] = torch.arange(min(most, len(size)), device=size.device)
    return number[classes], min(most, len(size))


def _whiten(covariance: Tensor, shrink: Tensor) -> Tensor:
    """W with W W' = (covariance + shrink)^-1, (R, R) float64."""
    regular = covariance + shrink * torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    factor = torch.linalg.cholesky(regular)
    return torch.linalg.solve_triangular(factor, torch.eye(len(factor)).to(factor), upper=False).T


def _checked(
    hidden: Hidden, parts: Parts, classes: Tensor | None, folds: Tensor | None, seed: int
) -> tuple[Tensor | None, Tensor]:
    """Classes and folds of the rows, once they fit."""
    count = len(hidden.mean)
    for name, width in parts.depths.items():
        x = getattr(hidden, name)
        if x.ndim != 2 or x.shape[1] != width or len(x) != count:
            raise ValueError(f"{name} is {tuple(x.shape)}, want ({count}, {width}), as `mean` and the parts say")
        if broken := sum(int((~y.isfinite().all(1)).sum()) for y in x.split(BLOCK)):
            raise ValueError(f"{broken} rows of {name} are not finite: leave them out")
    if folds is None:
        folds = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).to(hidden.mean.device) % FOLDS
    for name, x in (("classes", classes), ("folds", folds)):
        if x is not None and (x.shape != (count,) or x.dtype != torch.int64):
            raise ValueError(f"{name} are {x.dtype} {tuple(x.shape)}, want ({count},) int64")
    if len(folds.unique()) < 2:
        raise ValueError("all rows are in one fold: give two or more, each is held out in turn")
    return classes, folds
