"""OpenCLIP's augmentation settings, shared out to the host and the device."""

import io
import warnings
from random import Random

import numpy as np
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

from prolip.data.augment.colour import ColourConfig, ColourJitter, split_augmentation
from prolip.data.augment.crops import RandomCrop
from prolip.data.samples import seed_rng

PAPER = {
    "scale": (0.8, 1.0),
    "color_jitter": (0.32, 0.32, 0.32, 0.08),
    "color_jitter_prob": 0.8,
    "gray_scale_prob": 0.2,
}


def test_the_papers_settings_are_shared_out():
    crop, colours = split_augmentation(PAPER, 224)
    assert crop == RandomCrop((224, 224), (0.8, 1.0), dct_scaled=False)
    assert colours == ColourConfig(jitter=(0.32, 0.32, 0.32, 0.08), jitter_prob=0.8, greyscale_prob=0.2)


def test_lists_of_a_saved_config_and_image_sizes_of_two_numbers_are_understood():
    saved = {name: list(value) if isinstance(value, tuple) else value for name, value in PAPER.items()}
    crop, colours = split_augmentation(saved, (128, 256), dct_scaled=True)
    assert crop == RandomCrop((128, 256), (0.8, 1.0), dct_scaled=True)
    assert colours == split_augmentation(PAPER, 224)[1]


def test_defaults_are_openclips():
    crop, colours = split_augmentation({}, 32)
    assert crop.scale == (0.9, 1.0) and not colours.changes


def test_jitter_without_its_probability_does_nothing_as_in_openclip():
    crop, colours = split_augmentation({"color_jitter": 0.4}, 32)
    assert not colours.changes


def test_timms_transforms_are_not_ours():
    assert split_augmentation({"use_timm": True, "color_jitter": 0.4}, 32) is None


def test_settings_that_openclip_refuses_are_refused():
    with pytest.raises(ValueError, match="give four numbers"):
        split_augmentation({"color_jitter": 0.4, "color_jitter_prob": 0.5}, 32)
    with pytest.raises(ValueError, match="give four numbers"):
        split_augmentation({"color_jitter": (0.4, 0.4, 0.4), "color_jitter_prob": 0.5}, 32)
    with pytest.raises(TypeError, match="blur"):
        split_augmentation({"blur": 1}, 32)


def test_both_halves_together_make_images_distributed_as_openclips():
    """Mean and spread of the normalised images of one file."""
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (6, 7, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    small.resize((70, 60), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=95)
    data, cfg, count = buffer.getvalue(), PreprocessCfg(size=24), 1200
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = image_transform_v2(cfg, is_train=True, aug_cfg=PAPER)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    seed_rng(0)
    want = torch.stack([theirs(image) for _ in range(count)])
    crop, colours = split_augmentation(PAPER, cfg.size)
    pixels = torch.stack([crop.from_file(data, Random(seed)) for seed in range(count)])
    got = ColourJitter(colours, cfg.mean, cfg.std)(pixels, step=0)
    for statistic in (lambda x: x.mean((2, 3)), lambda x: x.std((2, 3)), lambda x: x[..., 3, 5]):
        mine, others = statistic(got), statistic(want)
        for moment in (lambda x: x.mean(0), lambda x: x.std(0)):
            off = (moment(mine) - moment(others)).abs()
            assert (off < 5 * others.std(0) / count**0.5).all()
