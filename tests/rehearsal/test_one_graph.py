"""Towers as `--torchcompile` traces them in training: one graph each, with and without masked views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_towers import inputs, small_folder, small_towers

import prolip
from prolip.gaussian import Gaussian

#: Our own towers; OpenCLIP's with readers: its own, and timm's pyramid. (A text tower of transformers' installs hooks
#: in its first pass, under a lock that the compiler does not trace.)
OWN, NAMES = "ProLIP-ViT-test", ("ViT-B-16", "convnext_base")


@pytest.fixture(scope="module", params=[OWN, *NAMES])
def model(request, tmp_path_factory):
    """A small model in training mode."""
    torch.manual_seed(0)
    if request.param == OWN:
        yield prolip.create_model(OWN).train()
        return
    place = tmp_path_factory.mktemp("small")
    with small_towers(place / "transformers"):
        yield prolip.create_model(f"local-dir:{small_folder(request.param, place / request.param)}").train()


def batch_of(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, and texts with padding."""
    if model.text.has_reader:
        return inputs(model)
    ids = torch.randint(3, 900, (3, model.context_length))
    ids[:, 9:] = model.pad_token_id
    return torch.randn(3, 3, *model.image_size), ids


def traced(tower: Any, *given: Any, **options: Any) -> Gaussian:
    """Run a tower as one graph; torch raises an error for several. Shapes are fixed, as in a run."""
    torch.compiler.reset()
    return torch.compile(tower, backend="eager", fullgraph=True, dynamic=False)(*given, **options)


def gradient(tower: Any, z: Gaussian) -> torch.Tensor:
    """Return the first parameter's gradient of a loss of both parts."""
    wanted = [p for p in tower.parameters() if p.requires_grad]
    found = torch.autograd.grad(z.mean[:, 0].sum() + z.log_var.sum(), wanted, allow_unused=True)
    return next(x for x in found if x is not None)


def check(tower: Any, *given: Any, **options: Any) -> None:
    """One graph, with the values and gradients of the plain call."""
    z = []
    for call in (traced, lambda tower, *given, **options: tower(*given, **options)):
        torch.manual_seed(1)  # of drop path and dropout
        z.append(call(tower, *given, **options))
    assert z[0].mean.requires_grad and z[0].log_var.requires_grad
    for graph, plain in zip(*z):
        torch.testing.assert_close(graph, plain)
    torch.testing.assert_close(*(gradient(tower, each) for each in z), rtol=1e-4, atol=1e-6)


def test_an_image_tower_is_one_graph_with_and_without_masked_views(model):
    images, _ = batch_of(model)
    check(model.visual, images, keep=torch.arange(0, model.num_patches, 2).expand(len(images), -1))
    if not model.visual.has_reader:
        check(model.visual, images)


def test_a_text_tower_is_one_graph(model):
    check(model.text, batch_of(model)[1])


@pytest.mark.parametrize("method", ["pcme", "likelihood"])  # the compiler traces no GRU, which the others pool by
def test_towers_with_heads_of_a_method_are_one_graph_each(method):
    model = prolip.create_model(OWN, method_cfg={"name": method}).train()
    images, texts = batch_of(model)
    for tower, given in ((model.visual, images), (model.text, texts)):
        z = traced(tower, given)
        torch.testing.assert_close(z.mean, tower(given).mean)
