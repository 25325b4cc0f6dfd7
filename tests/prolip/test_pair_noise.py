"""Noise of pairs: its moments, no two pairs alike, and the same numbers however the matrix is cut."""
from __future__ import annotations

import math

import pytest
import torch

from prolip.noise import gumbel, normal, pair_noise, splitmix

MASK = (1 << 64) - 1


def noise(rows: range, columns: range, seed: int = 7, normals: int = 32, gumbels: int = 2):
    return pair_noise(seed, torch.tensor([*rows]), torch.tensor([*columns]), normals, gumbels)


def by_integers(x: int) -> int:
    """splitmix64's output function as Steele et al. 2014 print it."""
    x = ((x ^ (x >> 30)) * 0xBF58_476D_1CE4_E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D0_49BB_1331_11EB) & MASK
    return x ^ (x >> 31)


def test_the_hash_is_splitmix64_to_the_bit():
    values = [0, 1, 2**31, 2**62 + 5, 2**63, MASK, 0x9E37_79B9_7F4A_7C15]
    signed = [x - (x >> 63 << 64) for x in values]
    assert [x & MASK for x in splitmix(torch.tensor(signed)).tolist()] == [by_integers(x) for x in values]


def test_the_numbers_are_standard_normal_and_standard_gumbel():
    z, g = (x.double() for x in noise(range(100), range(100)))
    assert z.shape == (100, 100, 32) and g.shape == (100, 100, 2)
    count = z.numel()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**power).mean() - moment) < 4.5 * math.sqrt(variance / count), power
    assert abs(g.mean() - 0.5772157) < 4.5 * math.sqrt(math.pi**2 / 6 / g.numel())
    assert abs(g.var() - math.pi**2 / 6) < 0.1
    quantiles = torch.distributions.Normal(0.0, 1.0).cdf(z.flatten()[:100_000]).sort().values
    assert (quantiles - torch.linspace(0, 1, 100_000)).abs().max() < 1.95 / math.sqrt(100_000)  # Kolmogorov, 0.1%


def test_pairs_of_one_row_or_column_and_numbers_of_one_pair_are_independent():
    z = noise(range(64), range(64))[0].double()
    for x in (z.flatten(0, 1).T, z.permute(0, 2, 1).flatten(0, 1).T, z.flatten(1)):
        kinds, samples = x.shape
        correlation = x @ x.T / samples - torch.eye(kinds)
        assert correlation.abs().max() < 6.5 * math.sqrt(2 / samples)


def test_a_pair_has_the_same_numbers_in_every_tile():
    whole = noise(range(20), range(30))
    for part, all_of in zip(noise(range(5, 9), range(11, 30)), whole):
        assert torch.equal(part, all_of[5:9, 11:30])
    assert len(whole[0].flatten().unique()) > 0.99 * whole[0].numel()
    other = noise(range(20), range(30), seed=8)[0]
    assert (other == whole[0]).double().mean() < 1e-3
    odd = noise(range(3), range(4), normals=5, gumbels=3)
    assert [x.shape for x in odd] == [(3, 4, 5), (3, 4, 3)]


@pytest.mark.parametrize("make", [normal, gumbel])
def test_the_ends_of_the_integers_give_finite_numbers(make):
    ends = torch.tensor([-(2**31), 2**31 - 1, 0, -1, -(2**31), 0], dtype=torch.int32)
    assert make(ends).isfinite().all() and make(ends.flip(0)).isfinite().all()
