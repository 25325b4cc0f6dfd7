"""OpenCLIP's training augmentation in two halves: workers of the loader cut boxes, the device changes colours."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from open_clip.transform import AugmentationCfg

from prolip.data.augment.colour import ColourConfig
from prolip.data.augment.crops import RandomCrop


def split_augmentation(
    aug_cfg: Mapping[str, Any], size: int | tuple[int, int], dct_scaled: bool = False
) -> tuple[RandomCrop, ColourConfig] | None:
    """(what a worker does to a file, what the device does to a batch), together distributed as OpenCLIP's transform.

    aug_cfg: OpenCLIP's, see its `AugmentationCfg`; size: of the model's images. None for timm's transforms (use_timm),
    which are not ours to split. As in OpenCLIP `color_jitter` does nothing without `color_jitter_prob`, and without
    use_timm `ratio`, `re_prob` and `re_count` do nothing. ValueError for a jitter that is not four numbers.
    """
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in aug_cfg.items()}
    cfg = AugmentationCfg(**given)
    if cfg.use_timm:
        return None
    colours: dict[str, Any] = {"greyscale_prob": cfg.gray_scale_prob or 0.0}
    if cfg.color_jitter_prob:
        if not isinstance(cfg.color_jitter, tuple):
            raise ValueError(f"color_jitter_prob is {cfg.color_jitter_prob} and color_jitter {cfg.color_jitter}: give "
                             "four numbers, brightness, contrast, saturation and hue, or leave both out")
        colours |= {"jitter": cfg.color_jitter, "jitter_prob": cfg.color_jitter_prob}
    height, width = (size, size) if isinstance(size, int) else size
    return RandomCrop((height, width), cfg.scale, dct_scaled), ColourConfig(**colours)
