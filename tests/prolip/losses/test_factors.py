"""Similarities that factor: what their factors multiply to, and their loss over ranks against one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from loss_cases import assert_same_value_and_gradients, brute_mask, gaussian, leaves_of, scalars, some_matches
from torch import Tensor

from prolip import losses, measures
from prolip.gaussian import Gaussian
from prolip.losses import Factors, sigmoid_loss

BATCH, DIM = 5, 6


def csd(p: Gaussian, q: Gaussian) -> Tensor:
    return p.mean @ q.mean.T - (p.var.sum(-1)[:, None] + q.var.sum(-1)) / 2


def mean(p: Gaussian, q: Gaussian) -> Tensor:
    return F.cosine_similarity(p.mean[:, None], q.mean[None], dim=-1)


def wasserstein2(p: Gaussian, q: Gaussian) -> Tensor:
    sigmas = [(z.log_var / 2).exp() for z in (p, q)]
    return -((p.mean[:, None] - q.mean[None]).square() + (sigmas[0][:, None] - sigmas[1][None]).square()).sum(-1) / 2


SIMILARITIES = {"csd": csd, "mean": mean, "wasserstein2": wasserstein2}
FACTORS = {name: getattr(losses, f"{name}_factors") for name in SIMILARITIES}


def batch(member: int) -> tuple[Gaussian, Gaussian]:
    """Means of any length."""
    sides = gaussian(BATCH, DIM, 2 * member, log_var=-1), gaussian(BATCH, DIM, 2 * member + 1, log_var=-1)
    image, text = (Gaussian((1.5 * z.mean).detach().requires_grad_(), z.log_var) for z in sides)
    return image, text


def direct_loss(similarity: Tensor, scale: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    target = mask.to(similarity.dtype)
    return F.binary_cross_entropy_with_logits(scale * similarity + bias, target, reduction="sum") / len(mask)


@pytest.mark.parametrize("name", FACTORS)
def test_factors_multiply_to_the_measure(name):
    p, q = batch(0)
    u, v = FACTORS[name](p), FACTORS[name](q)
    product_form = u.vector @ v.vector.T + u.offset[:, None] + v.offset
    want = {
        "csd": measures.pairwise_csd_similarity,
        "mean": measures.pairwise_mean_cosine,
        "wasserstein2": lambda p, q: -measures.pairwise_wasserstein2(p, q) / 2,
    }[name](p, q)
    torch.testing.assert_close(product_form, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(product_form, SIMILARITIES[name](p, q), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("labelled", [False, True])
def test_the_loss_of_factors_equals_the_direct_one_in_value_and_every_gradient(name, labelled):
    (image, text), (scale, bias) = batch(1), scalars()
    labels = some_matches(BATCH) if labelled else None
    got = sigmoid_loss(FACTORS[name](image), FACTORS[name](text), scale, bias, labels, block=2)
    want = direct_loss(SIMILARITIES[name](image, text), scale, bias, brute_mask(labels, BATCH))
    sides = [image.mean, text.mean] if name == "mean" else leaves_of(image, text)
    assert_same_value_and_gradients(got, want, [*sides, scale, bias])


@pytest.mark.parametrize(
    "image,text", [(((3, 4), 3), ((3, 5), 3)), (((3, 4), 4), ((3, 4), 4)), (((0, 4), 0), ((0, 4), 0))]
)
def test_factors_that_are_no_batch_are_refused(image, text):
    with pytest.raises(ValueError, match=r"not form a batch: give vectors \(B, P\)"):
        sigmoid_loss(*(Factors(*map(torch.zeros, side)) for side in (image, text)), 1.0, 0.0)
