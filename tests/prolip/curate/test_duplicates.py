"""Near-duplicates by signatures: against all pairs by hand, the angle that a bit stands for, cells."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from prolip.curate import select
from prolip.curate.score import signatures
from prolip.curate.select import duplicates_of, radius_of
from prolip.curate.tables import BITS


def distances(signatures: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(signatures, axis=1).astype(np.int64)
    return (bits[:, None] != bits[None]).sum(2)


def by_hand(signatures: np.ndarray, quality: np.ndarray, usable: np.ndarray, radius: int) -> np.ndarray:
    """The best first: it stays unless one that stays is near; then it repeats the best of these."""
    near, repeats, stay = distances(signatures) <= radius, np.full(len(signatures), -1), []
    for row in sorted(np.flatnonzero(usable), key=lambda row: (-quality[row], row)):
        found = [other for other in stay if near[row, other]]
        if found:
            repeats[row] = found[0]
        else:
            stay.append(row)
    return repeats


def clusters(count: int, seed: int) -> np.ndarray:
    """Signatures in groups that differ in a few bits, some not at all."""
    generator = np.random.default_rng(seed)
    centres = generator.integers(0, 256, (count // 6, BITS // 8), dtype=np.uint8)
    bits = np.unpackbits(centres[generator.integers(0, len(centres), count)], axis=1)
    flips = generator.random(bits.shape) < generator.choice([0.0, 0.02, 0.06], count)[:, None]
    return np.packbits(bits ^ flips, axis=1)


@pytest.mark.parametrize("seed", range(4))
def test_the_best_of_those_that_are_near_stays(seed):
    signatures = clusters(240, seed)
    generator = np.random.default_rng(seed)
    quality, usable = generator.integers(0, 20, 240).astype(float), generator.random(240) < 0.9
    got = duplicates_of(signatures, quality, usable, 16)
    assert np.array_equal(got, by_hand(signatures, quality, usable, 16))
    assert 100 < (got >= 0).sum() < 210 and (got[~usable] == -1).all()


def test_quality_that_is_missing_is_the_worst():
    signatures = np.zeros((3, BITS // 8), np.uint8)
    got = duplicates_of(signatures, np.array([np.nan, 0.1, 0.2]), np.ones(3, bool), 3)
    assert got.tolist() == [2, 2, -1]
    assert duplicates_of(signatures, np.zeros(3), np.zeros(3, bool), 3).tolist() == [-1] * 3


@pytest.mark.parametrize("size", [100, 1])  # of a cell, of which there are at most 4 sqrt(N)
def test_cells_find_what_all_pairs_do(monkeypatch, size):
    signatures = clusters(3000, 7)
    quality, usable = np.random.default_rng(1).random(3000), np.ones(3000, bool)
    whole = duplicates_of(signatures, quality, usable, 16)
    monkeypatch.setattr(select, "FLAT", 100)
    monkeypatch.setattr(select, "CELL", size)
    made, plain = [], select.faiss.IndexBinaryIVF
    monkeypatch.setattr(select.faiss, "IndexBinaryIVF", lambda *args: made.append(args[2]) or plain(*args))
    cells = duplicates_of(signatures, quality, usable, 16)
    different = len(np.unique(signatures, axis=0))
    assert (whole == cells).mean() > 0.97 and made == [min(different // size, round(4 * different**0.5))]


def test_bits_differ_as_the_angle_says():
    generator = torch.Generator().manual_seed(0)
    a = torch.nn.functional.normalize(torch.randn(2000, 64, generator=generator), dim=1)
    for cosine in (0.99, 0.9, 0.5):
        other = torch.randn(2000, 64, generator=generator)
        other = torch.nn.functional.normalize(other - (other * a).sum(1, keepdim=True) * a, dim=1)
        b = cosine * a + math.sqrt(1 - cosine**2) * other
        pairs = [np.frombuffer(b"".join(signatures(x).to_pylist()), np.uint8).reshape(2000, -1) for x in (a, b)]
        differ = (np.unpackbits(pairs[0], axis=1) != np.unpackbits(pairs[1], axis=1)).sum(1)
        assert differ.mean() == pytest.approx(BITS * math.acos(cosine) / math.pi, rel=0.03)
        assert radius_of(cosine) == math.floor(BITS * math.acos(cosine) / math.pi)
    for wrong in (0.0, 1.5, -0.1):
        with pytest.raises(ValueError, match="--duplicates"):
            radius_of(wrong)
