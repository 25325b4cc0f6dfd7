"""Traversals against a loop over images, steps and captions."""

import pytest
import torch
from test_entailment import gaussians

from prolip.gaussian import Gaussian
from prolip.hierarchy import traversal, traverse
from prolip.measures import inclusion_test, log_inclusion


def by_loops(image, text, empty, root, steps, measure=log_inclusion):
    """Captions met, one image and one step at a time."""
    paths, roots = [], []
    for i in range(len(image.mean)):
        z = image.select([i])
        start = text.mean[(text.mean @ image.mean[i]).argmax()]
        if root == "empty":
            end = empty.mean[0]
        else:
            scores = torch.stack([measure(z, text.select([j]))[0] for j in range(len(text.mean))])
            end = torch.nn.functional.normalize((text.mean[scores.argmax()] + empty.mean[0]) / 2, dim=0)
        points = [(1 - s / (steps - 1)) * start + s / (steps - 1) * end for s in range(steps)]
        paths.append([int((text.mean @ torch.nn.functional.normalize(p, dim=0)).argmax()) for p in points])
        roots.append(end)
    return torch.tensor(paths), torch.stack(roots)


@pytest.mark.parametrize("root", ["included", "empty"])
@pytest.mark.parametrize("inclusion", ["log_inclusion", "inclusion_test"])
def test_traversal_is_the_loop_over_images_and_steps_however_it_is_cut(root, inclusion, monkeypatch):
    image, text, empty = gaussians(9), gaussians(30, seed=1), gaussians(1, seed=2)
    measure = {"log_inclusion": log_inclusion, "inclusion_test": inclusion_test}[inclusion]
    met, ends = by_loops(image, text, empty, root, 11, measure)
    for elements in (traversal.ELEMENTS, 1):
        monkeypatch.setattr(traversal, "ELEMENTS", elements)
        found = traverse(image, text, empty, root, 11, inclusion)
        assert torch.equal(found.met, met) and torch.allclose(found.root, ends, atol=1e-6)
        assert torch.equal(found.nearest, met[:, 0])
    assert len(met.unique()) > 3


def test_the_root_includes_the_image_and_is_not_the_farthest_wide_one_and_paths_join_repeats():
    image = Gaussian(torch.tensor([[1.0, 0.0]]), torch.full((1, 2), -4.0))
    text = Gaussian(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.full((2, 2), -3.0))
    assert traverse(image, text, text.select([0])).root_caption.item() == 0
    assert traverse(image, text, text.select([0]), inclusion="inclusion_test").root_caption.item() == 1
    met = torch.tensor([[2, 2, 0, 0, 1]])
    found = traversal.Traversal(met[:, 0], met[:, 1], torch.zeros(1, 2), met)
    assert found.path(0) == [2, 0, 1]


def test_what_cannot_be_traversed_is_refused():
    image, text, empty = gaussians(2), gaussians(3, seed=1), gaussians(1, seed=2)
    points, nothing = Gaussian(text.mean, torch.full_like(text.mean, -torch.inf)), text.select([])
    for options, words in (
        ({"root": "top"}, "root 'top' is unknown"),
        ({"inclusion": "csd"}, "inclusion 'csd' is unknown"),
        ({"steps": 1}, "1 steps"),
    ):
        with pytest.raises(ValueError, match=words):
            traverse(image, text, empty, **options)
    for images, texts, words in (
        (image, points, "root='empty'"),
        (points, text, "root='empty'"),
        (image, nothing, "0 capt"),
    ):
        with pytest.raises(ValueError, match=words):
            traverse(images, texts, empty)
    assert traverse(image, points, empty, "empty").root_caption.tolist() == [-1, -1]
