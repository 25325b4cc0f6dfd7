"""Random numbers of pairs that no one keeps: functions of (seed, row, column), drawn again wherever a pair comes up."""
from __future__ import annotations

import math

import torch
from torch import Tensor

#: The increment and the multipliers of splitmix64 (Steele et al. 2014), as signed 64-bit numbers.
STEP, FIRST, SECOND = (x - (1 << 64) for x in (0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB))


def pair_noise(seed: int, rows: Tensor, columns: Tensor, normals: int, gumbels: int) -> tuple[Tensor, Tensor]:
    """Standard normal and standard Gumbel numbers of every pair of a tile: (n, m, normals), (n, m, gumbels), float32.

    rows (n,), columns (m,): int64, places of the tile in the whole matrix. All numbers are independent, those of pairs
    of one row, too, which noise by row and by column would not be; a pair has the same ones in every tile and on every
    rank, without a host sync. A 64-bit counter of each pair, which two rounds of splitmix64 place, gives two uniform
    32-bit numbers at a time, Box and Muller make them normal, up to 6.6 sigma.
    """
    words = (normals + 1) // 2 + (gumbels + 1) // 2
    counters = torch.arange(1, words + 1, device=rows.device) * STEP
    pairs = splitmix(splitmix(rows.unsqueeze(1) * STEP + seed) + (columns + 1) * STEP)
    drawn = splitmix(pairs.unsqueeze(2) + counters).view(torch.int32)  # (n, m, 2 words), all 32-bit numbers
    split = 2 * ((normals + 1) // 2)
    return normal(drawn[..., :split])[..., :normals], gumbel(drawn[..., split:])[..., :gumbels]


def splitmix(x: Tensor) -> Tensor:
    """The output function of splitmix64 on int64, in place: bijective, and any bit of x changes half of the bits."""
    shifted = torch.empty_like(x)
    for shift, factor in ((30, FIRST), (27, SECOND), (31, None)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        x ^= shifted.bitwise_and_((1 << (64 - shift)) - 1)  # torch shifts the sign in, splitmix64 zeros
        if factor is not None:
            x *= factor
    return x


def uniform(words: Tensor) -> Tensor:
    """Numbers in (0, 1], float32, of int32: (|i| + 1/2) / 2^31, small ones of small i, which float32 holds exactly."""
    return words.float().abs_().add_(0.5).mul_(2.0**-31)


def normal(words: Tensor) -> Tensor:
    """Standard normal numbers of uniform int32 (..., 2 N): sqrt(-2 log u) of cos and sin 2 pi u'."""
    first, second = words[..., 0::2], words[..., 1::2]
    radius = uniform(first).log_().mul_(-2).sqrt_()
    angle = second.float().mul_(2 * math.pi * 2.0**-32)
    return torch.cat([angle.cos().mul_(radius), angle.sin_().mul_(radius)], -1)


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel numbers, -log(-log u), of uniform int32; u at most 1 - 2^-24, the float below 1."""
    return uniform(words).clamp_(max=1 - 2.0**-24).log_().neg_().log_().neg_()
