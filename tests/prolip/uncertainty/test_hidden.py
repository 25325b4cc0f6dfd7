"""What is kept of a tower before its last projection."""
from __future__ import annotations

import pytest
import torch
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg, CustomTextCLIP
from torch import nn

from prolip.gaussian import Gaussian
from prolip.models.heads import project
from prolip.models.prolip import ProLIP
from prolip.uncertainty.hidden import encode_hidden

VISION = {"image_size": 16, "patch_size": 8, "width": 16, "layers": 2, "head_width": 8}
TEXT = {"context_length": 6, "vocab_size": 50, "width": 24, "heads": 2, "layers": 2}
IDS = torch.tensor([[48, 3, 9, 49, 0, 0], [48, 7, 7, 2, 11, 49]])


def pixels():
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def ours(**own):
    torch.manual_seed(0)
    own = {"mask_token_id": None, "special_token_ids": [48, 49], **own}
    return ProLIP({"embed_dim": 12, "vision_cfg": VISION, "text_cfg": TEXT, "prolip_cfg": own}).eval()


def theirs(kind, **vision):
    torch.manual_seed(0)
    return kind(12, CLIPVisionCfg(**VISION | vision), CLIPTextCfg(**TEXT)).eval()


def unit(x):
    return nn.functional.normalize(x, dim=-1)


@pytest.mark.parametrize("form", ["paper", "released"])
def test_last_projection_of_our_pooled_features_gives_the_means(form):
    model = ours(forward=form)
    image, text = encode_hidden(model, "image", pixels()), encode_hidden(model, "text", IDS)
    assert image.pooled.shape == (3, 16) and text.pooled.shape == (2, 24)
    torch.testing.assert_close(unit(project(image.pooled, model.visual.proj)), image.mean)
    torch.testing.assert_close(unit(project(text.pooled, model.text.text_projection)), text.mean)
    torch.testing.assert_close(image.mean, model.encode_image(pixels()).mean)


@pytest.mark.parametrize("kind", [CLIP, CustomTextCLIP])
@pytest.mark.parametrize("vision", [{}, {"pool_type": "avg"}, {"final_ln_after_pool": True, "pool_type": "avg"}])
def test_last_projection_of_openclips_pooled_features_gives_its_features(kind, vision):
    model = theirs(kind, **vision)
    tower = model.text if kind is CustomTextCLIP else model
    image, text = encode_hidden(model, "image", pixels()), encode_hidden(model, "text", IDS)
    torch.testing.assert_close(image.pooled @ model.visual.proj, model.encode_image(pixels()))
    torch.testing.assert_close(text.pooled @ tower.text_projection, model.encode_text(IDS))
    torch.testing.assert_close(image.mean, model.encode_image(pixels(), normalize=True))


def test_first_is_mean_and_deviation_of_the_tokens_that_the_first_block_takes():
    model = theirs(CustomTextCLIP)
    tokens = model.text.token_embedding(IDS) + model.text.positional_embedding
    found = encode_hidden(model, "text", IDS).first
    torch.testing.assert_close(found, torch.cat([tokens.mean(1), tokens.std(1, correction=0)], 1))


def test_first_of_an_image_sees_what_its_patches_are_but_not_their_order():
    model = theirs(CLIP)
    nn.init.zeros_(model.visual.positional_embedding)
    x = pixels()
    found, turned = (encode_hidden(model, "image", y) for y in (x, x.roll(8, dims=3)))
    torch.testing.assert_close(found.first, turned.first)
    assert (found.first - encode_hidden(model, "image", x + 1).first).abs().amax() > 0.1


class Convolutions(nn.Module):
    """A model without a transformer."""

    def __init__(self, wrapped):
        super().__init__()
        self.visual, self.wrapped = nn.Sequential(nn.Flatten(), nn.Linear(768, 12)), wrapped

    def encode_image(self, x):
        return self.wrapped(self.visual(x))


def test_means_stand_for_what_a_tower_without_a_transformer_hides():
    for wrapped in (nn.Identity(), lambda x: Gaussian(x, torch.zeros_like(x))):
        model = Convolutions(wrapped)
        found = encode_hidden(model, "image", pixels())
        torch.testing.assert_close(found.mean, unit(model.visual(pixels())))
        assert torch.equal(found.pooled, found.mean) and torch.equal(found.first, found.mean)


def test_nothing_stays_on_the_model_even_after_an_error():
    model = ours()
    encode_hidden(model, "image", pixels())
    with pytest.raises(ValueError, match="16"):
        encode_hidden(model, "image", pixels()[..., :8])
    transformer = model.visual.transformer
    assert not transformer._forward_hooks and not transformer._forward_pre_hooks
    assert not any(x.requires_grad for x in encode_hidden(model, "image", pixels()))


def test_errors_say_what_is_wanted():
    with pytest.raises(ValueError, match="'sound': choose one of image, text"):
        encode_hidden(ours(), "sound", pixels())
    with pytest.raises(TypeError, match="encodes to a tuple of Tensor, want a Gaussian or a tensor"):
        encode_hidden(Convolutions(lambda x: (x, x)), "image", pixels())
