"""The distance of an input from the training data, and refusals by it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.spatial.distance import cdist
from sklearn.metrics import roc_auc_score
from torch import nn

import prolip
from prolip.gaussian import Gaussian
from prolip.uncertainty import novelty as parts
from prolip.uncertainty.novelty import (
    SHRINK,
    Novelty,
    Reference,
    Widths,
    class_means,
    cluster,
    fit_distance,
    fit_novelty,
    novelty_of,
    principal,
    refusal,
)
from prolip.uncertainty.token_stats import Encoded


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def clusters(count, width=12, classes=8, seed=0, spread=4.0):
    """Points around a few centres, which the seed does not move, and the class of each."""
    label = torch.arange(count) % classes
    scale = torch.linspace(0.5, 2, width)
    return spread * draw(classes, width, seed=99)[label] + draw(count, width, seed=seed) * scale, label


def as_hidden(mean, first):
    return Encoded(Gaussian(mean, torch.zeros_like(mean)), first)


def inputs(count, seed=0):
    """Return outputs of a tower: `first` of two widths of tokens, unit means computed from it, and the classes."""
    first, label = clusters(count, seed=seed)
    return as_hidden(nn.functional.normalize(first[:, :6], dim=1), first), label


WIDTHS = Widths(mean=6, first=12, centres=16)


def fit(hidden, label=None, widths=WIDTHS, seed=0):
    return fit_novelty(hidden.z.mean, hidden.token_stats, widths, label, seed)


@pytest.fixture(scope="module")
def fitted():
    return fit(*inputs(800))


def distance_from(x, label, most, rank=256):
    return fit_distance(x, principal(x, rank), label, most)


def oracle(x, label, y, rank):
    """The relative Mahalanobis distance with the rest of probabilistic PCA, in float64 numpy."""
    x, y, label = x.double().numpy(), y.double().numpy(), label.numpy()
    middle = x.mean(0)
    values, vectors = np.linalg.eigh(np.cov((x - middle).T, bias=True))
    values, vectors = values[::-1], vectors[:, ::-1]
    extra, main = SHRINK * values.mean(), vectors[:, :rank]
    means = np.stack([x[label == c].mean(0) for c in np.unique(label)])
    rest = (x - means[label]) @ main
    within = np.linalg.inv(rest.T @ rest / (len(x) - len(means)) + extra * np.eye(rank))
    background = np.linalg.inv(np.diag(values[:rank] + extra))
    near = cdist((y - middle) @ main, (means - middle) @ main, "mahalanobis", VI=within).min(1) ** 2
    far = cdist((y - middle) @ main, np.zeros((1, rank)), "mahalanobis", VI=background)[:, 0] ** 2
    other = (y - middle) - (y - middle) @ main @ main.T
    return near - far + ((other**2).sum(1) / (values[rank:].mean() + extra) if rank < x.shape[1] else 0)


@pytest.mark.parametrize("rank", [12, 5])
def test_distance_is_the_relative_mahalanobis_distance_of_scipy(rank):
    x, label = clusters(500)
    y = torch.cat([x[:20], draw(40, 12, seed=3) * 5])
    np.testing.assert_allclose(distance_from(x, label, 20, rank)(y), oracle(x, label, y, rank), rtol=2e-4, atol=2e-3)


def test_only_the_largest_classes_are_kept_and_rows_of_the_others_count_for_the_background():
    x, label = clusters(330, classes=3)
    label[:10] = 7  # the least class
    some = distance_from(x, label, 3)
    centres = some.centres @ torch.linalg.inv(some.within) @ some.basis.T + some.middle
    wanted = class_means(x[10:], label[10:], 3)
    torch.testing.assert_close(centres[torch.cdist(centres, wanted).argmin(0)], wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(some.middle, x.mean(0))


def test_kmeans_finds_the_clusters():
    x, label = clusters(400, spread=12.0)
    found = cluster(x, 24)
    pure = [label[found == c].unique().numel() == 1 for c in found.unique().tolist()]
    assert len(pure) >= 8 and all(pure)


def test_outliers_at_the_tokens_are_found_though_their_means_are_ordinary():
    found = fit(inputs(1200)[0])
    own = inputs(400, seed=1)[0]
    noise = torch.cat([torch.zeros(400, 6), 8 * draw(400, 6, seed=2)], 1)
    foreign = own._replace(token_stats=own.token_stats + noise)
    near, far = found(own), found(foreign)
    assert torch.equal(near["mean"], far["mean"])
    outlier = np.repeat([0, 1], 400)
    assert roc_auc_score(outlier, torch.cat([near["first"], far["first"]])) > 0.98


def test_nats_say_which_share_of_new_own_inputs_is_further(fitted):
    new = fitted(inputs(4000, seed=7)[0])
    for name in ("mean", "first"):
        for share in (0.5, 0.2, 0.05, 0.01):
            found = (new[name] > -math.log(share)).double().mean().item()
            assert found == pytest.approx(share, rel=0.5, abs=0.005), (name, share)


def test_reference_of_the_training_is_of_rows_that_were_held_out():
    x, label = draw(600, 40), torch.arange(600) % 150  # each row has moved the mean of its class of four
    model = fit(as_hidden(x, x), label, Widths(mean=40, first=40))
    trained, new = (model(as_hidden(y, y))["mean"] for y in (x, draw(600, 40, seed=9)))
    assert trained.median() < 0.15 and 0.4 < new.median() < 1.1  # log 2 = 0.69


def changed(one, other):
    other = other.state_dict()
    return {name.split(".")[1] for name, x in one.state_dict().items() if not torch.equal(x, other[name])}


def test_classes_are_used_but_not_at_the_first_tokens_and_not_where_they_have_few_rows():
    hidden, label = inputs(400)
    assert changed(fit(hidden, label), fit(hidden)) == {"mean"}
    assert not changed(fit(hidden, torch.arange(400)), fit(hidden))  # an image, a text
    assert not changed(fit(hidden, torch.arange(400) % 17), fit(hidden))  # more than are kept
    assert not changed(fit(hidden, label.index_fill(0, torch.tensor([5]), -1)), fit(hidden))  # one is not known


def test_reference_gives_the_information_of_a_share():
    numbers = torch.from_numpy(stats.expon.rvs(size=200_000, random_state=0)).float()
    reference = Reference().fit(numbers)
    y = torch.tensor([0.1, 1.0, 2.0, 4.0, 7.0])
    torch.testing.assert_close(reference(y), y, rtol=0.05, atol=0.02)  # -log of exp(-y)
    assert reference(torch.tensor(-3.0)) == 0
    steps = reference(torch.linspace(0.05, 50, 1000)).diff()
    assert (steps > 0).all()


def test_refusal_is_the_information_of_a_right_answer_to_an_input_of_the_own_kind():
    novelty = {"mean": torch.tensor([0.0, 2.0, 500.0]), "first": torch.tensor([0.1, 0.0, 3.0])}
    code_length = torch.tensor([0.3, 200.0, 0.0])
    own = [1 / (1 + np.exp(h.double().numpy()) / 10) for h in novelty.values()]  # odds of 10 to 1
    expected = code_length.numpy() - np.log(own[0]) - np.log(own[1])
    np.testing.assert_allclose(refusal(code_length, novelty), expected, rtol=1e-6)
    far = refusal(torch.zeros(1), {"mean": torch.tensor([1e30])})
    assert far == 1e30  # no overflow


def test_same_seed_same_bits_and_another_seed_other_clusters():
    hidden, _ = inputs(500)
    one, other = (fit(hidden, seed=seed) for seed in (0, 1))
    with torch.autocast("cpu", torch.bfloat16):  # as a training run on a CPU closes
        two = fit(hidden)
    assert not changed(one, two) and changed(one, other)


def test_state_travels_into_a_new_module(fitted):
    new, hidden = Novelty(WIDTHS), inputs(30, seed=2)[0]
    assert fitted.fitted and not new.fitted
    new.load_state_dict(fitted.state_dict())
    assert new.fitted and all(torch.equal(x, fitted(hidden)[name]) for name, x in new(hidden).items())
    assert all(x.dtype == torch.float32 for x in new.buffers()) and not list(new.parameters())


def test_a_model_that_was_not_fitted_has_no_novelty():
    model = prolip.create_model("ProLIP-ViT-test", method_cfg={"name": "likelihood"}).eval()
    with pytest.raises(ValueError, match="this model has no novelty of images: fit it with prolip uncertainty"):
        novelty_of(model, draw(2, 3, 32, 32))
    with pytest.raises(ValueError, match="no novelty of texts.*with a text tower of OpenCLIP's or ours"):
        novelty_of(model, torch.zeros(2, 16, dtype=torch.int64), "text")


def test_errors_say_what_to_do(fitted):
    hidden, label = inputs(100)
    with pytest.raises(ValueError, match=r"first is \(100, 12\), but the widths need \(B, 13\)"):
        fit(hidden, widths=Widths(mean=6, first=13))
    with pytest.raises(ValueError, match=r"\[100, 99\] means, rows of first tokens"):
        fit_novelty(hidden.z.mean, hidden.token_stats[1:], WIDTHS)
    with pytest.raises(ValueError, match=r"\[100, 100, 99\] means, rows of first tokens and classes differ"):
        fit(hidden, label[1:])
    with pytest.raises(ValueError, match="1 rows of first are not finite"):
        fit(hidden._replace(token_stats=hidden.token_stats.index_fill(0, torch.tensor([3]), torch.nan)))
    with pytest.raises(ValueError, match=r"mean is \(100, 5\), but this novelty needs \(B, 6\)"):
        fitted(as_hidden(hidden.z.mean[:, :5], hidden.token_stats))
    with pytest.raises(ValueError, match=r"first is None, but this novelty needs \(B, 12\)"):
        fitted(hidden._replace(token_stats=None))
    with pytest.raises(ValueError, match=r"20 or more finite numbers \(N,\), got \(19,\)"):
        Reference().fit(torch.arange(19.0))
    with pytest.raises(ValueError, match="no tail"):
        Reference().fit(torch.ones(30))


@pytest.mark.parametrize("kind", ["same", "rounding"])
def test_features_that_differ_by_rounding_alone_are_alike(kind):
    """The data is the same image in batches of other sizes; no decomposition of the remainder has a meaning."""
    x = torch.nn.functional.normalize(draw(1, 192), dim=1).expand(60, 192).clone()
    if kind == "rounding":
        x *= 1 + 2e-7 * torch.rand(60, 1)
    with pytest.raises(parts.DegenerateFeatures, match="all inputs are equal"):
        principal(x, 16)
    assert principal(x + 1e-4 * draw(60, 192), 16).variance[0] > 0
