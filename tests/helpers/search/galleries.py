"""Galleries of Gaussians for the tests of search: uneven, clustered, with equal items, with extreme variances."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from prolip.gaussian import Gaussian
from prolip.scores import CSDScore, Score
from prolip.search.exact import BLOCK, GaussianArrays, make_arrays
from prolip.search.index import Part


def gaussians(rows: int, dim: int = 12, seed: int = 0, spread: float = 1.0, level: float = -3.0) -> Gaussian:
    """Unit means in clusters; the log variances differ from item to item more than within one."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(8, dim, generator=torch.Generator().manual_seed(99))
    mean = centres[torch.randint(0, 8, (rows,), generator=g)] + torch.randn(rows, dim, generator=g)
    widths = spread * (torch.randn(rows, 1, generator=g) + 0.3 * torch.randn(rows, dim, generator=g))
    return Gaussian(F.normalize(mean, dim=1), level + widths)


def arrays_of(score: Score | None, z: Gaussian, block: int = BLOCK) -> GaussianArrays:
    """A gallery in blocks of this size, with vectors by csd where a score has none."""
    own = CSDScore() if score is None or score.factors(z, "image") is None else score
    return make_arrays(own, z)._replace(block=block)


def brute_force(score: Score, queries: Gaussian, gallery: Gaussian, k: int) -> torch.Tensor:
    """The rows of the k highest scores in float64, equal ones by rising row."""
    rows = []
    for start in range(0, len(queries.mean), 500):
        some = queries.select(slice(start, start + 500)).to(torch.float64)
        scores = score.pairwise(gallery.to(torch.float64), some).mT
        rows.append(scores.argsort(dim=1, descending=True, stable=True)[:, :k])
    return torch.cat(rows)


ROWS, DIM = 1500, 16
GALLERY, QUERIES = gaussians(ROWS, DIM, 0, 0.7, -5.0), gaussians(60, DIM, 1, 0.7, -5.0)


def parts_of(z: Gaussian, size: int = 100, first: int = 0, start: int = 0) -> Iterator[Part]:
    """A gallery as a source gives it, from its row `start` on; first: the number of its first key."""
    for low in range(start, len(z.mean), size):
        high = min(low + size, len(z.mean))
        items = [{"key": f"k{first + row}", "path": f"p{first + row}.png"} for row in range(low, high)]
        yield Part(items, z.select(slice(low, high)), high)
