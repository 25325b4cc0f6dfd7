"""Random numbers of a step: pinned, uniform, independent, and the same however ranks and tiles cut them."""

from __future__ import annotations

import math

import pytest
import torch

from prolip.random import Draws, Stream, mix_seed, pair_noise, splitmix
from prolip.views import keep_patches, mask_text

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


def test_a_pair_has_the_same_numbers_in_every_tile():
    whole = noise(range(20), range(30))
    for part, all_of in zip(noise(range(5, 9), range(11, 30)), whole):
        assert torch.equal(part, all_of[5:9, 11:30])
    assert len(whole[0].flatten().unique()) > 0.99 * whole[0].numel()
    other = noise(range(20), range(30), seed=8)[0]
    assert (other == whole[0]).double().mean() < 1e-3
    odd = noise(range(3), range(4), normals=5, gumbels=3)
    assert [x.shape for x in odd] == [(3, 4, 5), (3, 4, 3)]


# --- rows ------------------------------------------------------------------------------------------------------------
def drawn(kind: str = "uniform", rows: int = 64, columns: int = 64, stream=Stream.AUGMENT, step: int = 3, **place):
    draws = Draws(**{"seed": 7} | place)
    return getattr(draws, kind)(stream, step, draws.rows(rows, "cpu"), columns)


def test_uniform_numbers_are_24_bits_of_splitmix64_in_integers():
    """splitmix64 from a state that one round makes of key and row: the definition, in Python's integers."""
    got = drawn(rows=3, columns=4, rank=1, world_size=2)
    golden, key = 0x9E37_79B9_7F4A_7C15, mix_seed(7, 3, Stream.AUGMENT)
    states = [by_integers((row * golden + key) & MASK) for row in (1, 3, 5)]
    words = [[by_integers((state + column * golden) & MASK) for column in range(1, 5)] for state in states]
    assert got.tolist() == [[(word >> 40) / 2**24 for word in row] for row in words]


def test_the_numbers_are_those_that_version_2_began_with():
    """Other numbers would change every run that is resumed: they take a new version."""
    got = drawn(rows=2, columns=3, stream=Stream.IMAGE_MASK, step=11, rank=1, world_size=2)
    want = [["0x1.a2c10cp-1", "0x1.4cdde8p-1", "0x1.c4f7e2p-1"], ["0x1.5bb7bcp-2", "0x1.1e8cc6p-1", "0x1.22cacap-1"]]
    assert got.tolist() == [[float.fromhex(x) for x in row] for row in want]
    got = drawn("normal", 2, 3, Stream.IMAGE_SAMPLE, 11, rank=1, world_size=2)
    want = [
        [-0.4586893916130066, 2.015702962875366, 1.2950761318206787],
        [0.9123830795288086, -0.1614406853914261, -0.5332355499267578],
    ]
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-6, atol=0)


@pytest.mark.parametrize("version", [1, 2])
def test_every_stream_has_its_own_numbers(version):
    sizes = {Stream.IMAGE_SIZE, Stream.TEXT_SIZE} if version == 1 else set()  # then of the global generator
    draws = [drawn(rows=2, columns=4, stream=stream, version=version) for stream in Stream if stream not in sizes]
    assert len({tuple(x.flatten().tolist()) for x in draws}) == len(draws) == len(set(Stream)) - len(sizes)
    assert len({int(stream) for stream in Stream}) == len(Stream.__members__)


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_draw_together_what_one_process_draws_whatever_the_rows_and_columns_of_a_draw(kind, world_size):
    whole = drawn(kind, 24, 6)
    for rank in range(world_size):
        assert torch.equal(drawn(kind, 24 // world_size, 6, rank=rank, world_size=world_size), whole[rank::world_size])
    assert torch.equal(drawn(kind, 5, 3), whole[:5, :3])
    draw = getattr(Draws(seed=7), kind)
    assert torch.equal(draw(Stream.AUGMENT, 3, torch.tensor([17, 4]), 6), whole[[17, 4]])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_views_are_made_on_the_device_without_waiting_for_it_and_equal_those_of_the_cpu():
    text, draws = torch.randint(3, 50, (8, 16)), Draws(rank=1, world_size=2)

    def views(device: str) -> tuple[torch.Tensor, ...]:
        rows, ids = draws.rows(8, device), text.to(device)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            keep = keep_patches(draws.uniform(Stream.IMAGE_MASK, 1, rows, 49), 12)
            masked = mask_text(ids, draws.uniform(Stream.TEXT_MASK, 1, rows, 16), 99, 0, (1, 2))
            return keep, masked, draws.normal(Stream.IMAGE_SAMPLE, 1, rows, 16)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    (keep, masked, normals), on_cpu = views("cuda"), views("cpu")
    assert torch.equal(keep.cpu(), on_cpu[0]) and torch.equal(masked.cpu(), on_cpu[1])
    torch.testing.assert_close(normals.cpu(), on_cpu[2], rtol=1e-6, atol=1e-7)


# --- version 1 -------------------------------------------------------------------------------------------------------
def test_version_1_draws_the_numbers_of_the_code_before_version_2():
    """Pinned by that code, commit 6999e53."""
    place = {"rank": 1, "world_size": 2, "version": 1}
    torch.manual_seed(5)  # for sizes
    for kind, columns, stream, want in (
        ("uniform", 3, Stream.IMAGE_MASK, "1.9565e6p-1 1.5577c8p-1 1.83bd7cp-2 1.2d2e2p-1 1.79b5fp-2 1.30af7ap-1"),
        ("normal", 2, Stream.IMAGE_SAMPLE, "-1.04e1bap-1 1.189bb8p+0 -1.6c745ap-1 -1.1c3244p+0"),
        ("normal", 2, Stream.TEXT_SAMPLE, "-1.2296eep-1 1.39eff8p-4 -1.7f96fap-1 1.5141b0p+0"),
        (
            "uniform",
            4,
            Stream.IMAGE_SIZE,
            "1.a916c6p-1 1.d09fdep-1 1.a3cd7ap-1 1.d717ccp-1 1.02467p-3 1.ddc76p-4 1.50ac8p-3 1.79d092p-1",
        ),
        ("uniform", 1, Stream.TEXT_SIZE, "1.1081p-5 1.fd05c8p-1"),
    ):
        got = drawn(kind, 2, columns, stream, 11, **place).flatten().tolist()
        assert got == [float.fromhex(x) for x in want.split()], stream
    draws = Draws(seed=7, **place)
    assert draws.key(Stream.PAIR_NOISE, 11) == 4953681910841889766 and draws.rows(2, "cpu").tolist() == [2, 3]
