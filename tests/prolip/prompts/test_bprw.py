"""Images that set the weights of prompts: words, nearest and drawn ones, points, and weights that follow them."""

import pytest
import torch
import torch.nn.functional as F

from prolip.evaluation.metrics import streaming as blockwise
from prolip.gaussian import Gaussian, mixture
from prolip.methods import find_score
from prolip.prompts import bprw
from prolip.prompts.bprw import Reweighing, drawn_images, nearest_images, points_of, reweigh

CSD = find_score("csd")()


def anywhere(*shape, seed=0, spread=-5.0):
    g = torch.Generator().manual_seed(seed)
    mean, log_var = torch.randn(*shape, generator=g), 0.3 * torch.randn(*shape, generator=g) + spread
    return Gaussian(F.normalize(mean, dim=-1), log_var)


def test_words_are_settings_and_come_back():
    for words, settings in (
        ("", Reweighing()),
        ("5", Reweighing(5)),
        ("nearest=10", Reweighing(nearest=10)),
        ("3,alpha=0.5,prior=trace,eps=0.0,samples=10,seed=4", Reweighing(3, 0.5, "trace", 0.0, samples=10, seed=4)),
    ):
        assert Reweighing.parse(words) == settings and str(settings) == words
        assert bprw.rule_of(settings) == ("bprw:" + words if words else "bprw")
    wrong = "x 5,6 alpha=x alpha=0 alpha=inf eps=-1 eps=nan prior=even nearest=0 samples=0 5,shots=3 beta=1 seed=-1"
    for words in wrong.split():
        with pytest.raises(ValueError, match="bprw"):
            Reweighing.parse(words)


def test_nearest_images_are_those_of_the_whole_matrix_the_first_of_equal_ones_whatever_the_block(monkeypatch):
    image, classes = anywhere(40, 8), anywhere(6, 8, seed=1)
    table = (image.mean @ classes.mean.mT).round()  # -1, 0 and 1
    assert nearest_images(image.select(slice(0, 4)), classes, CSD, 5).shape == (6, 4)  # all there are
    for scores in (CSD.pairwise(image, classes), table):
        made = blockwise.PairScores.from_matrix(scores)
        monkeypatch.setattr(blockwise.PairScores, "from_gaussians", classmethod(lambda cls, *pairs, made=made: made))
        want = scores.mT.argsort(dim=1, descending=True, stable=True)[:, :6]
        for block, rows in ((1 << 22, 64), (6, 7), (60, 3)):
            monkeypatch.setattr(blockwise, "BLOCK", block)
            monkeypatch.setattr(blockwise, "ROWS", rows)
            assert torch.equal(nearest_images(image, classes, CSD, 6), want)


def test_drawn_images_are_of_the_class_and_depend_on_keys_and_seed_alone():
    keys, labels = [f"k{i}" for i in range(30)], torch.arange(30) % 3
    labels[labels == 2] = 1
    found = drawn_images(keys, labels, 3, 4, 0)
    assert [len(rows) for rows in found] == [4, 4, 0]
    assert all((labels[rows] == c).all() for c, rows in enumerate(found))
    turned = drawn_images(keys[::-1], labels.flip(0), 3, 4, 0)
    assert [(29 - rows).tolist() for rows in turned] == [rows.tolist() for rows in found]
    assert drawn_images(keys, labels, 3, 4, 1)[0].tolist() != found[0].tolist()
    assert len(drawn_images(keys, labels, 3, 99, 0)[1]) == 20
    many = F.one_hot(labels, 3)
    assert all(torch.equal(a, b) for a, b in zip(drawn_images(keys, many, 3, 4, 0), found))


def test_points_are_samples_of_the_images_of_each_class():
    image = anywhere(4, 6, spread=-2.0)
    parts = list(points_of(image, [torch.tensor([2, 0]), torch.tensor([], dtype=torch.long)], 4000, 0))
    assert [part.shape for part in parts] == [(8000, 6), (0, 6)]
    for place, row in enumerate((2, 0)):
        own = parts[0].unflatten(0, (4000, 2))[:, place]
        assert ((own.mean(0) - image.mean[row]).abs() < 5 * (image.var[row] / 4000).sqrt()).all()
        torch.testing.assert_close(own.var(0), image.var[row], rtol=0.15, atol=0)


def test_shots_weigh_the_prompts_that_lie_where_the_images_of_the_class_do():
    prompts = anywhere(3, 5, 16)
    rows = torch.tensor([1, 4, 2])
    labels = torch.arange(60) % 3
    mean = prompts.mean[labels, rows[labels]]
    image = Gaussian(mean, torch.full_like(mean, -6))
    keys = [str(i) for i in range(60)]
    fit = reweigh(Reweighing(5), image, keys, prompts, CSD, labels)
    assert fit.weights.argmax(1).tolist() == rows.tolist()
    torch.testing.assert_close(fit.weights.amax(1), torch.full((3,), 101 / 105).double(), atol=0.02, rtol=0)
    chosen = drawn_images(keys, labels, 3, 5, 0)
    again = bprw.fit_weights(prompts, points_of(image, chosen, 20, 0), 2.0, 0.02)
    assert torch.equal(fit.weights, again.weights)
    with pytest.raises(ValueError, match="bprw:5 needs labelled images"):
        reweigh(Reweighing(5), image, keys, prompts, CSD)


def test_without_shots_the_nearest_images_of_the_even_mixture_say_it_whatever_they_show():
    prompts, image = anywhere(3, 5, 16), anywhere(40, 16, seed=2)
    keys = [str(i) for i in range(40)]
    fit = reweigh(Reweighing(), image, keys, prompts, CSD)
    nearest = CSD.pairwise(image, mixture(prompts)).topk(5, dim=0).indices.mT
    again = bprw.fit_weights(prompts, points_of(image, list(nearest), 20, 0), 5.0, 0.02)
    assert torch.equal(fit.weights, again.weights)
    assert torch.equal(fit.weights, reweigh(Reweighing(), image, keys, prompts, CSD, torch.zeros(40)).weights)
    trace = reweigh(Reweighing(2, alpha=3.0, prior="trace"), image, keys, prompts, CSD, torch.ones(40).long())
    mode = 3 * 5 * bprw.inverse_traces(prompts) - 1  # of a class without an image
    torch.testing.assert_close(trace.weights[0], mode[0] / mode[0].sum())
