"""Model configurations: OpenCLIP's JSON layout with a block `prolip_cfg`, validated before anything is built."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_type_hints

from open_clip.coca_model import MultimodalCfg
from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from open_clip.transform import PreprocessCfg
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from prolip.utils.documents import check_tree, shown
from prolip.utils.flags import did_you_mean

#: Bundled configurations of transformers' text towers; OpenCLIP would fetch them from the hub.
TRANSFORMERS = Path(__file__).parent / "configs" / "transformers"
MAX_PARAMETERS = 20_000_000_000  # limit for a tower: about 80 GB of float32
MAX_TOKENS = 2**16  # patches of an image or tokens of a text: attention is quadratic in them

Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Layers = Annotated[int, Field(ge=1, le=1000)]
Token = Annotated[int, Field(ge=0, lt=2**22)]
Side = Annotated[int, Field(ge=1, le=2**14)]
#: Height and width, or one number for both.
Sides = Annotated[
    list[Side],
    Field(min_length=2, max_length=2, strict=False),
    BeforeValidator(lambda sides: sides if isinstance(sides, (list, tuple)) else [sides, sides]),
]
Share = Annotated[float, Field(ge=0, le=1)]
Exponent = Annotated[float, Field(ge=-80, le=80)]
SpecialToken = Annotated[str, Field(pattern=r"^<\w{1,64}>$")]


def three(least: float, most: float) -> Any:
    """Return the type of a list with one number per colour."""
    return Annotated[list[Annotated[float, Field(ge=least, le=most)]], Field(min_length=3, max_length=3, strict=False)]


class Rules(BaseModel, strict=True, extra="forbid", allow_inf_nan=False, str_max_length=500, validate_default=True):
    """Base of all rules: values have their key's type without conversion, and numbers are finite."""


class TokenizerRules(Rules):
    """OpenCLIP's options of tokenizers; special tokens become part of a regular expression."""

    clean: Literal["canonicalize", "lower", "whitespace"] = "whitespace"
    reduction_mask: Literal["simple", "random", "shuffle", "syntax"] = "simple"
    strip_sep_token: bool = False
    language: str = ""
    additional_special_tokens: Annotated[list[SpecialToken], Field(max_length=1000, strict=False)] = []


def rules_of(name: str, /, **keys: Any) -> Any:
    """Create rules for keys, each with its type and default."""
    return create_model(name, __base__=Rules, **keys)


COUNTS = ("width", "heads", "head_width", "context_length", "attn_pooler_queries", "attn_pooler_heads", "dim_head")
#: Bounds of OpenCLIP's fields; the others have the types of its dataclasses.
BOUNDS: dict[str, Any] = dict.fromkeys((*COUNTS, "n_queries"), Count) | {
    "layers": Layers,
    "image_size": Sides,
    "patch_size": Sides,
    "vocab_size": Annotated[int, Field(ge=1, le=2**22)],
    "pad_id": Token,
    "eos_id": Token,
    "mlp_ratio": Annotated[float, Field(ge=0.01, le=100)],
    "ls_init_value": Annotated[float, Field(ge=0, le=1000)] | None,
    "block_type": Literal["default", "custom"] | None,
    "act_kwargs": rules_of("GELURules", approximate=(Literal["none", "tanh"], "none")) | None,
    "norm_kwargs": rules_of("NormRules", eps=(Annotated[float, Field(ge=1e-12, le=1)], 1e-5)) | None,
    "patch_dropout": Annotated[Share, Field(le=0.999)],
    "attentional_pool": bool | Literal["parallel", "cascade"],
    "timm_drop": Share,
    "timm_drop_path": Share | None,
    "pos_embed_type": Literal["learnable", "sin_cos_2d"],
    "pool_type": Literal["first", "last", "argmax", "eos", "none"],
    "proj_type": Literal["linear", "none"],
    "tokenizer_mode": Literal["clips"] | None,
    "tokenizer_kwargs": TokenizerRules | None,
}
PREPROCESS: dict[str, Any] = {
    "size": Sides,
    "mode": Literal["RGB"],
    "mean": three(-256, 256),
    "std": three(1e-6, 256),
    "interpolation": Literal["bicubic", "bilinear", "random"],
    "resize_mode": Literal["shortest", "longest", "squash"],
    "fill_color": Annotated[int, Field(ge=0, le=255)],
}


def of_dataclass(config: type, **own: Any) -> Any:
    """Create rules for every field of a dataclass, from `own`, BOUNDS, and its types."""
    types = {**get_type_hints(config), **BOUNDS, **own}
    return rules_of(config.__name__, **{field.name: (types[field.name], field.default) for field in fields(config)})


STAGES = Layers | Annotated[list[Layers], Field(min_length=4, max_length=4)]
VisionRules = of_dataclass(CLIPVisionCfg, layers=STAGES, pool_type=Literal["tok", "avg", "none"])
TextRules, DecoderRules = of_dataclass(CLIPTextCfg), of_dataclass(MultimodalCfg)
PreprocessRules = of_dataclass(PreprocessCfg, **{key: kind | None for key, kind in PREPROCESS.items()})


class TwoTowers(Rules):
    """The keys common to OpenCLIP's configurations and ours."""

    embed_dim: Count
    vision_cfg: VisionRules  # type: ignore[valid-type]
    text_cfg: TextRules  # type: ignore[valid-type]
    quick_gelu: bool | None = None
    custom_text: bool | None = None
    init_logit_scale: Exponent | None = None
    init_logit_bias: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None


class OpenCLIPRules(TwoTowers, extra="ignore"):
    """Rules of OpenCLIP's configurations, which ignore unknown keys."""

    multimodal_cfg: DecoderRules | None = None  # type: ignore[valid-type]


def check_keys(given: Iterable[Any], known: Iterable[str], where: str) -> None:
    """Raise ValueError for an unknown key."""
    for key in given:
        if key not in known:
            raise ValueError(f"unknown key {shown(key)} in {where}: {did_you_mean(str(key)[:80], known)}")


Checked = TypeVar("Checked", bound=Rules)
#: Parts of pydantic's messages that describe a program's type, not a file.
WORDS = re.compile(r"^(?:Input|List|Tuple|String) (?=should)|(?<=dictionary) or instance of \w+| after validation")


def check(rules: type[Checked], values: Any, where: str = "") -> Checked:
    """Return the values with all defaults. ValueError naming the first key that is unknown, missing or invalid."""
    try:
        return rules.model_validate(values)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    first = min(errors, key=lambda error: ("extra_forbidden", "missing", error["type"]).index(error["type"]))
    path, names, found, inner = first["loc"], [where] if where else [], values, cast(Any, rules)
    for part in path:  # a key, a place in a list, or a type of a union
        if isinstance(found, Mapping) and part in found:
            names, found = [*names, str(part)], found[part]
    if first["type"] == "extra_forbidden":
        for part in path[:-1]:
            types = inner.model_fields[part].annotation
            inner = next(one for one in (types, *get_args(types)) if hasattr(one, "model_fields"))
        check_keys(path[-1:], inner.model_fields, ".".join(names[:-1]) or "the model configuration")
    name = ".".join(names) or "the model configuration"
    if first["type"] == "missing":
        raise ValueError(f"{name} has no {path[-1]}")
    raise ValueError(f"{name} is {shown(found)}: it {WORDS.sub('', first['msg'])}")


def check_size(config: Any) -> None:
    """Raise ValueError for a tower with too many patches or (counted roughly) parameters."""
    vision, text = config.vision_cfg, config.text_cfg
    patches = math.prod(image // patch for image, patch in zip(vision.image_size, vision.patch_size))
    if patches > MAX_TOKENS:
        raise ValueError(f"vision_cfg has {patches:,} patches, but the limit is {MAX_TOKENS:,}: enlarge patch_size")
    rows = {"vision_cfg": patches + 3 * math.prod(vision.patch_size), "text_cfg": text.vocab_size}
    for block in ("vision_cfg", "text_cfg", "multimodal_cfg"):  # the last: of OpenCLIP's captioning models
        tower = getattr(config, block, None)
        if tower is None or not isinstance(tower.layers, int):  # a ResNet's
            continue
        squares = tower.layers * (4 + 2 * tower.mlp_ratio) * tower.width
        count = tower.width * (squares + rows.get(block, 0) + 2 * config.embed_dim)
        if count > MAX_PARAMETERS:
            remedy = "lower width, layers, mlp_ratio, patch_size or vocab_size"
            raise ValueError(f"{block} has {count:.1e} parameters, but the limit is {MAX_PARAMETERS:.0e}: {remedy}")


# --- ProLIP's configurations ------------------------------------------------------------------------------------------
METHOD = "prolip"  # method of a configuration without one: published, or saved before there were several methods
#: Keys of OpenCLIP's configurations that towers with [UNC] do not read.
FOREIGN = ("timm_", "hf_model_name", "hf_pooler_type", "hf_proj_type", "scaled_cosine_attn", "tokenizer_mode")
SIGLIP_PAD, SIGLIP_MASK = 1, 32000
#: Defaults of the released code that differ from OpenCLIP's; no shape determines the number of heads.
RELEASED_TEXT = {"context_length": 64, "vocab_size": 32100, "width": 768, "heads": 12, "layers": 12}
RELEASED_TEXT |= {"proj_bias": True, "embed_unc": True}


class ProLIPCfg(Rules):
    """The block that ProLIP adds to OpenCLIP's configuration."""

    model_config = ConfigDict(frozen=True)

    #: released: that of the published weights; reader: OpenCLIP's towers with readers (`prolip.models.readers`)
    forward: Literal["paper", "released", "reader"] = "paper"
    init_unc_bias: Exponent = -10.0  # of log sigma^2
    init_unc_gain: Annotated[float, Field(ge=0, le=100)] = 0.1  # initial spread over inputs and dimensions
    conv_stem: bool = False  # convolutions instead of the patch projection, for small images and little data
    mask_padding: bool = False  # mask padding in attention; the paper does not
    pad_token_id: Token = 0
    mask_token_id: Token | None = None  # for masked texts; None without such a token in the vocabulary
    special_token_ids: Annotated[tuple[Token, ...], Field(max_length=1000, strict=False)] = ()  # never masked


MethodRules = rules_of("MethodRules", name=(str, METHOD), config=(dict[str, Any], {}))


class ProLIPRules(TwoTowers):
    """A whole configuration of ProLIP. custom_text, OpenCLIP's switch between two classes, is always on."""

    prolip_cfg: ProLIPCfg
    method_cfg: MethodRules | None = None  # type: ignore[valid-type]


class ReaderRules(ProLIPRules, OpenCLIPRules, extra="forbid"):
    """OpenCLIP's configuration with ProLIP's blocks."""


class ReleasedRules(Rules, extra="ignore"):
    """The keys of uncertainty in a tower's block of a published checkpoint."""

    embed_unc: bool = False
    init_unc_bias: Exponent = -10.0


def is_released(config: Mapping[str, Any]) -> bool:
    """Return True for the configuration of a published ProLIP checkpoint: `embed_unc` inside the towers' blocks."""
    blocks = [config.get(block) for block in ("vision_cfg", "text_cfg")]
    return "prolip_cfg" not in config and any(isinstance(block, Mapping) and "embed_unc" in block for block in blocks)


def convert_released(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a published checkpoint's configuration to our layout, with the forward pass of its weights.

    The weights use SigLIP's vocabulary, pad = end = 1 and [MASK] = 32000 (absent from smaller ones), and its cleaning;
    their configuration names neither. Pooling is always [CLS].
    """
    out: dict[str, Any] = copy.deepcopy(dict(config))
    for key in ("output_dict", "cast_dtype"):  # settings of the published class, not of the model
        out.pop(key, None)
    biases = set()
    for block, rules, defaults in (("vision_cfg", VisionRules, {}), ("text_cfg", TextRules, RELEASED_TEXT)):
        biases.add(check(ReleasedRules, out.get(block), block).init_unc_bias)
        out[block] = {key: value for key, value in {**defaults, **out[block]}.items() if key != "init_unc_bias"}
        if not out[block].pop("embed_unc", False):
            raise ValueError(f"{block}.embed_unc is not set: set it, both towers of a ProLIP checkpoint have it")
        check(rules, out[block], block)
    if len(biases) > 1:
        raise ValueError(f"init_unc_bias differs between the towers ({sorted(biases)}): edit config.json")
    text = out["text_cfg"]
    for key in ("pool_type", "pad_id"):
        text.pop(key, None)
    text["tokenizer_kwargs"] = {"clean": "canonicalize"} | (text.get("tokenizer_kwargs") or {})
    mask = SIGLIP_MASK if text["vocab_size"] > SIGLIP_MASK else None
    own = {"forward": "released", "init_unc_bias": biases.pop(), "mask_token_id": mask}
    return out | {"prolip_cfg": own | {"pad_token_id": SIGLIP_PAD, "special_token_ids": [SIGLIP_PAD]}}


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with all defaults, as JSON types; ValueError naming an invalid key."""
    if not isinstance(config, Mapping):
        raise ValueError(f"the model configuration is {shown(config)}: give name -> value")
    check_tree(config)
    if is_released(config):
        config = convert_released(config)
    out: dict[str, Any] = copy.deepcopy(dict(config))
    if "prolip_cfg" not in config:  # OpenCLIP's
        dim, text = check(OpenCLIPRules, without_nones(out)).embed_dim, out["text_cfg"]
        if name := text.get("hf_model_name"):
            text["vocab_size"] = transformers_config(name)["vocab_size"]
        # OpenCLIP's configuration does not name the padding
        names = str(text.get("hf_tokenizer_name") or "").lower()
        pad = any(part in names for part in ("siglip", "xlm", "roberta", "nllb")) and "siglip2" not in names
        # variances cost at most 0.1 nat of a logit, a (tr_i + tr_t) / 2 = a D exp(b), at the largest scale a = 100
        start = -math.log(1000 * dim) - 0.1
        own = {"forward": "reader", "init_unc_bias": start, "pad_token_id": int(pad)}
        out |= {"custom_text": True, "prolip_cfg": own}
    if reads := is_reader(out):
        checked: Any = check(ReaderRules, without_nones(out))
    else:
        checked = check(ProLIPRules, out)
        out.pop("custom_text", None)
    check_towers(checked, reads)
    check_size(checked)
    out["quick_gelu"] = bool(checked.quick_gelu)
    out["method_cfg"] = {"name": METHOD, **(out.get("method_cfg") or {})}
    out["prolip_cfg"] = checked.prolip_cfg.model_dump(mode="json")
    for key, default in (("init_logit_scale", math.log(10)), ("init_logit_bias", -10.0)):
        out[key] = float(default if out.get(key) is None else out[key])
    return out


def is_reader(config: Mapping[str, Any]) -> bool:
    """Return True for a configuration of OpenCLIP's towers with readers."""
    own = config.get("prolip_cfg")
    return isinstance(own, Mapping) and own.get("forward") == "reader"


def transformers_config(name: str) -> dict[str, Any]:
    """Read the bundled configuration of a transformers text tower; ValueError for others."""
    path = TRANSFORMERS / name.rpartition("/")[2] / "config.json"
    if not path.is_file():
        known = ", ".join(sorted(place.name for place in TRANSFORMERS.iterdir()))
        raise ValueError(f"text_cfg.hf_model_name is {shown(name)}: use one of {known}")
    return json.loads(path.read_text(encoding="utf-8"))


def without_nones(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without null keys in its blocks, which configurations of other libraries have."""
    blocks = {block: values for block, values in config.items() if isinstance(values, Mapping)}
    return {**config, **{block: {k: v for k, v in values.items() if v is not None} for block, values in blocks.items()}}


def check_openclip(config: Mapping[str, Any]) -> None:
    """Raise ValueError for invalid values of OpenCLIP's configuration, and for too large towers."""
    check_size(check(OpenCLIPRules, without_nones(config)))


def check_towers(checked: Any, reads: bool) -> None:
    """Raise ValueError for keys of the wrong kind of tower, impossible widths, and ids with two meanings."""
    for key in ("conv_stem", "mask_padding") if reads else ():
        if getattr(checked.prolip_cfg, key):
            raise ValueError(f"prolip_cfg.{key} needs ProLIP's own towers: remove it, or set forward to paper")
    sides = ("vision_cfg", "timm_model_name", "head_width"), ("text_cfg", "hf_model_name", "heads")
    for block, foreign, divisor in sides:
        tower = getattr(checked, block)
        for key, field in () if reads else type(tower).model_fields.items():
            if key.startswith(FOREIGN) and getattr(tower, key) != field.default:
                raise ValueError(f"{block}.{key} is not supported by towers with [UNC]: give width, layers, heads")
        if isinstance(tower.layers, list) and not reads:
            raise ValueError(f"{block}.layers is {shown(tower.layers)}, for a ResNet: give the number of a transformer")
        if getattr(tower, foreign) is not None or isinstance(tower.layers, list):
            continue
        if tower.width % (parts := getattr(tower, divisor)):
            raise ValueError(f"{block}.width {tower.width} is not a multiple of {divisor} {parts}: change one")
        if tower.width * tower.mlp_ratio < 1:
            raise ValueError(f"{block}.mlp_ratio {tower.mlp_ratio} gives no hidden unit: enlarge it")
    if reads:
        return
    own, text, vision = checked.prolip_cfg, checked.text_cfg, checked.vision_cfg
    rows, columns = (image // patch for image, patch in zip(vision.image_size, vision.patch_size))
    if vision.pos_embed_type == "sin_cos_2d" and (rows != columns or vision.width % 4):
        raise ValueError("vision_cfg.pos_embed_type 'sin_cos_2d' needs a square grid and a width divisible by 4")
    others = (own.pad_token_id, *own.special_token_ids)
    if own.mask_token_id in others:
        raise ValueError(f"prolip_cfg.mask_token_id {own.mask_token_id} is also padding or special: give another")
    if (most := max(*others, own.mask_token_id or 0)) >= text.vocab_size:
        raise ValueError(f"prolip_cfg has token id {most}, but text_cfg.vocab_size is {text.vocab_size}: enlarge it")
    if "pad_id" in text.model_fields_set and text.pad_id != own.pad_token_id:
        raise ValueError(f"text_cfg.pad_id is {text.pad_id}, but prolip_cfg.pad_token_id {own.pad_token_id}: drop one")


def override(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the configuration with keys of its top level or of `prolip_cfg` replaced."""
    out: dict[str, Any] = copy.deepcopy(dict(config))
    for key, value in changes.items():
        if key in ProLIPCfg.model_fields:
            out["prolip_cfg"] = {**out["prolip_cfg"], key: value}
        elif key in ProLIPRules.model_fields:
            both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
            trained = out[key]["name"] if both and key == "method_cfg" and out[key].get("config") else None
            if trained and value.get("name", trained) != trained:
                remedy = f"give --method {trained}, or a method with adapts=True"
                raise ValueError(f"the model has the parts of method {trained!r} only: {remedy}")
            out[key] = {**out[key], **value} if both else value
        else:
            known = (*ProLIPRules.model_fields, *ProLIPCfg.model_fields)
            raise TypeError(f"create_model has no option {key!r}: {did_you_mean(key, known)}")
    return out
