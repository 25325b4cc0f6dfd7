"""A variational adapter on pairs: the product of two embeddings, a mixture of Gaussians of it, one number decoded."""
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prolip.gaussian import without_autocast


class PairNoise(NamedTuple):
    """What the samples of pairs are made of: normal (..., D) for all components or (..., K D), gumbel (..., K)."""

    normal: Tensor
    gumbel: Tensor


class Folded(NamedTuple):
    """What an adapter says of a pair without sampling, of the product s of its embeddings.

    h = relu(W s + b), logit = u relu(W' h + b') + c, log variance = r h + d.

    first: W (H, D), b (H,); second: W' (H, H), b' (H,); last: u (1, H), c (1,); spread: r (1, H), d (1,).
    """

    first: tuple[Tensor, Tensor]
    second: tuple[Tensor, Tensor]
    last: tuple[Tensor, Tensor]
    spread: tuple[Tensor, Tensor]


class SimilarityAdapter(nn.Module):
    """VACSR's encoder and decoder, section 3.1 and figure 2: both MLPs of two layers, between them K Gaussians.

    s = D v * t, whose mean is the cosine, of order 1 where v * t of unit vectors is of order 1/D; h = relu(W s + b);
    (mean_k, log_var_k) = linear in h, (D,) each; alpha = softmax of K numbers, the same for all pairs;
    logit = u . relu(U z + c) + e.
    """

    def __init__(self, dim: int, hidden: int, components: int = 2):
        super().__init__()
        self.dim, self.components = dim, components
        self.encode = nn.Linear(dim, hidden)
        self.mean = nn.Linear(hidden, components * dim)
        self.log_var = nn.Linear(hidden, components * dim)
        self.mix = nn.Parameter(torch.zeros(components))
        self.decode = nn.Linear(dim, hidden)
        self.out = nn.Linear(hidden, 1)
        nn.init.zeros_(self.log_var.bias)

    def forward(self, v: Tensor, t: Tensor, noise: PairNoise, temperature: float) -> Tensor:
        """Of all pairs of (n, D), (m, D), noise (n, m, ...): (3, n, m), in float32 or float64.

        The logit of z = `sample`; the divergence sum_k alpha_k KL(N_k || N(0, I)), (5), per dimension, as every VIB
        here; and log sigma^2 of the pair, the mean over the dimensions of sum_k w_k log_var_k.
        """
        with without_autocast(v.device):
            h = torch.relu(self.encode(self.dim * (v.unsqueeze(1) * t)))
            shape = *h.shape[:2], self.components, self.dim
            mean, log_var = self.mean(h).view(shape), self.log_var(h).view(shape)
            weight = ((F.log_softmax(self.mix, 0) + noise.gumbel.to(h.dtype)) / temperature).softmax(-1)
            sigma = (log_var / 2).exp()
            z = sample(weight, mean, sigma, noise.normal.to(h.dtype))
            logit = self.out(torch.relu(self.decode(z))).squeeze(-1)
            divergence = (mean.square() + sigma.square() - 1 - log_var).mean(-1) / 2 @ self.mix.softmax(0)
            return torch.stack([logit, divergence, (log_var.mean(-1) * weight).sum(-1)])

    def folded(self) -> Folded:
        """The decoder at E[z] = sum_k alpha_k mean_k, and sum_k alpha_k log_var_k, its mean over the dimensions.

        Both are linear in h, so the mean head and the first layer of the decoder are one matrix.
        """
        alpha = self.mix.softmax(0)
        mean, log_var = (
            [torch.einsum("k,k...->...", alpha, x.unflatten(0, (self.components, self.dim))) for x in
             (layer.weight, layer.bias)] for layer in (self.mean, self.log_var)
        )  # fmt: skip
        decode = self.decode.weight
        return Folded(
            (self.dim * self.encode.weight, self.encode.bias),
            (decode @ mean[0], decode @ mean[1] + self.decode.bias),
            (self.out.weight, self.out.bias),
            (log_var[0].mean(0, keepdim=True), log_var[1].mean(0, keepdim=True)),
        )


def sample(weight: Tensor, mean: Tensor, sigma: Tensor, normal: Tensor) -> Tensor:
    """z = sum_k w_k (mean_k + sigma_k normal_k), section 3.1: a sample of every component, mixed by the softmax w.

    weight (..., K); mean, sigma (..., K, D); normal (..., K D), or (..., D), which all components share. The variance
    of z given w is sum_k w_k^2 sigma_k^2, or (sum_k w_k sigma_k)^2 where normal is shared.
    """
    return mixed(weight, torch.addcmul(mean, sigma, normal.unflatten(-1, (-1, mean.shape[-1]))))


def mixed(weight: Tensor, x: Tensor) -> Tensor:
    """sum_k w_k x_k, (..., K), (..., K, D) -> (..., D)."""
    return (weight.unsqueeze(-2) @ x).squeeze(-2)


class PairNetwork(nn.Module):
    """`Folded`, of all pairs or of paired rows, in a bounded workspace.

    The first layer of an image with all texts is one matrix product, W (v_i * t_j) = (W diag v_i) t_j: there is no
    product of all pairs and dimensions.
    """

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.first, self.second = nn.Linear(dim, hidden), nn.Linear(hidden, hidden)
        self.last, self.spread = nn.Linear(hidden, 1), nn.Linear(hidden, 1)

    def fill(self, folded: Folded) -> None:
        """Take these weights."""
        with torch.no_grad():
            for layer, (weight, bias) in zip((self.first, self.second, self.last, self.spread), folded):
                layer.weight.copy_(weight)
                layer.bias.copy_(bias)

    @property
    def linear(self) -> Tensor:
        """u W' W, (D,): the weight of each product in the logit where every relu passes its argument."""
        return (self.last.weight @ self.second.weight @ self.first.weight).squeeze(0)

    def forward(self, v: Tensor, t: Tensor) -> Tensor:
        """The logit of all pairs, (n, D), (m, D) -> (n, m)."""
        out = v.new_empty(len(v), len(t))
        rows, columns = chunks(v.device, len(t))
        first, second, last = self.first, self.second, self.last
        with without_autocast(v.device):
            for i in range(0, len(v), rows):
                own = v[i : i + rows]
                weight = (own.unsqueeze(1) * first.weight.to(v)).flatten(0, 1)  # of each image its own, (rows H, D)
                for j in range(0, len(t), columns):
                    h = (weight @ t[j : j + columns].mT).view(len(own), len(first.weight), -1)
                    h = torch.relu_(h.add_(first.bias.to(v).unsqueeze(1)))
                    h = torch.relu_((second.weight.to(v) @ h).add_(second.bias.to(v).unsqueeze(1)))
                    out[i : i + rows, j : j + columns] = (last.weight.to(v) @ h).squeeze(1) + last.bias.to(v)
        return out

    def paired(self, v: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The logit and log sigma^2 of each pair of rows, (N, D), (N, D) -> (N,), (N,)."""
        found = []
        rows = math.prod(chunks(v.device, 1024))
        with without_autocast(v.device):
            for own, other in zip(v.split(rows), t.split(rows)):
                layers = [(x.weight.to(v), x.bias.to(v)) for x in (self.first, self.second, self.last, self.spread)]
                h = torch.relu_(F.linear(own * other, *layers[0]))
                logit = F.linear(torch.relu_(F.linear(h, *layers[1])), *layers[2])
                found.append(torch.cat([logit, F.linear(h, *layers[3])], 1))
        logit, log_var = torch.cat(found).unbind(1) if found else v.new_empty(2, 0).unbind(0)
        return logit, log_var


def chunks(device: torch.device, gallery: int) -> tuple[int, int]:
    """Images and texts at a time, whose hidden values stay in a core's cache on CPU and fill a device on one."""
    columns = max(1, min(gallery, 1024))
    pairs = 1 << 12 if device.type == "cpu" else 1 << 17
    return max(1, pairs // columns), columns
