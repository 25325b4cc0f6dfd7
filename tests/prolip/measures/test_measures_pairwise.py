"""Measures of all pairs: equal to the paired ones, tile by tile, in bounded memory."""

import pytest
import torch
from peak_elements import PeakElements
from random_gaussians import gaussian

from prolip import measures
from prolip.gaussian import Gaussian
from prolip.measures.pairwise import all_pairs

TILED = ("kl", "js", "elk", "bhattacharyya", "log_inclusion", "inclusion_test")


def spread(p: Gaussian, q: Gaussian) -> tuple[Gaussian, Gaussian]:
    """(B1, 1, D) and (1, B2, D): the brute-force way to all pairs."""
    return Gaussian(*(x.unsqueeze(1) for x in p)), Gaussian(*(x.unsqueeze(0) for x in q))


@pytest.mark.parametrize("name", measures.MEASURES)
def test_pairwise_is_the_paired_measure_of_every_pair(name):
    p, q = gaussian(6, 5), gaussian(7, 5, seed=1)
    m = measures.MEASURES[name]
    torch.testing.assert_close(m.pairwise(p, q), m.paired(*spread(p, q)))
    square = m.pairwise(p, q.select(slice(6)))
    torch.testing.assert_close(square.diagonal(), m.paired(p, q.select(slice(6))))


@pytest.mark.parametrize("form", ["exact", "printed"])
def test_pairwise_inclusion_passes_eps_and_form_on(form):
    p, q = gaussian(4, 5), gaussian(3, 5, seed=1)
    expected = measures.inclusion_test(*spread(p, q), eps=-2.0, form=form)
    torch.testing.assert_close(measures.pairwise_inclusion_test(p, q, eps=-2.0, form=form), expected)
    expected = measures.log_inclusion(*spread(p, q), eps=-2.0)
    torch.testing.assert_close(measures.pairwise_log_inclusion(p, q, eps=-2.0), expected)


@pytest.mark.parametrize("max_elements", [1, 10, 50, 99, 10_000])
@pytest.mark.parametrize("name", TILED)
def test_tile_size_changes_neither_values_nor_gradients(name, max_elements):
    p, q = gaussian(7, 5), gaussian(9, 5, seed=1)
    weights = torch.randn(7, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    m = measures.MEASURES[name]

    def run(f):
        leaves = [x.clone().requires_grad_() for x in (*p, *q)]
        value = f(Gaussian(*leaves[:2]), Gaussian(*leaves[2:]))
        return [value.detach(), *torch.autograd.grad((weights * value).sum(), leaves)]

    tiled = run(lambda p, q: m.pairwise(p, q, max_elements=max_elements))
    for a, b in zip(tiled, run(lambda p, q: m.paired(*spread(p, q)))):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(m.pairwise(p, q, max_elements=max_elements), tiled[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", measures.MEASURES)
def test_pairwise_gradients_in_float64(name):
    p, q = gaussian(3, 2), gaussian(4, 2, seed=1)
    leaves = [x.clone().requires_grad_() for x in (*p, *q)]
    f, options = measures.MEASURES[name].pairwise, {"max_elements": 8} if name in TILED else {}
    assert torch.autograd.gradcheck(lambda *x: f(Gaussian(*x[:2]), Gaussian(*x[2:]), **options), leaves)


@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0, 0)])
@pytest.mark.parametrize("name", measures.MEASURES)
def test_empty_sets_give_empty_matrices_that_backward_accepts(name, shape):
    p = Gaussian(*(x.requires_grad_() for x in gaussian(shape[0], 5)))
    q = gaussian(shape[1], 5)
    value = measures.MEASURES[name].pairwise(p, q)
    assert value.shape == shape
    value.sum().backward()
    assert p.mean.grad is None or p.mean.grad.eq(0).all()


@pytest.mark.parametrize("name", measures.MEASURES)
def test_autocast_does_not_lower_the_precision(name):
    p, q = gaussian(6, 32, dtype=torch.float32), gaussian(7, 32, seed=1, dtype=torch.float32)
    m = measures.MEASURES[name]
    with torch.autocast("cpu", torch.bfloat16):
        low_pairwise, low_paired = m.pairwise(p, q), m.paired(p, p)
    assert torch.equal(low_pairwise, m.pairwise(p, q))
    assert torch.equal(low_paired, m.paired(p, p))


def test_no_tile_is_larger_than_the_workspace():
    seen = []

    def f(x, y):
        seen.append(len(x) * len(y) * 3)
        return x.sum(-1).unsqueeze(1) * y.sum(-1)

    x, y = gaussian(11, 3).mean, gaussian(13, 3).mean
    torch.testing.assert_close(all_pairs(f, (x,), (y,), 3, 40), f(x, y))
    assert max(seen[:-1]) <= 40
    assert sum(seen[:-1]) == 11 * 13 * 3


@pytest.mark.parametrize("name", ["csd_similarity", "kl"])
def test_pairwise_measures_compile_without_a_graph_break(name):
    p, q = (Gaussian(*(x.requires_grad_() for x in gaussian(b, 8, seed=b, dtype=torch.float32))) for b in (6, 5))
    f, options = measures.MEASURES[name].pairwise, {"max_elements": 64} if name in TILED else {}
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)(p, q, **options)
    torch.testing.assert_close(compiled, f(p, q))
    compiled_grads, grads = (torch.autograd.grad(value.sum(), (*p, *q)) for value in (compiled, f(p, q)))
    for a, b in zip(compiled_grads, grads):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", measures.MEASURES)
@pytest.mark.parametrize("training", [False, True])
def test_no_tensor_of_all_pairs_times_width_exists_in_either_pass(name, training):
    """B1 * B2 * D = 1,179,648 elements: neither a product form nor tiles of 4,096 elements come near."""
    b1, b2, d, tile = 96, 128, 96, 4096
    p, q = (Gaussian(*(x.requires_grad_(training) for x in gaussian(b, d, dtype=torch.float32))) for b in (b1, b2))
    options = {"max_elements": tile} if name in TILED else {}
    with PeakElements() as count:
        value = measures.MEASURES[name].pairwise(p, q, **options)
        kept = count.live
        if training:
            value.sum().backward()
    matrices, inputs = b1 * b2, 2 * (b1 + b2) * d
    assert kept <= 2 * matrices + inputs  # between the passes
    assert count.peak <= 4 * matrices + 3 * inputs + 24 * tile < b1 * b2 * d / 3


def test_match_probability_keeps_no_distances_of_all_samples():
    """B1 * B2 * J^2 = 147,456 distances: tiled in both passes, the samples themselves (J (B1 + B2) D) are kept."""
    p, q = (Gaussian(*(x.requires_grad_() for x in gaussian(b, 8, dtype=torch.float32))) for b in (48, 48))
    peaks = []
    for max_elements in (2048, 2**30):
        with PeakElements() as count:
            measures.pairwise_log_match_probability(p, q, 3.0, 2.0, 8, None, max_elements).sum().backward()
        peaks.append(count.peak)
    assert peaks[0] < 48 * 48 * 64 / 2
    assert peaks[1] > 2 * 48 * 48 * 64
