"""create_model and related functions, with OpenCLIP's signatures: from a name or a schema to a model and transforms."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn

import open_clip
import torch
from open_clip.model import set_model_preprocess_cfg
from open_clip.transform import PreprocessCfg, image_transform_v2, merge_preprocess_dict
from torchvision.transforms import Compose

from prolip.data.images import as_rgb
from prolip.methods import find_method
from prolip.models.checkpoint import load_checkpoint
from prolip.models.config import PreprocessRules, check, complete, override
from prolip.models.prolip import ProLIP, cast_to
from prolip.models.registry import check_forward, config_beside, find_weights, get_model_config, grid_of
from prolip.utils.documents import shown
from prolip.utils.flags import did_you_mean

AUTOCAST = ("amp", "amp_bf16", "amp_bfloat16")
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "pure_bf16": torch.bfloat16, "pure_fp16": torch.float16}
PRECISIONS = ("fp32", *AUTOCAST, *CASTS)
# Options of OpenCLIP's create_model without a meaning here: the neutral values, and the remedy for others.
WHOLE = "weights of a whole model are loaded: pretrained=<file>"
OPENCLIP_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "jit": ((False, None), "ProLIP models are not scripted: use torch.compile"),
    "force_custom_text": ((False, True, None), ""),
    "output_dict": ((False, None), "the output is a named tuple"),
    "force_patch_dropout": ((None, 0.0), "patches are dropped with encode_image(x, keep=...)"),
    "pretrained_image": ((False, None), WHOLE),
    "pretrained_text": ((True, False, None), ""),
    "pretrained_image_path": ((None,), WHOLE),
    "pretrained_text_path": ((None,), WHOLE),
}


def create_model(  # noqa: PLR0913 (OpenCLIP's signature)
    model_name: str,
    pretrained: str | None = None,
    load_weights: bool = True,
    precision: str = "fp32",
    device: str | torch.device = "cpu",
    *,
    force_quick_gelu: bool = False,
    force_image_size: int | tuple[int, int] | None = None,
    force_preprocess_cfg: dict[str, Any] | None = None,
    force_context_length: int | None = None,
    cache_dir: str | None = None,
    require_pretrained: bool = False,
    weights_only: bool = True,
    **model_kwargs: Any,
) -> ProLIP:
    """Build a ProLIP model by name, in training mode, with weights if the name or `pretrained` has them.

    model_name: one of `list_models()`, `hf-hub:<org/name>`, or `local-dir:<folder>`. pretrained: a weights file, a
    folder with one, or `hf-hub:<org/name>`; for names without a schema, and folders with only a configuration.
    precision: `fp32`; `bf16`, `fp16` (weights of the blocks cast; norms, heads, embeddings, scale and bias float32);
    `pure_bf16`, `pure_fp16` (embeddings cast too); the `amp` names build float32 weights for autocast.
    force_image_size, force_context_length: positions are interpolated when weights are loaded.
    model_kwargs: keys of the configuration or of its `prolip_cfg`, such as init_logit_bias=-5 or
    method_cfg={"name": "siglip"}; OpenCLIP's other options, such as jit, at their defaults.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}: {did_you_mean(precision, PRECISIONS)}")
    config, preprocess = get_model_config(model_name, cache_dir, pretrained)
    if force_quick_gelu:
        config["quick_gelu"] = True
    if force_image_size is not None:
        config["vision_cfg"]["image_size"] = force_image_size
    if force_context_length is not None:
        config["text_cfg"]["context_length"] = force_context_length
    for name, (neutral, remedy) in OPENCLIP_ONLY.items():
        if (asked := model_kwargs.pop(name, neutral[0])) not in neutral:
            raise ValueError(f"{name}={asked!r} is only for OpenCLIP. Remove it; {remedy}")
    config = complete(override(config, **model_kwargs))
    check(PreprocessRules, force_preprocess_cfg or {}, "preprocess_cfg")
    weights = find_weights(model_name, pretrained, cache_dir) if load_weights else None
    if weights is None and require_pretrained:
        raise ValueError(f"no weights for {model_name}: give pretrained=<file>, or a name with local-dir:")
    theirs = {} if weights is None else config_beside(weights)
    if weights is not None:
        check_forward(config, theirs, weights, {*model_kwargs, *(("quick_gelu",) if force_quick_gelu else ())})
    model = ProLIP(config, low_precision=precision in CASTS)
    given = model.config["method_cfg"]
    method = find_method(given["name"])
    try:
        own = method.config(**given.get("config", {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"method_cfg.config does not match the method {given['name']!r}: {error}") from error
    if method.extend is not None:
        model.extend(partial(method.extend, config=own))
    if weights is not None:
        load_checkpoint(model, weights, weights_only, image_grid=grid_of(theirs))
    cfg = merge_preprocess_dict(asdict(PreprocessCfg()), {**preprocess, "size": model.visual.image_size})
    cfg = merge_preprocess_dict(cfg, force_preprocess_cfg or {})
    set_model_preprocess_cfg(model, cfg)
    model.set_pixel_statistics(cfg["mean"], cfg["std"])
    if precision in CASTS:
        cast_to(model, CASTS[precision], pure=precision.startswith("pure"))
    return model.to(device)


def create_model_and_transforms(  # noqa: PLR0913 (OpenCLIP's signature)
    model_name: str,
    pretrained: str | None = None,
    load_weights: bool = True,
    precision: str = "fp32",
    device: str | torch.device = "cpu",
    *,
    image_mean: tuple[float, ...] | None = None,
    image_std: tuple[float, ...] | None = None,
    image_interpolation: str | None = None,
    image_resize_mode: str | None = None,
    aug_cfg: Any = None,
    force_preprocess_cfg: dict[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[ProLIP, Any, Any]:
    """Return (model, transform for training, transform for evaluation) of Pillow images of any mode."""
    given: dict[str, Any] = {"mean": image_mean, "std": image_std}
    given |= {"interpolation": image_interpolation, "resize_mode": image_resize_mode}
    forced = {**(force_preprocess_cfg or {}), **{key: value for key, value in given.items() if value is not None}}
    model = create_model(model_name, pretrained, load_weights, precision, device, force_preprocess_cfg=forced, **kwargs)
    cfg = PreprocessCfg(**model.visual.preprocess_cfg)
    try:
        train = image_transform_v2(cfg, is_train=True, aug_cfg=aug_cfg)
    except (TypeError, ValueError, IndexError) as error:
        raise ValueError(f"aug_cfg {shown(aug_cfg)} is invalid ({error}): give e.g. {{'scale': (0.9, 1.0)}}") from error
    return model, flattening(train), flattening(image_transform_v2(cfg, is_train=False))


def flattening(transform: Compose) -> Compose:
    """Prepend a conversion to RGB to OpenCLIP's transform, as transparency would else show hidden colours."""
    return Compose([as_rgb, *transform.transforms])


def create_model_from_pretrained(
    model_name: str,
    pretrained: str | None = None,
    precision: str = "fp32",
    device: str | torch.device = "cpu",
    *,
    return_transform: bool = True,
    **kwargs: Any,
) -> Any:
    """Return (model, transform for evaluation), or only the model; ValueError without weights to load."""
    kwargs |= {"precision": precision, "device": device, "require_pretrained": True}
    model, _, preprocess = create_model_and_transforms(model_name, pretrained, **kwargs)
    return (model, preprocess) if return_transform else model


def tokenize(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse OpenCLIP's name, because each of our models has its own vocabulary."""
    raise NotImplementedError("each model has its own tokenizer: prolip.get_tokenizer(<model name>)(texts)")


def list_pretrained(as_str: bool = False) -> list[str] | list[tuple[str, str]]:
    """List OpenCLIP's published weights as OpenCLIP does: (architecture, tag), or `architecture:tag`."""
    return open_clip.list_pretrained(as_str)
