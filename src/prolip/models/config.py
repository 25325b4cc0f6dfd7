"""A model's configuration: OpenCLIP's JSON layout with a block `prolip_cfg`; validated before anything is built."""
from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from open_clip.coca_model import MultimodalCfg
from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from open_clip.utils import to_2tuple

from prolip.models.config_rules import FLAG, RULES, check_sizes, check_values, count_patches
from prolip.models.towers import check_grid, check_stem
from prolip.utils.documents import check_tree, shown
from prolip.utils.flags import did_you_mean

TOP_KEYS = (
    "embed_dim", "vision_cfg", "text_cfg", "prolip_cfg", "quick_gelu", "init_logit_scale", "init_logit_bias",
    "method_cfg",
)
#: The method of a model whose configuration names none: saved before there were several, or published.
METHOD = "prolip"
DEFAULTS = {block: {f.name: f.default for f in fields(cfg)} for block, cfg in (
    ("vision_cfg", CLIPVisionCfg), ("text_cfg", CLIPTextCfg)
)}
MULTIMODAL = {f.name: f.default for f in fields(MultimodalCfg)}
# What OpenCLIP's configurations may hold that no probabilistic tower has.
FOREIGN = ("timm_", "hf_model_name", "hf_pooler_type", "hf_proj_type")
# What OpenCLIP's default block leaves out in silence.
CUSTOM = ("qk_norm", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc")
SIGLIP_PAD, SIGLIP_MASK = 1, 32000


# Defaults of the released code that differ from OpenCLIP's; the number of heads follows from no shape.
RELEASED_TEXT = {
    "context_length": 64, "vocab_size": 32100, "width": 768, "heads": 12, "layers": 12, "proj_bias": True,
    "embed_unc": True,
}

@dataclass(frozen=True, kw_only=True)
class ProLIPCfg:
    """What ProLIP adds to OpenCLIP's configuration.

    forward: `paper`, or `released`: the forward pass that the published weights were trained with; init_unc_bias:
    initial log sigma^2; init_unc_gain: its initial spread over inputs and dimensions; conv_stem: convolutions in place
    of the patch projection, for small images and little data; mask_padding: hide padding from attention, which the
    paper does not; pad_token_id: what the tokenizer fills a text up with; mask_token_id: [MASK], for masked texts, none
    where the vocabulary has no such token; special_token_ids: start and end of text, never masked.
    """

    forward: str = "paper"
    init_unc_bias: float = -10.0
    init_unc_gain: float = 0.1
    conv_stem: bool = False
    mask_padding: bool = False
    pad_token_id: int = 0
    mask_token_id: int | None = None
    special_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        check_values(vars(self), RULES["prolip_cfg"], "prolip_cfg")
        object.__setattr__(self, "special_token_ids", tuple(self.special_token_ids))
        if self.mask_token_id is not None and self.mask_token_id in (self.pad_token_id, *self.special_token_ids):
            raise ValueError(f"prolip_cfg.mask_token_id is {self.mask_token_id}, which is padding or special as well: a"
                             " masked text would not be known from a shorter one, give [MASK] an id of its own")


PROLIP_KEYS = tuple(f.name for f in fields(ProLIPCfg))


def near_matches(name: str, known: Iterable[str]) -> str:
    """`a, b or c`, the known names closest to `name`; all of them when none is close."""
    known = list(known)
    return did_you_mean(str(name), known, f"choose from {', '.join(known)}")


def check_keys(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Refuse keys that nobody reads."""
    for key in given:
        if key not in known:
            raise ValueError(f"unknown key {shown(key)} in {where}: {near_matches(str(key)[:80], known)}")


def is_released(config: Mapping[str, Any]) -> bool:
    """Whether this is the configuration of a published ProLIP checkpoint: `embed_unc` inside the towers' blocks."""
    blocks = [config.get(block) for block in ("vision_cfg", "text_cfg")]
    return "prolip_cfg" not in config and any(isinstance(block, Mapping) and "embed_unc" in block for block in blocks)


def convert_released(config: Mapping[str, Any]) -> dict[str, Any]:
    """A published checkpoint's configuration in our layout, with the forward pass that its weights need.

    They were trained with SigLIP's vocabulary: pad = end = 1, [MASK] = 32000 (absent where the vocabulary is smaller);
    and with its cleaning, lower case without punctuation, which their configuration does not name. What else it leaves
    out is RELEASED_TEXT; pooling and padding it may name are not read, as the text's [CLS] is pooled.
    """
    out: dict[str, Any] = copy.deepcopy(dict(config))
    for block in ("vision_cfg", "text_cfg"):
        if out.get(block):
            check_block(block, out[block], {"embed_unc": FLAG, "init_unc_bias": RULES["prolip_cfg"]["init_unc_bias"]})
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
    """The configuration with every default of ours filled in, JSON-able.

    ValueError naming the key for keys that nobody reads, values of a wrong type or beyond bounds, and models that
    cannot be built or would be too large.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"the model configuration is {shown(config)}: give name -> value")
    check_tree(config)
    if is_released(config):
        config = convert_released(config)
    out: dict[str, Any] = copy.deepcopy(dict(config))
    check_keys(out, (*TOP_KEYS, "custom_text"), "the model configuration")
    for key in ("embed_dim", "vision_cfg", "text_cfg", "prolip_cfg"):
        if key not in out:
            remedy = "" if key != "prolip_cfg" else (
                ": it is a plain OpenCLIP model. To start from its weights, add a block \"prolip_cfg\" to a copy of its"
                ' configuration, <folder>/config.json ({"mask_token_id": 49408, "special_token_ids": [49406, 49407]}'
                " and text_cfg.vocab_size 49409 for the bundled BPE), then create_model('local-dir:<folder>',"
                " pretrained=<weights file>, init_uncertainty=True)"
            )
            raise ValueError(f"the model configuration has no {key}{remedy}")
    check_values(out, RULES[""], "")
    out.pop("custom_text", None)  # OpenCLIP's switch between two classes; ours is always the custom-text kind
    for block in ("vision_cfg", "text_cfg", "prolip_cfg"):
        check_block(block, out[block])
    out["quick_gelu"] = bool(out.get("quick_gelu"))
    cfg = ProLIPCfg(**out["prolip_cfg"])
    towers = {block: {**defaults, **out[block]} for block, defaults in DEFAULTS.items()}
    for block, tower in towers.items():
        _check_tower(block, tower, out["quick_gelu"])
    _check_image(towers["vision_cfg"], cfg.conv_stem)
    check_sizes({**out, **towers})
    _check_tokens(cfg, out["text_cfg"])
    out["method_cfg"] = {"name": METHOD, **(out.get("method_cfg") or {})}
    out["prolip_cfg"] = {**asdict(cfg), "special_token_ids": list(cfg.special_token_ids)}
    for key, default in (("init_logit_scale", math.log(10)), ("init_logit_bias", -10.0)):
        out[key] = float(default if out.get(key) is None else out[key])
    return out


def check_block(block: str, values: Any, more: Mapping[str, Any] | None = None) -> None:
    """ValueError where a block is no mapping, has a key that nobody reads, or a value that does not fit its rule.

    more: rules of keys that it may have besides.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{block} of the model configuration is {shown(values)}: give name -> value")
    rules = {**RULES[block], **(more or {})}
    check_keys(values, rules, block)
    for key, value in values.items():  # before their types: these have a remedy of their own
        if key.startswith(FOREIGN) and value != DEFAULTS[block][key]:
            raise ValueError(f"{block}.{key}: towers of other libraries have no [UNC]; give width, layers, heads")
    if isinstance(values.get("layers"), (list, tuple)):
        raise ValueError(f"{block}.layers is {shown(values['layers'])}, as a ResNet's: only a transformer has [UNC],"
                         " give its number of blocks")
    check_values({key: value for key, value in values.items() if not key.startswith(FOREIGN)}, rules, block)


def check_openclip(config: Mapping[str, Any]) -> None:
    """ValueError for values of OpenCLIP's configuration that do not fit their rules, and towers that are too large."""
    check_values(config, RULES[""], "")
    if "embed_dim" not in config:
        raise ValueError("the model configuration has no embed_dim: give the width of the common space")
    whole: dict[str, Any] = dict(config)
    decoder = {"multimodal_cfg": MULTIMODAL} if "multimodal_cfg" in config else {}
    for block, defaults in {**DEFAULTS, **decoder}.items():
        values = config.get(block)
        if not isinstance(values, Mapping):
            raise ValueError(f"{block} of the model configuration is {shown(values)}: give name -> value")
        check_keys(values, defaults, block)
        given = {key: value for key, value in values.items() if value is not None}  # as for towers of other libraries
        check_values(given, RULES[block], block)
        whole[block] = {**defaults, **given}
    if isinstance(whole["vision_cfg"]["layers"], int):
        check_sizes(whole)


def _check_tower(block: str, tower: Mapping[str, Any], quick_gelu: bool) -> None:
    """Refuse towers that are no transformers of OpenCLIP's, and settings of which one would win in silence.

    tower: a block with all of its defaults.
    """
    if tower["scaled_cosine_attn"]:
        raise ValueError(f"{block}.scaled_cosine_attn: OpenCLIP's does not run on batches of sequences; use qk_norm")
    custom = [key for key in CUSTOM if tower[key]]
    if tower["block_type"] == "default" and custom:
        raise ValueError(f"{block}.block_type is 'default', which has no {custom[0]}: leave out one of them")
    if quick_gelu and tower["act_kwargs"]:
        raise ValueError(f"{block}.act_kwargs are GELU's and quick_gelu is true: leave out one of them")
    if tower.get("tokenizer_mode"):
        raise ValueError(f"{block}.tokenizer_mode is {tower['tokenizer_mode']!r}, which no tokenizer here has: drop it")
    divisor = "heads" if block == "text_cfg" else "head_width"
    if tower["width"] % tower[divisor]:
        raise ValueError(f"{block}.width {tower['width']} is no multiple of {divisor} {tower[divisor]}: change one")
    if tower["width"] * tower["mlp_ratio"] < 1:
        raise ValueError(f"{block}.mlp_ratio {tower['mlp_ratio']} of the width {tower['width']} leaves no hidden unit:"
                         " enlarge one")


def _check_image(vision: Mapping[str, Any], conv_stem: bool) -> None:
    """Refuse images without a patch, and grids that a stem or fixed positions cannot have."""
    check_grid(vision["image_size"], vision["patch_size"], conv_stem)
    if conv_stem:
        check_stem(vision["width"], to_2tuple(vision["patch_size"])[0])
    if vision["pos_embed_type"] == "sin_cos_2d":
        side = math.isqrt(count_patches(vision))
        height, width = to_2tuple(vision["image_size"])
        rows, columns = to_2tuple(vision["patch_size"])
        if height // rows != side or width // columns != side or vision["width"] % 4:
            raise ValueError("vision_cfg.pos_embed_type is 'sin_cos_2d', which needs a square of patches and a width of"
                             " a multiple of 4: choose learnable, or change image_size, patch_size or width")


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
            both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
            out[key] = {**out[key], **value} if both else value
        else:
            raise TypeError(f"create_model has no option {key!r}: {near_matches(key, (*TOP_KEYS, *PROLIP_KEYS))}")
    return out
