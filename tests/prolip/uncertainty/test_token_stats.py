"""Statistics of images and texts at both ends of a tower, from one pass."""

from __future__ import annotations

import pytest
import torch
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg, CustomTextCLIP
from torch import nn

from prolip.gaussian import Gaussian
from prolip.models.prolip import ProLIP
from prolip.scores import MeanScore
from prolip.uncertainty.heads import Parts, VarianceHead
from prolip.uncertainty.openclip import FittedCLIP, PointModel
from prolip.uncertainty.token_stats import encode_with_stats

VISION = {"image_size": 16, "patch_size": 8, "width": 16, "layers": 2, "head_width": 8}
TEXT = {"context_length": 6, "vocab_size": 50, "width": 24, "heads": 2, "layers": 2}


def pixels():
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def ours(**own):
    torch.manual_seed(0)
    own = {"mask_token_id": None, "special_token_ids": [48, 49], **own}
    return ProLIP({"embed_dim": 12, "vision_cfg": VISION, "text_cfg": TEXT, "prolip_cfg": own}).eval()


def theirs(kind=CLIP, **vision):
    torch.manual_seed(0)
    return kind(12, CLIPVisionCfg(**VISION | vision), CLIPTextCfg(**TEXT)).eval()


def with_heads(model):
    return FittedCLIP(model, *(VarianceHead(Parts(dim=12)) for _ in range(2)), MeanScore())


def ids():
    return torch.tensor([[48, 3, 7, 49, 0, 0], [48, 9, 49, 0, 0, 0], [48, 3, 7, 11, 2, 49]])


def mean_and_deviation(tokens):
    return torch.cat([tokens.mean(1), tokens.std(1, correction=0)], 1)


@pytest.mark.parametrize("form", ["paper", "released"])
def test_first_is_of_the_tokens_that_the_first_block_of_our_tower_takes(form):
    model = ours(forward=form)
    found = encode_with_stats(model, pixels())
    tokens = model.visual._embeds(pixels())  # [CLS], [UNC], patches
    assert tokens.shape == (3, 6, 16)
    torch.testing.assert_close(found.token_stats, mean_and_deviation(tokens))
    with torch.no_grad():
        assert all(torch.equal(x, y) for x, y in zip(found.z, model.encode_image(pixels())))


@pytest.mark.parametrize("kind", [CLIP, CustomTextCLIP])
@pytest.mark.parametrize("wrap", [PointModel, with_heads, lambda model: PointModel(with_heads(model))])
@pytest.mark.parametrize("vision", [{}, {"pool_type": "avg", "final_ln_after_pool": True}])
def test_models_around_one_of_openclip_are_looked_through(kind, wrap, vision):
    model = theirs(kind, **vision)
    found = encode_with_stats(wrap(model), pixels())
    torch.testing.assert_close(found.token_stats, mean_and_deviation(model.visual._embeds(pixels())))
    torch.testing.assert_close(found.z.mean, model.encode_image(pixels(), normalize=True))


def test_a_tower_of_timm_has_first_tokens_too():
    model = theirs(CustomTextCLIP, timm_model_name="test_vit", timm_pool="token", timm_proj="linear")
    x = torch.randn(2, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    trunk = model.visual.trunk
    tokens = trunk.norm_pre(trunk._pos_embed(trunk.patch_embed(x)))
    torch.testing.assert_close(encode_with_stats(PointModel(model), x).token_stats, mean_and_deviation(tokens))


class Convolutions(nn.Module):
    """A model without a transformer."""

    def __init__(self, wrapped):
        super().__init__()
        self.visual, self.wrapped = nn.Sequential(nn.Flatten(), nn.Linear(768, 12)), wrapped

    def encode_image(self, x):
        return self.wrapped(self.visual(x))

    encode_text = encode_image


def test_a_tower_without_a_transformer_has_no_first_tokens():
    model = Convolutions(lambda x: Gaussian(nn.functional.normalize(x, dim=1), torch.zeros_like(x)))
    for side in ("image", "text"):
        found = encode_with_stats(model, pixels(), side)
        assert found.token_stats is None and found.z.mean.shape == (3, 12)


def test_nothing_stays_on_the_model_even_after_an_error():
    model = ours()
    found = encode_with_stats(model, pixels())
    assert not any(x.requires_grad for x in (*found.z, found.token_stats))
    with pytest.raises(ValueError, match="16"):
        encode_with_stats(model, pixels()[..., :8])
    assert not model.visual.transformer._forward_pre_hooks
