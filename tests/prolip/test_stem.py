"""The convolutional stem: one token per patch, a row for itself, usable by the tower and its masked views."""

import pytest
import torch

import prolip
from prolip.models.towers import ConvStem


@pytest.mark.parametrize("patch, grid", [(2, 16), (8, 4), (16, 2)])
def test_one_token_per_patch(patch, grid):
    assert ConvStem(32, patch)(torch.randn(2, 3, 32, 32)).shape == (2, 32, grid, grid)


@pytest.mark.parametrize("patch", [1, 12, 14])
def test_patch_sizes_that_do_not_halve_are_refused(patch):
    with pytest.raises(ValueError, match=f"patch_size {patch} must be a power of two"):
        ConvStem(32, patch)


def test_a_row_does_not_depend_on_its_batch():
    torch.manual_seed(0)
    stem, x = ConvStem(32, 8).train(), torch.randn(5, 3, 32, 32)
    torch.testing.assert_close(stem(x)[1:3], stem(x[1:3]), rtol=1e-5, atol=1e-6)


def test_tower_with_a_stem_sees_only_the_kept_patches():
    torch.manual_seed(0)
    model = prolip.create_model("ProLIP-ViT-test", conv_stem=True)
    assert isinstance(model.visual.conv1, ConvStem)
    x = torch.randn(2, 3, 32, 32, requires_grad=True)
    keep = torch.tensor([[0, 3, 7], [1, 2, 15]])
    model.encode_image(x, keep=keep).mean.square().cumsum(-1).sum().backward()
    grid = x.grad.abs().reshape(2, 3, 4, 8, 4, 8).sum((1, 3, 5)).flatten(1)
    for row, kept in zip(grid, keep):
        assert set(row.nonzero().flatten().tolist()) == set(kept.tolist())
    assert all(p.grad is not None for p in model.visual.conv1.parameters())


def test_keeping_every_patch_is_the_whole_image():
    torch.manual_seed(0)
    model = prolip.create_model("ProLIP-ViT-test", conv_stem=True)
    x, every = torch.randn(3, 3, 32, 32), torch.arange(16).expand(3, -1)
    torch.testing.assert_close(model.visual._embeds(x, every), model.visual._embeds(x), rtol=1e-5, atol=1e-6)


def test_stem_survives_saving_and_loading(tmp_path):
    from prolip.models.checkpoint import save_pretrained

    model = prolip.create_model("ProLIP-ViT-test", conv_stem=True).eval()
    save_pretrained(model, tmp_path / "saved")
    again = prolip.create_model(f"local-dir:{tmp_path / 'saved'}").eval()
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(again.encode_image(x).mean, model.encode_image(x).mean)


def test_channels_are_normalised_in_eight_groups_or_as_many_as_divide_them():
    """Trained weights need the same groups, and no shape tells them."""
    norms = [layer for layer in ConvStem(24, 4) if isinstance(layer, torch.nn.GroupNorm)]
    assert [(norm.num_groups, norm.num_channels) for norm in norms] == [(4, 12), (8, 24)]
