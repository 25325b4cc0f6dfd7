"""Any score and any loss over all pairs of all ranks: similarities tile by tile, gradients in the forward pass.

Every rank fills its block of similarities, own images with all texts, without a graph. The caller's loss on the whole
block gives dL/dS; then each tile is scored again, with a graph, for its part of dL/dS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from prolip.gaussian import kind_of, upcast, without_autocast
from prolip.losses.autograd import Evaluation, Group, differentiate, gather, rank_in, reduce_scatter, world_size
from prolip.losses.positives import Labels, Positives, check_matches

TILE = 256


def tiled_loss_over_ranks(
    score: Callable[[Any, Any], Tensor],
    images: Sequence[Tensor],
    texts: Sequence[Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    parameters: Sequence[Tensor] = (),
    labels: Labels = None,
    group: Group = None,
    tile: int = TILE,
) -> Tensor:
    """Compute this rank's share of a loss on the similarities of the global batch -> ().

    score(images, texts) -> (n, m): similarities of a tile's rows, or (C, n, m), C numbers of every pair. Must be
    deterministic: pass random numbers as rows, or draw them by `random.pair_noise` from places passed as rows.
    images, texts: Gaussians (B, D) of this rank, or tuples of tensors (B, ...); the score gets the same, cut along B,
    in float32 (float64 and integers stay).
    loss(similarity, positive) -> (): of (B, W B) similarities, or (C, B, W B), and (B, W B) booleans, own images with
    all texts. Image i matches its own text, in column rank B + i, and the known matches of `labels` on any rank.
    A loss that needs whole columns calls `transpose_over_ranks`: own texts with all images.
    parameters: all other tensors of score and loss with a gradient: scale, bias, the weights of a network.

    Value, gradients and duties of the ranks are as in `sigmoid_loss_over_ranks`. Runs without autocast; differentiable
    once. ValueError for a tensor that is not in `parameters` and would lose its gradient.
    """
    sides = check_side(images, "images"), check_side(texts, "texts")
    count = len(sides[0][0])
    if tile < 1 or count != len(sides[1][0]):
        got = f"got {count} images, {len(sides[1][0])} texts and tile={tile}"
        raise ValueError(f"{got}: give a text for each image, and tiles of 1 row or more")
    check_matches(labels, count)
    # A tile of a Gaussian is a Gaussian. The parameters stay the given tensors: score and loss may use them directly.
    kinds = [getattr(type(side), "_make", tuple) for side in (images, texts)]
    tiled = TiledLoss(lambda x, y: score(kinds[0](x), kinds[1](y)), loss, tuple(parameters), labels, group, tile)
    with without_autocast(sides[0][0].device):
        return differentiate(partial(tiled.evaluate, len(sides[0])), (*sides[0], *sides[1], *parameters))


class TiledLoss(NamedTuple):
    """The arguments of `tiled_loss_over_ranks` except the rows; the score takes the tensors of each side."""

    score: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    parameters: tuple[Tensor, ...]
    labels: Labels
    group: Group
    tile: int

    def evaluate(self, kinds: int, inputs: Sequence[Tensor], wanted: Sequence[bool]) -> Evaluation:
        """Return the loss, and the gradients that are needed. inputs: `kinds` images, texts, parameters."""
        texts = inputs[kinds : len(inputs) - len(self.parameters)]
        rows, columns = [x.detach() for x in inputs[:kinds]], [gather(x.detach(), self.group) for x in texts]
        similarity = self.fill(rows, columns)
        ids = () if self.labels is None else (self.labels.image, gather(self.labels.text, self.group))
        matrix = similarity if similarity.ndim == 2 else similarity[0]
        positive = Positives(rank_in(self.group) * len(matrix), *ids).mask(matrix)
        if not any(wanted):
            return self.value(similarity, positive, ()), (None,) * len(wanted)
        value, d_similarity, sums = self.differentiate(similarity, positive, wanted[len(rows) + len(columns) :])
        del similarity, matrix, positive
        sums = [x.new_zeros(x.shape) if need else None for x, need in zip((*rows, *columns), wanted)] + sums
        self.add_gradients(rows, columns, d_similarity, sums)
        for place in range(len(rows), len(rows) + len(columns)):
            if (whole := sums[place]) is not None:
                sums[place] = reduce_scatter(whole, self.group)
        return value, tuple(sums)

    def fill(self, rows: list[Tensor], columns: list[Tensor]) -> Tensor:
        """Compute all similarities (B, W B), or (C, B, W B)."""
        dtype = reduce(torch.promote_types, (x.dtype for x in (*rows, *columns)), torch.float32)
        similarity = None
        for i, j in self.tiles(rows, columns):
            part = self.score([x[i] for x in rows], [x[j] for x in columns])
            shape = len(rows[0][i]), len(columns[0][j])
            if part.shape[-2:] != shape or part.ndim not in (2, 3):
                want = f"expected {shape}: one number for each pair, or C, (C, n, m)"
                raise ValueError(f"the score of a tile is {tuple(part.shape)}, {want}")
            if similarity is None:
                similarity = rows[0].new_empty(*part.shape[:-2], len(rows[0]), len(columns[0]), dtype=dtype)
            similarity[..., i, j] = part
        assert similarity is not None  # there are rows
        return similarity

    def tiles(self, rows: list[Tensor], columns: list[Tensor]) -> Iterator[tuple[slice, slice]]:
        starts = (range(0, len(side[0]), self.tile) for side in (rows, columns))
        return ((slice(i, i + self.tile), slice(j, j + self.tile)) for i, j in product(*starts))

    def value(self, similarity: Tensor, positive: Tensor, listed: Sequence[Tensor]) -> Tensor:
        """Return the loss. Raises ValueError unless it is one number and depends on the listed tensors alone."""
        value = self.loss(similarity, positive)
        if value.shape != ():
            raise ValueError(f"the loss is {tuple(value.shape)}, expected one number, (): return its sum or mean")
        check_listed(value, listed)
        return value

    def differentiate(
        self, similarity: Tensor, positive: Tensor, wanted: Sequence[bool]
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Return the loss, dL/dS, and dL/d(parameter) if needed, None for the other parameters."""
        learned = [x for x, need in zip(self.parameters, wanted) if need]
        with torch.enable_grad():
            value = self.value(similarity.requires_grad_(), positive, (similarity, *learned))
            d_similarity, *found = torch.autograd.grad(
                value, (similarity, *learned), allow_unused=True, materialize_grads=True
            )
        gradients = iter(found)
        return value.detach(), d_similarity, [next(gradients).clone() if need else None for need in wanted]

    def add_gradients(
        self, rows: list[Tensor], columns: list[Tensor], d_similarity: Tensor, sums: list[Tensor | None]
    ) -> None:
        """Add sum_ij dL/dS_ij dS_ij/dx to the sums of rows, columns and parameters x that are not None, in place."""
        for i, j in self.tiles(rows, columns):
            cut = [i] * len(rows) + [j] * len(columns)
            leaves = [x[part].detach() for x, part in zip((*rows, *columns), cut)]
            inputs = [x.requires_grad_() for x, total in zip(leaves, sums) if total is not None]
            into = [total[part] for part, total in zip(cut, sums) if total is not None]
            inputs += [x for x, total in zip(self.parameters, sums[len(cut) :]) if total is not None]
            into += [total for total in sums[len(cut) :] if total is not None]
            with torch.enable_grad():
                part = self.score(leaves[: len(rows)], leaves[len(rows) :])
            check_listed(part, inputs)
            if not part.requires_grad:  # no tile does: only the loss has parameters
                return
            gradients = torch.autograd.grad(part, inputs, d_similarity[..., i, j], allow_unused=True)
            for total, gradient in zip(into, gradients):
                if gradient is not None:
                    total += gradient


def check_side(side: Sequence[Tensor], name: str) -> tuple[Tensor, ...]:
    """Return a side's tensors, floats as float32 or float64. Raises TypeError and ValueError unless (B, ...), B > 0."""
    if not isinstance(side, (tuple, list)) or not side or not all(isinstance(x, Tensor) for x in side):
        raise TypeError(f"{name} are {kind_of(side)}, expected a Gaussian or a tuple of tensors (B, ...), such as (x,)")
    shapes = [tuple(x.shape) for x in side]
    if len({shape[:1] for shape in shapes}) != 1 or not shapes[0] or not shapes[0][0]:
        raise ValueError(f"{name} have shapes {', '.join(map(str, shapes))}: give tensors (B, ...) of the same B > 0")
    return tuple(upcast(x) if x.is_floating_point() else x for x in side)


def check_listed(result: Tensor, listed: Sequence[Tensor]) -> None:
    """Raise ValueError if the result depends on an unlisted tensor that requires a gradient, which it would not get."""
    leaves = {id(x) for x in listed if x.is_leaf}
    seen = {x.grad_fn for x in listed if not x.is_leaf}
    nodes = [result.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in leaves:
            which = f"a tensor of shape {tuple(variable.shape)} that requires a gradient and is not in parameters"
            raise ValueError(f"score or loss reads {which}: add it there, or detach it")
        nodes += [following for following, _ in node.next_functions]


def dot_products(images: Sequence[Tensor], texts: Sequence[Tensor]) -> Tensor:
    """Return products of one tensor on either side, the cosines of unit vectors: ((n, D),), ((m, D),) -> (n, m)."""
    return images[0] @ texts[0].mT


def log_match_odds(x: Tensor, y: Tensor, scale: Tensor | float, bias: Tensor | float) -> Tensor:
    """Return log p / (1 - p) of PCME's match probability p, (2) and (3), of points: (n, J, D), (m, J', D) -> (n, m).

    p = mean over j, j' of sigmoid(l), l = b - a |x_j - y_j'|_2. As sigmoid(l) + sigmoid(-l) = 1, both p and 1 - p are
    means of sigmoids: the odds are a difference of two logsumexp, finite where p is 0 or 1. Memory n m J J'.
    """
    with without_autocast(x.device):
        distance = torch.cdist(x.flatten(0, 1), y.flatten(0, 1))
        logit = (bias - scale * distance).view(len(x), x.shape[1], len(y), y.shape[1])
    return F.logsigmoid(logit).logsumexp((1, 3)) - F.logsigmoid(-logit).logsumexp((1, 3))


def uniformity_over_ranks(points: Tensor, group: Group = None) -> Tensor:
    """Return log of the mean of exp(-2 |z - z'|^2) over all pairs of different points of all ranks, (n, D) -> ().

    Wang & Isola 2020, as in PCME's released code. Equal on all ranks, which must give equal numbers of points.
    """
    size, count = world_size(group), len(points)
    if size * count < 2:
        raise ValueError(f"{size * count} points have no pairs: give 2 or more")

    def total(exponent: Tensor, itself: Tensor) -> Tensor:
        own = exponent.masked_fill(itself, -torch.inf).flatten().logsumexp(0)
        whole = gather(own.detach().reshape(1), group).logsumexp(0)
        share = size * (own.detach() - whole).exp()  # the mean over ranks of share * own has the gradient of the whole
        return whole + share * (own - own.detach())

    def exponents(x: Sequence[Tensor], y: Sequence[Tensor]) -> Tensor:
        (p,), (q,) = x, y
        return -2 * (p.square().sum(1, keepdim=True) + q.square().sum(1) - 2 * p @ q.mT)

    log_sum = tiled_loss_over_ranks(exponents, (points,), (points,), total, group=group)
    return log_sum - math.log(size * count * (size * count - 1))
