"""Generalised pooling against torch's bidirectional GRU; the convolutional stem, with one token per patch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import prolip
from prolip.models.checkpoint import save_pretrained
from prolip.models.heads import WIDTH, GeneralisedPooling, sinusoids
from prolip.models.towers import ConvStem


@pytest.fixture
def pooling():
    torch.manual_seed(0)
    return GeneralisedPooling()


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both_ways(pooling: GeneralisedPooling) -> nn.GRU:
    """One bidirectional GRU with the same weights."""
    whole = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
    for name, x in pooling.forward_gru.named_parameters():
        getattr(whole, name).data.copy_(x)
    for name, x in pooling.backward_gru.named_parameters():
        getattr(whole, f"{name}_reverse").data.copy_(x)
    return whole


def by_formula(pooling, features: torch.Tensor, lengths: list[int], gru: nn.GRU | None = None) -> torch.Tensor:
    gru, longest = gru or both_ways(pooling), max(lengths)
    place = sinusoids(longest, WIDTH, torch.device("cpu")).to(features.dtype).expand(len(lengths), -1, -1)
    packed = pack_padded_sequence(place, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    out = pad_packed_sequence(gru(packed)[0], batch_first=True)[0]
    rows = []
    for row, length in enumerate(lengths):
        score = pooling.score((out[row, :length, :WIDTH] + out[row, :length, WIDTH:]) / 2)[:, 0]
        weight = (score / 0.1).exp() / (score / 0.1).exp().sum()
        rows.append(sum(w * v for w, v in zip(weight, features[row, :length].sort(0, descending=True).values)))
    return torch.stack(rows)


def test_it_is_the_weighted_sum_of_sorted_values_with_padding_left_out(pooling):
    features, lengths = draw(5, 9, 7), [9, 4, 1, 6, 4]
    valid = torch.arange(9) < torch.tensor(lengths)[:, None]
    expected = by_formula(pooling, features, lengths)
    torch.testing.assert_close(pooling(features, valid), expected, rtol=1e-4, atol=1e-5)
    padded = features.masked_fill(~valid[..., None], 1e6)
    assert torch.equal(pooling(padded, valid), pooling(features, valid))


def test_equal_scores_give_the_mean_and_a_steep_one_the_maximum(pooling):
    features = draw(3, 5, 4)
    nn.init.zeros_(pooling.score.weight)
    torch.testing.assert_close(pooling(features), features.mean(1))
    torch.testing.assert_close(pooling.weights(3, torch.tensor([[2]])), torch.tensor([[0.5, 0.5, 0.0]]))


def test_gradients_reach_features_and_weights_and_padding_gets_none(pooling):
    features = draw(3, 5, 4).requires_grad_()
    valid = torch.arange(5) < torch.tensor([5, 2, 3])[:, None]
    pooling(features, valid).square().sum().backward()
    assert features.grad.isfinite().all() and (features.grad[~valid] == 0).all() and (features.grad[valid] != 0).all()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in pooling.parameters())


def test_autocast_changes_nothing(pooling):
    features = draw(3, 5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found = pooling(features)
    assert found.dtype == torch.float32 and torch.equal(found, pooling(features))


def test_gradients_are_those_of_the_formula_and_of_differences():
    torch.manual_seed(0)
    pooling, lengths = GeneralisedPooling(width=4).double(), [6, 2, 5, 1]
    features = draw(4, 6, 3).double().requires_grad_()
    valid = torch.arange(6) < torch.tensor(lengths)[:, None]
    names = [name for name, _ in pooling.named_parameters()]

    def of(x, *parameters):
        return torch.func.functional_call(pooling, dict(zip(names, parameters)), (x, valid))

    assert torch.autograd.gradcheck(of, (features, *(p.detach().requires_grad_() for p in pooling.parameters())))


# --- the convolutional stem ---
@pytest.mark.parametrize("patch, grid", [(2, 16), (8, 4), (16, 2)])
def test_one_token_per_patch(patch, grid):
    assert ConvStem(32, patch)(torch.randn(2, 3, 32, 32)).shape == (2, 32, grid, grid)


@pytest.mark.parametrize("patch", [1, 12, 14])
def test_patch_sizes_that_do_not_halve_are_refused(patch):
    with pytest.raises(ValueError, match="a patch_size that is a power of two"):
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


def test_stem_survives_saving_and_loading(tmp_path):
    model = prolip.create_model("ProLIP-ViT-test", conv_stem=True).eval()
    save_pretrained(model, tmp_path / "saved")
    again = prolip.create_model(f"local-dir:{tmp_path / 'saved'}").eval()
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(again.encode_image(x).mean, model.encode_image(x).mean)
