"""A model's configuration: OpenCLIP's JSON layout with a block `prolip_cfg`; validated before anything is built."""

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

#: Configurations of the text towers of transformers that OpenCLIP names, which it would ask the hub for.
TRANSFORMERS = Path(__file__).parent / "configs" / "transformers"
MAX_PARAMETERS = 20_000_000_000  # Larger models are refused before anything is built: some 80 GB of float32
MAX_TOKENS = 2**16  # Patches of an image and tokens of a text, each of which attends to all others

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
    """The type of one number for each colour."""
    return Annotated[list[Annotated[float, Field(ge=least, le=most)]], Field(min_length=3, max_length=3, strict=False)]


class Rules(BaseModel, strict=True, extra="forbid", allow_inf_nan=False, str_max_length=500, validate_default=True):
    """Values are of their key's type without conversion, and numbers are finite."""


class TokenizerRules(Rules):
    """OpenCLIP's options of tokenizers; special tokens go into a regular expression."""

    clean: Literal["canonicalize", "lower", "whitespace"] = "whitespace"
    reduction_mask: Literal["simple", "random", "shuffle", "syntax"] = "simple"
    strip_sep_token: bool = False
    language: str = ""
    additional_special_tokens: Annotated[list[SpecialToken], Field(max_length=1000, strict=False)] = []


def rules_of(name: str, /, **keys: Any) -> Any:
    """Rules for keys, each with its type and default."""
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
    """Rules for every field of a dataclass: `own`, those of BOUNDS, and its types."""
    types = {**get_type_hints(config), **BOUNDS, **own}
    return rules_of(config.__name__, **{field.name: (types[field.name], field.default) for field in fields(config)})


STAGES = Layers | Annotated[list[Layers], Field(min_length=4, max_length=4)]
VisionRules = of_dataclass(CLIPVisionCfg, layers=STAGES, pool_type=Literal["tok", "avg", "none"])
TextRules, DecoderRules = of_dataclass(CLIPTextCfg), of_dataclass(MultimodalCfg)
PreprocessRules = of_dataclass(PreprocessCfg, **{key: kind | None for key, kind in PREPROCESS.items()})


class TwoTowers(Rules):
    """What OpenCLIP's configurations and ours have in common."""

    embed_dim: Count
    vision_cfg: VisionRules  # type: ignore[valid-type]
    text_cfg: TextRules  # type: ignore[valid-type]
    quick_gelu: bool | None = None
    custom_text: bool | None = None
    init_logit_scale: Exponent | None = None
    init_logit_bias: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None


class OpenCLIPRules(TwoTowers, extra="ignore"):
    """OpenCLIP reads what it knows."""

    multimodal_cfg: DecoderRules | None = None  # type: ignore[valid-type]


def check_keys(given: Iterable[Any], known: Iterable[str], where: str) -> None:
    """ValueError for a key that is not one of the known ones."""
    for key in given:
        if key not in known:
            raise ValueError(f"unknown key {shown(key)} in {where}: {did_you_mean(str(key)[:80], known)}")


Checked = TypeVar("Checked", bound=Rules)
#: How pydantic's messages begin, and what says more about the type of a program than about a file.
WORDS = re.compile(r"^(?:Input|List|Tuple|String) (?=should)|(?<=dictionary) or instance of \w+| after validation")


def check(rules: type[Checked], values: Any, where: str = "") -> Checked:
    """The values with all defaults. ValueError naming the first key that is unknown or missing, or does not fit."""
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
    """ValueError where a tower would be too large: too many patches or, counted roughly, too many parameters."""
    vision, text = config.vision_cfg, config.text_cfg
    patches = math.prod(image // patch for image, patch in zip(vision.image_size, vision.patch_size))
    if patches > MAX_TOKENS:
        raise ValueError(f"vision_cfg has {patches:,} patches, at most {MAX_TOKENS:,} are read: enlarge patch_size")
    rows = {"vision_cfg": patches + 3 * math.prod(vision.patch_size), "text_cfg": text.vocab_size}
    for block in ("vision_cfg", "text_cfg", "multimodal_cfg"):  # the last: of OpenCLIP's captioning models
        tower = getattr(config, block, None)
        if tower is None or not isinstance(tower.layers, int):  # a ResNet's
            continue
        squares = tower.layers * (4 + 2 * tower.mlp_ratio) * tower.width
        count = tower.width * (squares + rows.get(block, 0) + 2 * config.embed_dim)
        if count > MAX_PARAMETERS:
            most = f"at most {MAX_PARAMETERS:.0e} are built: lower width, layers, mlp_ratio, patch_size or vocab_size"
            raise ValueError(f"{block} is a tower of {count:.1e} parameters, {most}")


# --- whole configurations of ours -------------------------------------------------------------------------------------
METHOD = "prolip"  # the method of a model whose configuration names none: published, or saved before there were several
#: What OpenCLIP's configurations may hold that our own towers do not read.
FOREIGN = ("timm_", "hf_model_name", "hf_pooler_type", "hf_proj_type", "scaled_cosine_attn", "tokenizer_mode")
SIGLIP_PAD, SIGLIP_MASK = 1, 32000
#: Defaults of the released code that differ from OpenCLIP's; the number of heads follows from no shape.
RELEASED_TEXT = {"context_length": 64, "vocab_size": 32100, "width": 768, "heads": 12, "layers": 12}
RELEASED_TEXT |= {"proj_bias": True, "embed_unc": True}


class ProLIPCfg(Rules):
    """The block that ProLIP adds to OpenCLIP's configuration."""

    model_config = ConfigDict(frozen=True)

    #: released: as the published weights were trained; reader: OpenCLIP's towers with readers (`prolip.models.readers`)
    forward: Literal["paper", "released", "reader"] = "paper"
    init_unc_bias: Exponent = -10.0  # of log sigma^2
    init_unc_gain: Annotated[float, Field(ge=0, le=100)] = 0.1  # initial spread over inputs and dimensions
    conv_stem: bool = False  # convolutions in place of the patch projection, for small images and little data
    mask_padding: bool = False  # hide padding from attention, which the paper does not
    pad_token_id: Token = 0
    mask_token_id: Token | None = None  # for masked texts, none where the vocabulary has no such token
    special_token_ids: Annotated[tuple[Token, ...], Field(max_length=1000, strict=False)] = ()  # never masked


MethodRules = rules_of("MethodRules", name=(str, METHOD), config=(dict[str, Any], {}))


class ProLIPRules(TwoTowers):
    """A whole configuration of ours; custom_text, OpenCLIP's switch between two classes, is always on."""

    prolip_cfg: ProLIPCfg
    method_cfg: MethodRules | None = None  # type: ignore[valid-type]


class ReaderRules(ProLIPRules, OpenCLIPRules, extra="forbid"):
    """A configuration of OpenCLIP's with our blocks."""


class ReleasedRules(Rules, extra="ignore"):
    """The keys of uncertainty in a tower's block of a published checkpoint."""

    embed_unc: bool = False
    init_unc_bias: Exponent = -10.0


def is_released(config: Mapping[str, Any]) -> bool:
    """Whether this is the configuration of a published ProLIP checkpoint: `embed_unc` inside the towers' blocks."""
    blocks = [config.get(block) for block in ("vision_cfg", "text_cfg")]
    return "prolip_cfg" not in config and any(isinstance(block, Mapping) and "embed_unc" in block for block in blocks)


def convert_released(config: Mapping[str, Any]) -> dict[str, Any]:
    """A published checkpoint's configuration in our layout, with the forward pass that its weights need.

    They were trained with SigLIP's vocabulary, pad = end = 1 and [MASK] = 32000 (absent from smaller ones), and its
    cleaning; their configuration names neither. [CLS] is pooled, whatever it says.
    """
    out: dict[str, Any] = copy.deepcopy(dict(config))
    for key in ("output_dict", "cast_dtype"):  # of the class that was published, not of the model
        out.pop(key, None)
    biases = set()
    for block, rules, defaults in (("vision_cfg", VisionRules, {}), ("text_cfg", TextRules, RELEASED_TEXT)):
        biases.add(check(ReleasedRules, out.get(block), block).init_unc_bias)
        out[block] = {key: value for key, value in {**defaults, **out[block]}.items() if key != "init_unc_bias"}
        if not out[block].pop("embed_unc", False):
            raise ValueError(f"{block}.embed_unc is not set: both towers of a ProLIP checkpoint have it")
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
    """The configuration with all our defaults filled in, JSON-able; ValueError naming the key that does not fit."""
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
        # its configuration does not name the padding
        names = str(text.get("hf_tokenizer_name") or "").lower()
        pad = any(part in names for part in ("siglip", "xlm", "roberta", "nllb")) and "siglip2" not in names
        # variances cost 0.1 nat of a logit at most, a (tr_i + tr_t) / 2 = a D exp(b), with the greatest scale a = 100
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
    """Whether this is a configuration of OpenCLIP's towers with readers."""
    own = config.get("prolip_cfg")
    return isinstance(own, Mapping) and own.get("forward") == "reader"


def transformers_config(name: str) -> dict[str, Any]:
    """What transformers would be told of a text tower by the hub; ValueError for one that is not bundled."""
    path = TRANSFORMERS / name.rpartition("/")[2] / "config.json"
    if not path.is_file():
        known = ", ".join(sorted(place.name for place in TRANSFORMERS.iterdir()))
        raise ValueError(f"text_cfg.hf_model_name is {shown(name)}: text towers of transformers are {known}")
    return json.loads(path.read_text(encoding="utf-8"))


def without_nones(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without the null keys of its blocks, which those of other libraries' towers have."""
    blocks = {block: values for block, values in config.items() if isinstance(values, Mapping)}
    return {**config, **{block: {k: v for k, v in values.items() if v is not None} for block, values in blocks.items()}}


def check_openclip(config: Mapping[str, Any]) -> None:
    """ValueError for values of OpenCLIP's configuration that do not fit, and towers that are too large."""
    check_size(check(OpenCLIPRules, without_nones(config)))


def check_towers(checked: Any, reads: bool) -> None:
    """Refuse what our own towers do not have, or only they; widths that cannot be built; ids with two meanings."""
    for key in ("conv_stem", "mask_padding") if reads else ():
        if getattr(checked.prolip_cfg, key):
            raise ValueError(f"prolip_cfg.{key} is of our own towers: leave it out, or take forward paper")
    sides = ("vision_cfg", "timm_model_name", "head_width"), ("text_cfg", "hf_model_name", "heads")
    for block, foreign, divisor in sides:
        tower = getattr(checked, block)
        for key, field in () if reads else type(tower).model_fields.items():
            if key.startswith(FOREIGN) and getattr(tower, key) != field.default:
                raise ValueError(f"{block}.{key}: towers with [UNC] do not have it; give width, layers, heads")
        if isinstance(tower.layers, list) and not reads:
            raise ValueError(f"{block}.layers is {shown(tower.layers)}, as a ResNet's: give a transformer's number")
        if getattr(tower, foreign) is not None or isinstance(tower.layers, list):
            continue
        if tower.width % (parts := getattr(tower, divisor)):
            raise ValueError(f"{block}.width {tower.width} is no multiple of {divisor} {parts}: change one")
        if tower.width * tower.mlp_ratio < 1:
            raise ValueError(f"{block}.mlp_ratio {tower.mlp_ratio} leaves no hidden unit: enlarge it")
    if reads:
        return
    own, text, vision = checked.prolip_cfg, checked.text_cfg, checked.vision_cfg
    rows, columns = (image // patch for image, patch in zip(vision.image_size, vision.patch_size))
    if vision.pos_embed_type == "sin_cos_2d" and (rows != columns or vision.width % 4):
        raise ValueError("vision_cfg.pos_embed_type 'sin_cos_2d' needs a square of patches and a width of 4 n")
    others = (own.pad_token_id, *own.special_token_ids)
    if own.mask_token_id in others:
        raise ValueError(f"prolip_cfg.mask_token_id {own.mask_token_id} is padding or special as well: give another")
    if (most := max(*others, own.mask_token_id or 0)) >= text.vocab_size:
        raise ValueError(f"prolip_cfg has token id {most}, but text_cfg.vocab_size is {text.vocab_size}: enlarge it")
    if "pad_id" in text.model_fields_set and text.pad_id != own.pad_token_id:
        raise ValueError(f"text_cfg.pad_id is {text.pad_id} and prolip_cfg.pad_token_id {own.pad_token_id}: drop one")


def override(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The configuration with keys of its top level or of `prolip_cfg` replaced, by name."""
    out: dict[str, Any] = copy.deepcopy(dict(config))
    for key, value in changes.items():
        if key in ProLIPCfg.model_fields:
            out["prolip_cfg"] = {**out["prolip_cfg"], key: value}
        elif key in ProLIPRules.model_fields:
            both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
            trained = out[key]["name"] if both and key == "method_cfg" and out[key].get("config") else None
            if trained and value.get("name", trained) != trained:
                raise ValueError(f"the model has parts of the method {trained!r} alone: give --method {trained}")
            out[key] = {**out[key], **value} if both else value
        else:
            known = (*ProLIPRules.model_fields, *ProLIPCfg.model_fields)
            raise TypeError(f"create_model has no option {key!r}: {did_you_mean(key, known)}")
    return out
