"""What every key of a model's configuration may hold, checked by pydantic, and the size of what it would build."""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_type_hints

from open_clip.coca_model import MultimodalCfg
from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from open_clip.transform import PreprocessCfg
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from prolip.utils.documents import shown
from prolip.utils.flags import did_you_mean

#: Larger models are refused before anything is built: some 80 GB of float32.
MAX_PARAMETERS = 20_000_000_000
#: Patches of an image and tokens of a text, each of which attends to all others.
MAX_TOKENS = 2**16

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
Colours = Annotated[list[Annotated[float, Field(ge=-256, le=256)]], Field(min_length=3, max_length=3, strict=False)]
Spreads = Annotated[list[Annotated[float, Field(ge=1e-6, le=256)]], Field(min_length=3, max_length=3, strict=False)]


class Rules(BaseModel):
    """Values are of their key's type without conversion, and numbers are finite."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, str_max_length=500, validate_default=True
    )


class TokenizerRules(Rules):
    """OpenCLIP's options of tokenizers; special tokens go into a regular expression."""

    clean: Literal["canonicalize", "lower", "whitespace"] = "whitespace"
    reduction_mask: Literal["simple", "random", "shuffle", "syntax"] = "simple"
    strip_sep_token: bool = False
    language: str = ""
    additional_special_tokens: Annotated[
        list[Annotated[str, Field(pattern=r"^<\w{1,64}>$")]], Field(max_length=1000, strict=False)
    ] = []


def rules_of(name: str, /, **keys: Any) -> Any:
    """Rules for keys, each with its type and default."""
    return create_model(name, __base__=Rules, **keys)


def of_dataclass(config: type, **types: Any) -> Any:
    """Rules for every field of a dataclass: those given, and its own types."""
    given = {**get_type_hints(config), **types}
    return rules_of(config.__name__, **{field.name: (given[field.name], field.default) for field in fields(config)})


TOWER: dict[str, Any] = {
    "width": Count, "layers": Layers, "mlp_ratio": Annotated[float, Field(ge=0.01, le=100)],
    "ls_init_value": Annotated[float, Field(ge=0, le=1000)] | None, "block_type": Literal["default", "custom"] | None,
    "act_kwargs": rules_of("GELURules", approximate=(Literal["none", "tanh"], "none")) | None,
    "norm_kwargs": rules_of("NormRules", eps=(Annotated[float, Field(ge=1e-12, le=1)], 1e-5)) | None,
}  # fmt: skip
TEXT: dict[str, Any] = TOWER | {
    "heads": Count, "context_length": Count, "vocab_size": Annotated[int, Field(ge=1, le=2**22)],
    "pad_id": Token, "eos_id": Token, "pool_type": Literal["first", "last", "argmax", "eos", "none"],
    "proj_type": Literal["linear", "none"], "tokenizer_mode": Literal["clips"] | None,
    "tokenizer_kwargs": TokenizerRules | None,
}  # fmt: skip
VisionRules = of_dataclass(CLIPVisionCfg, **TOWER | {
    "layers": Layers | Annotated[list[Layers], Field(min_length=4, max_length=4)],
    "head_width": Count, "image_size": Sides, "patch_size": Sides,
    "patch_dropout": Annotated[Share, Field(le=0.999)], "attentional_pool": bool | Literal["parallel", "cascade"],
    "attn_pooler_queries": Count, "attn_pooler_heads": Count, "timm_drop": Share, "timm_drop_path": Share | None,
    "pos_embed_type": Literal["learnable", "sin_cos_2d"], "pool_type": Literal["tok", "avg", "none"],
})  # fmt: skip
TextRules = of_dataclass(CLIPTextCfg, **TEXT)
DecoderRules = of_dataclass(MultimodalCfg, **TEXT, dim_head=Count, n_queries=Count, attn_pooler_heads=Count)
PREPROCESS: dict[str, Any] = {
    "size": Sides, "mode": Literal["RGB"], "mean": Colours, "std": Spreads,
    "interpolation": Literal["bicubic", "bilinear", "random"], "resize_mode": Literal["shortest", "longest", "squash"],
    "fill_color": Annotated[int, Field(ge=0, le=255)],
}  # fmt: skip
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


class OpenCLIPRules(TwoTowers):
    """OpenCLIP reads what it knows."""

    model_config = ConfigDict(extra="ignore")
    multimodal_cfg: DecoderRules | None = None  # type: ignore[valid-type]


def near_matches(name: str, known: Iterable[str]) -> str:
    """`a, b or c`, the known names closest to `name`; all of them when none is close."""
    known = list(known)
    return did_you_mean(str(name), known, f"choose from {', '.join(known)}")


def check_keys(given: Iterable[Any], known: Iterable[str], where: str) -> None:
    """Refuse keys that nobody reads."""
    for key in given:
        if key not in known:
            raise ValueError(f"unknown key {shown(key)} in {where}: {near_matches(str(key)[:80], known)}")


Checked = TypeVar("Checked", bound=Rules)
WANTED = {"model_type": "give name -> value", "dict_type": "give name -> value", "int_type": "give a whole number",
          "float_type": "give a number", "bool_type": "give true or false", "list_type": "give a list",
          "string_type": "give a text", "tuple_type": "give a list"}  # fmt: skip
#: Pydantic's words, and plainer ones.
SAID = {"Input": "it", "List": "it", "Tuple": "it", "String": "it", " after validation": "",
        "less than or equal to": "at most", "greater than or equal to": "at least"}  # fmt: skip


def check(rules: type[Checked], values: Any, where: str = "") -> Checked:
    """The values with all defaults. ValueError naming the first key that nobody reads, is missing, or does not fit."""
    try:
        return rules.model_validate(values)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    first = min(errors, key=lambda error: ("extra_forbidden", "missing", error["type"]).index(error["type"]))
    kind, path, names, found, inner = first["type"], first["loc"], [where] if where else [], values, cast(Any, rules)
    for part in path:  # a key, a place in a list, or a type of a union
        if isinstance(found, Mapping) and part in found:
            names, found = [*names, str(part)], found[part]
    if kind == "extra_forbidden":
        for part in path[:-1]:
            types = inner.model_fields[part].annotation
            inner = next(one for one in (types, *get_args(types)) if hasattr(one, "model_fields"))
        check_keys(path[-1:], inner.model_fields, ".".join(names[:-1]) or "the model configuration")
    name = ".".join(names) or "the model configuration"
    if kind == "missing":
        raise ValueError(f"{name} has no {path[-1]}{inner.model_fields[path[-1]].description or ''}")
    said = first["msg"]
    for theirs, ours in SAID.items():
        said = said.replace(theirs, ours)
    raise ValueError(f"{name} is {shown(found)}: {WANTED.get(kind, said)}")


def count_parameters(config: Any) -> int:
    """About how many parameters checked towers have, but for a ResNet's. ValueError where one would be too large."""
    vision, text = config.vision_cfg, config.text_cfg
    patches = math.prod(image // patch for image, patch in zip(vision.image_size, vision.patch_size))
    if patches > MAX_TOKENS:
        raise ValueError(f"vision_cfg.image_size {vision.image_size} in patches of {vision.patch_size} is {patches:,}"
                         f" patches, at most {MAX_TOKENS:,} are read: enlarge patch_size")
    total, rows = 0, {"vision_cfg": patches + 3 * math.prod(vision.patch_size), "text_cfg": text.vocab_size}
    for block in ("vision_cfg", "text_cfg", "multimodal_cfg"):  # the last: of OpenCLIP's captioning models
        tower = getattr(config, block, None)
        if tower and isinstance(tower.layers, int):
            squares = tower.layers * (4 + 2 * tower.mlp_ratio) * tower.width
            count = int(tower.width * (squares + rows.get(block, 0) + 2 * config.embed_dim))
            if count > MAX_PARAMETERS:
                raise ValueError(f"{block} is a tower of {count:.1e} parameters, at most {MAX_PARAMETERS:.0e} are"
                                 " built: lower its width, layers, mlp_ratio, patch_size or vocab_size")
            total += count
    return total
