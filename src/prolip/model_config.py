"""A model's configuration: OpenCLIP's JSON layout with a block `prolip_cfg`; validated before anything is built."""
from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Integral, Real
from typing import Any

from open_clip.model import CLIPTextCfg, CLIPVisionCfg

from prolip.towers import check_form

TOP_KEYS = ("embed_dim", "vision_cfg", "text_cfg", "prolip_cfg", "quick_gelu", "init_logit_scale", "init_logit_bias")
VISION_KEYS = tuple(f.name for f in fields(CLIPVisionCfg))
TEXT_KEYS = tuple(f.name for f in fields(CLIPTextCfg))
DEFAULTS = {block: {f.name: f.default for f in fields(cfg)} for block, cfg in (
    ("vision_cfg", CLIPVisionCfg), ("text_cfg", CLIPTextCfg)
)}
# What OpenCLIP's configurations may hold that no probabilistic tower has.
FOREIGN = ("timm_", "hf_model_name", "hf_pooler_type", "hf_proj_type")
SIGLIP_PAD, SIGLIP_MASK = 1, 32000
POSITIONS = ("learnable", "sin_cos_2d")
SIZES = ("width", "layers", "heads", "head_width", "context_length", "vocab_size", "image_size", "patch_size")
PAIRS = ("image_size", "patch_size")


# Defaults of the released code that differ from OpenCLIP's; the number of heads is told by no shape.
RELEASED_TEXT = {
    "context_length": 64, "vocab_size": 32100, "width": 768, "heads": 12, "layers": 12, "proj_bias": True,
    "embed_unc": True,
}

# What ProLIPCfg's values are: the text "false" would be true.
KINDS: tuple[tuple[tuple[str, ...], tuple[type, ...], str], ...] = (
    (("init_unc_bias", "init_unc_gain"), (float, int), "a number"),
    (("conv_stem", "mask_padding"), (bool,), "true or false"),
    (("pad_token_id",), (int,), "a token's id"),
    (("mask_token_id",), (int, type(None)), "a token's id, or null"),
    (("special_token_ids",), (list, tuple), "a list of tokens' ids"),
)


@dataclass(frozen=True, kw_only=True)
class ProLIPCfg:
    """What ProLIP adds to OpenCLIP's configuration."""

    forward: str = "paper"
    """`paper`, or `released`: the forward pass that the published weights were trained with."""
    init_unc_bias: float = -10.0
    """Initial log sigma^2."""
    init_unc_gain: float = 0.1
    """Initial spread of log sigma^2 over inputs and dimensions."""
    conv_stem: bool = False
    """Convolutions in place of the patch projection: for small images and little data."""
    mask_padding: bool = False
    """Hide padding from attention; the paper does not."""
    pad_token_id: int = 0
    """What the tokenizer fills a text up with."""
    mask_token_id: int | None = None
    """[MASK], for masked texts; none: this vocabulary has no such token."""
    special_token_ids: tuple[int, ...] = ()
    """Start and end of text: never masked."""

    def __post_init__(self):
        check_form(self.forward)
        for names, kinds, wanted in KINDS:
            for name in names:
                value = getattr(self, name)
                if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                    raise ValueError(f"prolip_cfg.{name} is {value!r}: give {wanted}")
        object.__setattr__(self, "special_token_ids", tuple(self.special_token_ids))
        if self.mask_token_id is not None and self.mask_token_id in (self.pad_token_id, *self.special_token_ids):
            raise ValueError(f"prolip_cfg.mask_token_id is {self.mask_token_id}, which is padding or special as well: a"
                             " masked text would not be known from a shorter one, give [MASK] an id of its own")
        if self.init_unc_gain < 0:
            raise ValueError(f"prolip_cfg.init_unc_gain is {self.init_unc_gain}: give 0 or more")


PROLIP_KEYS = tuple(f.name for f in fields(ProLIPCfg))


def near_matches(name: str, known: Iterable[str]) -> str:
    """`a, b or c`, the known names closest to `name`; all of them when none is close."""
    known = list(known)
    lower = {k.lower(): k for k in known}
    close = [lower[k] for k in difflib.get_close_matches(str(name).lower(), lower, n=3, cutoff=0.5)]
    return f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(known)}"


def check_keys(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Refuse keys that nobody reads."""
    for key in given:
        if key not in known:
            raise ValueError(f"unknown key {key!r} in {where}: {near_matches(key, known)}")


def is_released(config: Mapping[str, Any]) -> bool:
    """Whether this is the configuration of a published ProLIP checkpoint: `embed_unc` inside the towers' blocks."""
    return "prolip_cfg" not in config and any(
        "embed_unc" in (config.get(block) or {}) for block in ("vision_cfg", "text_cfg")
    )


def convert_released(config: Mapping[str, Any]) -> dict[str, Any]:
    """A published checkpoint's configuration in our layout, with the forward pass that its weights need.

    They were trained with SigLIP's vocabulary: pad = end = 1, [MASK] = 32000 (absent where the vocabulary is smaller);
    and with its cleaning, lower case without punctuation, which their configuration does not name. What else it leaves
    out is RELEASED_TEXT; pooling and padding it may name are not read, as the text's [CLS] is pooled.
    """
    out: dict[str, Any] = copy.deepcopy(dict(config))
    if out.get("text_cfg"):
        text = {key: value for key, value in out["text_cfg"].items() if key not in ("pool_type", "pad_id")}
        out["text_cfg"] = RELEASED_TEXT | text
    for key in ("output_dict", "cast_dtype"):  # of the class that was published, not of the model
        out.pop(key, None)
    biases = set()
    for block in ("vision_cfg", "text_cfg"):
        if not out.get(block) or not out[block].pop("embed_unc", False):
            raise ValueError(f"{block}.embed_unc is not set: both towers of a ProLIP checkpoint have it")
        biases.add(float(out[block].pop("init_unc_bias", -10.0)))
    if len(biases) > 1:
        raise ValueError(f"init_unc_bias differs between the towers ({sorted(biases)}): ours has one; edit config.json")
    out["text_cfg"]["tokenizer_kwargs"] = {"clean": "canonicalize"} | (out["text_cfg"].get("tokenizer_kwargs") or {})
    vocabulary = out["text_cfg"]["vocab_size"]
    out["prolip_cfg"] = {
        "forward": "released",
        "init_unc_bias": biases.pop(),
        "pad_token_id": SIGLIP_PAD,
        "mask_token_id": SIGLIP_MASK if vocabulary > SIGLIP_MASK else None,
        "special_token_ids": [SIGLIP_PAD],
    }
    return out


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with every default of ours filled in, JSON-able; wrong or unread keys are refused."""
    if is_released(config):
        config = convert_released(config)
    out: dict[str, Any] = copy.deepcopy(dict(config))
    out.pop("custom_text", None)  # OpenCLIP's switch between two classes; ours is always the custom-text kind
    check_keys(out, TOP_KEYS, "the model configuration")
    for key in ("embed_dim", "vision_cfg", "text_cfg", "prolip_cfg"):
        if key not in out:
            remedy = "" if key != "prolip_cfg" else (
                ": it is a plain OpenCLIP model. To start from its weights, add a block \"prolip_cfg\" to a copy of its"
                ' configuration, <folder>/config.json ({"mask_token_id": 49408, "special_token_ids": [49406, 49407]}'
                " and text_cfg.vocab_size 49409 for the bundled BPE), then create_model('local-dir:<folder>',"
                " pretrained=<weights file>, init_uncertainty=True)"
            )
            raise ValueError(f"the model configuration has no {key}{remedy}")
        if key != "embed_dim" and not isinstance(out[key], Mapping):
            raise ValueError(f"{key} of the model configuration is {out[key]!r}: give name -> value")
    check_keys(out["vision_cfg"], VISION_KEYS, "vision_cfg")
    check_keys(out["text_cfg"], TEXT_KEYS, "text_cfg")
    check_keys(out["prolip_cfg"], PROLIP_KEYS, "prolip_cfg")
    for block, defaults in DEFAULTS.items():
        _check_tower(block, {**defaults, **out[block]})
    _check_size("embed_dim", out["embed_dim"])
    cfg = ProLIPCfg(**out["prolip_cfg"])
    _check_tokens(cfg, out["text_cfg"])
    out["prolip_cfg"] = {**asdict(cfg), "special_token_ids": list(cfg.special_token_ids)}
    out["quick_gelu"] = bool(out.get("quick_gelu"))
    for key, default in (("init_logit_scale", math.log(10)), ("init_logit_bias", -10.0)):
        value = out.get(key)
        if not isinstance(value, (Real, type(None))):
            raise ValueError(f"{key} of the model configuration is {value!r}: give a number")
        out[key] = float(default if value is None else value)
    return out


def _check_size(name: str, size: Any) -> None:
    if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{name} is {size!r}: give a whole number of at least 1")


def _check_tower(block: str, tower: Mapping[str, Any]) -> None:
    """Refuse towers that are no transformers of OpenCLIP's. A block with all defaults has `timm_model_name: null`."""
    for key, value in tower.items():
        if key.startswith(FOREIGN) and value != DEFAULTS[block][key]:
            raise ValueError(f"{block}.{key}: towers of other libraries have no [UNC]; give width, layers, heads")
    if isinstance(tower["layers"], (list, tuple)):
        raise ValueError(f"{block}.layers is {tower['layers']!r}, as a ResNet's: only a transformer has [UNC], give its"
                         " number of blocks")
    for name in SIZES:
        sides = tower.get(name, 1)
        if name in PAIRS and isinstance(sides, (list, tuple)) and len(sides) != 2:
            raise ValueError(f"{block}.{name} is {sides!r}: give one number, or height and width")
        for size in sides if name in PAIRS and isinstance(sides, (list, tuple)) else [sides]:
            _check_size(f"{block}.{name}", size)
    if tower["scaled_cosine_attn"]:
        raise ValueError(f"{block}.scaled_cosine_attn: OpenCLIP's does not run on batches of sequences; use qk_norm")
    if tower.get("pos_embed_type", "learnable") not in POSITIONS:
        raise ValueError(f"{block}.pos_embed_type is {tower['pos_embed_type']!r}: choose {' or '.join(POSITIONS)}")
    divisor = "heads" if block == "text_cfg" else "head_width"
    if tower["width"] % tower[divisor]:
        raise ValueError(f"{block}.width {tower['width']} is no multiple of {divisor} {tower[divisor]}: change one")


def _check_tokens(cfg: ProLIPCfg, text_cfg: Mapping[str, Any]) -> None:
    vocabulary = text_cfg.get("vocab_size", CLIPTextCfg.vocab_size)
    ids = {"pad_token_id": cfg.pad_token_id, "mask_token_id": cfg.mask_token_id}
    ids |= {f"special_token_ids[{i}]": token for i, token in enumerate(cfg.special_token_ids)}
    for name, token in ids.items():
        if token is not None and not 0 <= token < vocabulary:
            raise ValueError(f"prolip_cfg.{name} is {token}, but text_cfg.vocab_size is {vocabulary}: enlarge"
                             " vocab_size or give an id of the vocabulary")
    pad = text_cfg.get("pad_id", cfg.pad_token_id)
    if pad != cfg.pad_token_id:
        raise ValueError(f"text_cfg.pad_id is {pad} and prolip_cfg.pad_token_id {cfg.pad_token_id}: drop the former")


def override(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The configuration with keys of its top level or of `prolip_cfg` replaced, by name."""
    out: dict[str, Any] = copy.deepcopy(dict(config))
    for key, value in changes.items():
        if key in PROLIP_KEYS:
            out["prolip_cfg"] = {**out["prolip_cfg"], key: value}
        elif key in TOP_KEYS:
            out[key] = {**out[key], **value} if isinstance(value, Mapping) else value
        else:
            raise TypeError(f"create_model has no option {key!r}: {near_matches(key, (*TOP_KEYS, *PROLIP_KEYS))}")
    return out
