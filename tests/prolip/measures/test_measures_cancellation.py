"""The absolute error of the matrix-product forms of the measures, as prolip.measures.pairwise promises it.

The kernels of a machine sum in one order, those of the next in another. So the products are also summed term by term
here, in orders of our own: what holds for them does not hang on the machine that the tests run on.
"""

import mpmath
import numpy as np
import pytest
import torch
from test_measures_pairwise import spread

from prolip import measures
from prolip.gaussian import Gaussian
from prolip.measures import pairwise

SHARE = {"csd_distance": 1.0, "wasserstein2": 1.0, "csd_similarity": 0.25}
"""Of the bound (D + 10) eps (|m1|^2 + |m2|^2 + trace1 + trace2)."""
WIDTHS = (1, 2, 3, 8, 17, 64, 100, 255, 384, 385, 512, 768, 1000, 1024, 2048, 4096)
HERE = "as the kernels of this machine do"
ORDERS = {
    "first to last": lambda terms: terms,
    "last to first": lambda terms: terms[..., ::-1],
    "large to small": lambda terms: np.take_along_axis(terms, np.argsort(-np.abs(terms), -1), -1),
    "signs apart": lambda terms: np.sort(terms, -1),
}


def one_by_one(order):
    """`pairwise._products` with every product rounded and added on its own, in this order."""

    def products(x, y):
        terms = order((x.unsqueeze(1) * y).numpy())
        return torch.from_numpy(np.add.accumulate(terms, axis=-1, dtype=terms.dtype)[..., -1].copy())

    return products


def truth(name: str, p: Gaussian, q: Gaussian) -> torch.Tensor:
    """The measure of all pairs, in float64 for float32 and in 40 digits for float64."""
    if p.mean.dtype == torch.float32:
        return measures.MEASURES[name].paired(*spread(p.to(torch.float64), q.to(torch.float64)))
    with mpmath.workdps(40):
        rows = [[list(map(mpmath.mpf, row)) for row in x.tolist()] for x in (*p, *q)]
        return torch.tensor(
            [[float(TRUTHS[name](m1, l1, m2, l2)) for m2, l2 in zip(*rows[2:])] for m1, l1 in zip(*rows[:2])],
            dtype=torch.float64,
        )


def traces(l1, l2):
    return mpmath.fsum(map(mpmath.exp, l1)) + mpmath.fsum(map(mpmath.exp, l2))


def square_distance(a, b):
    return mpmath.fsum((x - y) ** 2 for x, y in zip(a, b))


TRUTHS = {
    "csd_distance": lambda m1, l1, m2, l2: square_distance(m1, m2) + traces(l1, l2),
    "csd_similarity": lambda m1, l1, m2, l2: mpmath.fdot(m1, m2) - traces(l1, l2) / 2,
    "wasserstein2": lambda m1, l1, m2, l2: (
        square_distance(m1, m2) + square_distance(*([mpmath.exp(x / 2) for x in log_var] for log_var in (l1, l2)))
    ),
}


def worst_errors(name: str, p: Gaussian, q: Gaussian, orders=(HERE,)) -> dict[str, float]:
    """Return the largest absolute error by order of summation, in units of eps (|m1|^2 + |m2|^2 + trace1 + trace2)."""
    sizes = [z.mean.square().sum(-1) + z.trace for z in (p.to(torch.float64), q.to(torch.float64))]
    unit = torch.finfo(p.mean.dtype).eps * (sizes[0].unsqueeze(1) + sizes[1])
    exact, worst = truth(name, p, q), {}
    for order in orders:
        with pytest.MonkeyPatch.context() as patch:
            if order != HERE:
                patch.setattr(pairwise, "_products", one_by_one(ORDERS[order]))
            worst[order] = ((measures.MEASURES[name].pairwise(p, q).double() - exact).abs() / unit).max().item()
    return worst


def coordinates(rng: np.random.Generator, kind: str, rows: int, width: int) -> np.ndarray:
    x = rng.standard_normal((rows, width))
    if kind == "equal":
        x[:] = x[:, :1]
    elif kind == "leading":
        x[:, 1:] *= 10 ** rng.uniform(-5, -1)
    elif kind == "positive":
        x = np.abs(x)
    elif kind == "falling":
        x *= 2.0 ** -np.linspace(0, rng.uniform(2, 25), width)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def make_case(seed: int) -> tuple[Gaussian, Gaussian]:
    """Sets of 1 to 8 Gaussians, q near rows of p: every third in float64, where the truth has 40 digits."""
    rng = np.random.default_rng(seed)
    double = seed % 3 == 0
    width, most = (int(rng.choice(WIDTHS[:6])), 3) if double else (int(rng.choice(WIDTHS)), 8)
    b1, b2 = rng.integers(1, most, size=2, endpoint=True)
    length = 10 ** rng.choice([0, rng.uniform(-3, 3), rng.uniform(-15, 15)])
    gap = rng.choice([0, 10 ** rng.uniform(-8, 0)])
    kind = rng.choice(["random", "equal", "leading", "positive", "falling"])
    mean = length * coordinates(rng, kind, b1, width)
    log_var = rng.uniform(-30, 3) + rng.choice([0, 0.1, 1]) * rng.standard_normal((b1, width))
    near = np.arange(b2) % b1
    others = mean[near] + gap * length * coordinates(rng, "random", b2, width)
    other_log_var = log_var[near] + gap * rng.standard_normal((b2, width))
    dtype = torch.float64 if double else torch.float32
    p, q = (
        (torch.from_numpy(m).to(dtype), torch.from_numpy(v).to(dtype))
        for m, v in ((mean, log_var), (others, other_log_var))
    )
    return Gaussian(*p), Gaussian(*q)


def check_bound(seed: int) -> None:
    p, q = make_case(seed)
    for name, share in SHARE.items():
        bound = share * (p.mean.shape[-1] + 10)
        for order, worst in worst_errors(name, p, q, (HERE, *ORDERS)).items():
            assert worst <= bound, f"case {seed}, {name} summed {order}: {worst:.1f} of {bound:g}"


@pytest.mark.parametrize("part", range(3))
def test_no_order_of_summation_passes_the_bound(part):
    for seed in range(part * 20, part * 20 + 20):
        check_bound(seed)
