"""Random numbers of a training step: functions of (seed, stream, step, row, column), drawn where they are used.

Each is a counter hashed by splitmix64, so no device waits, and a rank draws only its own rows. Integers and uniform
numbers have the same bits on every device and for any number of ranks; normal ones rarely differ, by a last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum, unique

import torch
from torch import Tensor

#: Increment and multipliers of splitmix64 (Steele et al. 2014), as signed 64-bit numbers.
STEP, FIRST, SECOND = (x - (1 << 64) for x in (0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB))
_WORD = 0xFFFF_FFFF_FFFF_FFFF
#: Versions of the drawn numbers, the current one last. A resumed run keeps the version of its first step.
VERSIONS = (1, 2)


@unique
class Stream(IntEnum):
    """The uses of random numbers in a step; separate streams keep them independent."""

    IMAGE_MASK = 1
    TEXT_MASK = 2
    AUGMENT = 3
    CUTOUT = 4
    TOKENS = 5
    ERASE = 6
    MIX = 11
    CUT = 12
    IMAGE_SIZE = 13
    TEXT_SIZE = 14
    PSEUDO_PAIR = 21
    IMAGE_SAMPLE = 22
    TEXT_SAMPLE = 23
    PAIR_NOISE = 31


@dataclass(kw_only=True)
class Draws:
    """The random numbers of one rank. Its row i is row i * world_size + rank of the global batch."""

    seed: int = 0
    rank: int = 0
    world_size: int = 1
    version: int = VERSIONS[-1]

    def rows(self, count: int, device: torch.device | str) -> Tensor:
        """Return the global rows of this rank's first `count` rows, (count,) int64 on `device`."""
        place = torch.arange(count, device=device)
        return place + self.rank * count if self.version == 1 else place * self.world_size + self.rank

    def key(self, stream: Stream, step: int) -> int:
        """Return the number that stands for (seed, stream, step), 63 bits."""
        return mix_seed(self.seed, step, stream)

    def uniform(self, stream: Stream, step: int, rows: Tensor, columns: int) -> Tensor:
        """Return uniform multiples of 2^-24 in [0, 1) of these global rows: (n,) int64 -> (n, columns) float32."""
        if self.version == 1:
            # the generator of `rows`' device draws for all ranks; SizeAugment's numbers come from the global generator
            count, device = len(rows), rows.device
            if stream in (Stream.IMAGE_SIZE, Stream.TEXT_SIZE):
                return torch.cat([torch.rand(count, part, device=device) for part in (1, columns - 1)], 1)
            generator = torch.Generator(device).manual_seed(self.key(stream, step))
            whole = torch.rand((count * self.world_size, columns), generator=generator, device=device)
            return whole[self.rank :: self.world_size]
        words = hashed(self.key(stream, step), rows, torch.arange(columns, device=rows.device))
        return words.bitwise_right_shift_(40).bitwise_and_(0xFF_FFFF).float().mul_(2.0**-24)

    def normal(self, stream: Stream, step: int, rows: Tensor, columns: int) -> Tensor:
        """Standard normal numbers of these global rows: (n,) int64 -> (n, columns) float32 on their device."""
        if self.version == 1:
            # a generator of each rank draws the image samples, then the text samples
            generator = torch.Generator(rows.device).manual_seed(mix_seed(self.seed, step, 21, self.rank))
            both = [torch.randn((len(rows), columns), generator=generator, device=rows.device) for _ in range(2)]
            return both[stream == Stream.TEXT_SAMPLE]
        # columns 2 k and 2 k + 1 are of one 64-bit word
        words = hashed(self.key(stream, step), rows, torch.arange((columns + 1) // 2, device=rows.device))
        pairs = normal(words.view(torch.int32), torch.float64).float().unflatten(1, (2, -1))
        return pairs.mT.flatten(1)[:, :columns]


def pair_noise(seed: int, rows: Tensor, columns: Tensor, normals: int, gumbels: int) -> tuple[Tensor, Tensor]:
    """Draw standard normal and Gumbel numbers of every pair of a tile: (n, m, normals), (n, m, gumbels), float32.

    rows (n,), columns (m,): int64, positions of the tile in the matrix: a pair has the same numbers in every tile. Each
    64-bit word gives two uniform numbers of 32 bits; Box and Muller make them normal, up to 6.6 sigma.
    """
    words = (normals + 1) // 2 + (gumbels + 1) // 2
    counters = torch.arange(1, words + 1, device=rows.device) * STEP
    drawn = splitmix(hashed(seed, rows, columns).unsqueeze(2) + counters).view(torch.int32)  # (n, m, 2 words)
    split = 2 * ((normals + 1) // 2)
    # -log(-log u) of u at most 1 - 2^-24, the float below 1
    gumbel = above_zero(drawn[..., split:]).clamp_(max=1 - 2.0**-24).log_().neg_().log_().neg_()
    return normal(drawn[..., :split])[..., :normals], gumbel[..., :gumbels]


def hashed(key: int, rows: Tensor, columns: Tensor) -> Tensor:
    """Return 64 random bits of every row and column, (n,), (m,) int64 -> (n, m) int64: two rounds of splitmix64."""
    return splitmix(splitmix(rows.unsqueeze(1) * STEP + key) + (columns + 1) * STEP)


def splitmix(x: Tensor) -> Tensor:
    """Apply the output function of splitmix64 to int64 in place: bijective; any bit of x changes half of the bits."""
    shifted = torch.empty_like(x)
    for shift, factor in ((30, FIRST), (27, SECOND), (31, None)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        x ^= shifted.bitwise_and_((1 << (64 - shift)) - 1)  # torch shifts the sign in, splitmix64 zeros
        if factor is not None:
            x *= factor
    return x


def above_zero(words: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Map int32 to (0, 1]: (|i| + 1/2) / 2^31, so that small i give small numbers, which float32 holds exactly."""
    return words.to(dtype).abs_().add_(0.5).mul_(2.0**-31)


def normal(words: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Map uniform int32 (..., 2 N) to standard normal numbers: sqrt(-2 log u) times cos and sin 2 pi u'."""
    first, second = words[..., 0::2], words[..., 1::2]
    radius = above_zero(first, dtype).log_().mul_(-2).sqrt_()
    angle = second.to(dtype).mul_(2 * math.pi * 2.0**-32)
    return torch.cat([angle.cos().mul_(radius), angle.sin_().mul_(radius)], -1)


def mix_seed(*parts: int) -> int:
    """Return one well-mixed 63-bit seed from several integers, each absorbed by a round of splitmix64."""
    state = 0
    for part in parts:
        state = (state + (part & _WORD) + 0x9E37_79B9_7F4A_7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58_476D_1CE4_E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D0_49BB_1331_11EB) & _WORD
        state ^= state >> 31
    return state >> 1
