"""--aug-cfg is shared between workers and device wherever it can be."""

import pytest
import torch
from PIL import Image

from prolip.data.augment.colour import ColourJitter
from prolip.data.augment.crops import RandomCrop
from prolip.random import Draws
from prolip.utils.flags import FlagError
from training.config import build_config
from training.model import build_augment, build_model

SMALL = {"model": "ProLIP-ViT-test"}


def settings(**model):
    return build_config("prolip", {"model": SMALL | model, "optim": {"warmup": 0}})


def parts(config):
    model, transform, _ = build_model(config, torch.device("cpu"))
    return transform, build_augment(config, model, torch.device("cpu"), Draws())


def test_the_papers_augmentation_is_shared_by_default():
    transform, augment = parts(settings())
    assert isinstance(transform, RandomCrop) and transform.scale == (0.8, 1.0) and not transform.dct_scaled
    assert isinstance(augment, ColourJitter) and augment.config.jitter == (0.32, 0.32, 0.32, 0.08)


@pytest.mark.parametrize("model", [{"openclip_transform": True}, {"aug_cfg": {"use_timm": True, "scale": (0.9, 1.0)}}])
def test_what_is_not_shared_comes_normalised_from_the_workers(model):
    transform, augment = parts(settings(**model))
    assert augment is None and transform(Image.new("RGB", (40, 40))).dtype == torch.float32


@pytest.mark.parametrize(
    "other",
    [
        {"device_augment": True},
        {"openclip_transform": True},
        {"aug_cfg": {"use_timm": True}},
    ],
)
def test_scaled_decoding_is_refused_where_it_would_do_nothing(other):
    with pytest.raises(FlagError, match="--dct-scaled-decoding is for --aug-cfg"):
        settings(dct_scaled_decoding=True, **other)
