"""What every key of a model's configuration may hold: one table, and the size of what a configuration would build."""
from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from open_clip.coca_model import MultimodalCfg
from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from open_clip.utils import to_2tuple

from prolip.models.towers import FORMS
from prolip.utils.documents import shown

#: Larger models are refused before anything is built: some 80 GB of float32.
MAX_PARAMETERS = 20_000_000_000
#: Patches of an image and tokens of a text, each of which attends to all others.
MAX_TOKENS = 2**16
MAX_WIDTH, MAX_LAYERS, MAX_HEADS, MAX_VOCABULARY, MAX_PIXELS = 2**16, 1000, 1024, 2**22, 2**14
MAX_LETTERS = 500
CLEANERS = ("canonicalize", "lower", "whitespace")
#: They go into a regular expression.
SPECIAL_TOKEN = re.compile(r"<\w{1,64}>")


class Rule(NamedTuple):
    """What a value must be, as a remedy says it, and whether one is."""

    remedy: str
    fits: Callable[[Any], bool]


#: A key's rule, or the rules of the keys below it, where null stands for none of them.
Rules = Mapping[str, Union[Rule, "Rules"]]


def whole(least: int, most: int, what: str = "a whole number") -> Rule:
    """A whole number, which true is not."""
    return Rule(f"give {what} of at least {least} and at most {most:,}", lambda x: _within(x, Integral, least, most))


def number(least: float, most: float) -> Rule:
    """A number in finite bounds, which NaN never is."""
    return Rule(f"give a number from {least:g} to {most:g}", lambda x: _within(x, Real, least, most))


def _within(x: Any, kind: type, least: float, most: float) -> bool:
    return isinstance(x, kind) and not isinstance(x, bool) and bool(least <= x <= most)  # type: ignore[operator]


def choice(*words: str) -> Rule:
    """One of a few words."""
    listed = " or ".join(words) if len(words) < 3 else f"one of {', '.join(words)}"
    return Rule(f"choose {listed}", lambda x: isinstance(x, str) and x in words)


def several(rule: Rule, what: str, least: int = 0, most: int = 1000) -> Rule:
    """A list of values that fit a rule."""
    return Rule(
        f"give {what}", lambda x: isinstance(x, (list, tuple)) and least <= len(x) <= most and all(map(rule.fits, x))
    )


def either(*rules: Rule) -> Rule:
    """What fits any of several rules; an error gives the first one's remedy."""
    return Rule(rules[0].remedy, lambda x: any(rule.fits(x) for rule in rules))


def optional(rule: Rule) -> Rule:
    """What fits a rule, or null."""
    return Rule(f"{rule.remedy}, or null", lambda x: x is None or rule.fits(x))


FLAG = Rule("give true or false", lambda x: isinstance(x, bool))
TEXT = Rule(f"give a text of at most {MAX_LETTERS} letters", lambda x: isinstance(x, str) and len(x) <= MAX_LETTERS)
SIDE = whole(1, MAX_PIXELS)
SIDES = Rule(
    "give one number, or height and width",
    lambda x: SIDE.fits(x) or (isinstance(x, (list, tuple)) and len(x) == 2 and all(map(SIDE.fits, x))),
)
TOKEN = whole(0, MAX_VOCABULARY - 1, "a token's id, a whole number")

#: Keys whose type says too little.
TOWER: dict[str, Rule | Rules] = {
    "width": whole(1, MAX_WIDTH), "layers": whole(1, MAX_LAYERS), "mlp_ratio": number(0.01, 100),
    "ls_init_value": optional(number(0, 1000)), "block_type": optional(choice("default", "custom")),
    "act_kwargs": {"approximate": choice("none", "tanh")}, "norm_kwargs": {"eps": number(1e-12, 1)},
}  # fmt: skip
VISION: dict[str, Rule | Rules] = TOWER | {
    "layers": either(TOWER["layers"], several(TOWER["layers"], "", 4, 4)),  # type: ignore[arg-type]
    "head_width": whole(1, MAX_WIDTH), "image_size": SIDES, "patch_size": SIDES, "patch_dropout": number(0, 0.999),
    "attentional_pool": either(FLAG, choice("parallel", "cascade")), "attn_pooler_queries": whole(1, MAX_TOKENS),
    "attn_pooler_heads": whole(1, MAX_HEADS), "pos_embed_type": choice("learnable", "sin_cos_2d"),
    "pool_type": choice("tok", "avg", "none"),
}  # fmt: skip
TEXT_TOWER: dict[str, Rule | Rules] = TOWER | {
    "heads": whole(1, MAX_HEADS), "context_length": whole(1, MAX_TOKENS), "vocab_size": whole(1, MAX_VOCABULARY),
    "pad_id": TOKEN, "eos_id": TOKEN, "pool_type": choice("first", "last", "argmax", "eos", "none"),
    "proj_type": choice("linear", "none"), "tokenizer_mode": optional(choice("clips")),
    "tokenizer_kwargs": {
        "clean": choice(*CLEANERS), "reduction_mask": choice("simple", "random", "shuffle", "syntax"),
        "strip_sep_token": FLAG, "language": TEXT,
        "additional_special_tokens": several(
            Rule("", lambda x: isinstance(x, str) and SPECIAL_TOKEN.fullmatch(x) is not None),
            "a list of texts such as <mask>",
        ),
    },
}  # fmt: skip


def by_type(hint: Any) -> Rule | Rules:
    """The rule that the type of a dataclass's field is enough for."""
    if get_origin(hint) is Union and type(None) in get_args(hint):
        inner = by_type(next(kind for kind in get_args(hint) if kind is not type(None)))
        return optional(inner) if isinstance(inner, Rule) else inner
    rules: dict[Any, Rule | Rules] = {bool: FLAG, str: TEXT, float: number(0, 1), int: whole(0, MAX_WIDTH), dict: {}}
    return rules[hint]


def of_dataclass(config: type, rules: Rules) -> Rules:
    """Rules for every field of a dataclass: those given, and by its type."""
    hints = get_type_hints(config)
    return {field.name: rules.get(field.name) or by_type(hints[field.name]) for field in fields(config)}


ANY = Rule("give name -> value", lambda x: isinstance(x, Mapping))

RULES: dict[str, Rules] = {
    "": {
        "method_cfg": {"name": TEXT, "config": ANY},
        "embed_dim": whole(1, MAX_WIDTH), "quick_gelu": optional(FLAG), "custom_text": optional(FLAG),
        "init_logit_scale": optional(number(-80, 80)), "init_logit_bias": optional(number(-1e6, 1e6)),
    },
    "vision_cfg": of_dataclass(CLIPVisionCfg, VISION),
    "text_cfg": of_dataclass(CLIPTextCfg, TEXT_TOWER),
    "multimodal_cfg": of_dataclass(MultimodalCfg, TEXT_TOWER | {
        "dim_head": whole(1, MAX_WIDTH), "n_queries": whole(1, MAX_TOKENS), "attn_pooler_heads": whole(1, MAX_HEADS),
    }),
    "prolip_cfg": {
        "forward": Rule(f"choose one of {', '.join(FORMS)}", lambda x: isinstance(x, str) and x in FORMS),
        "init_unc_bias": number(-80, 80), "init_unc_gain": number(0, 100), "conv_stem": FLAG, "mask_padding": FLAG,
        "pad_token_id": TOKEN, "mask_token_id": optional(TOKEN),
        "special_token_ids": several(TOKEN, "a list of tokens' ids"),
    },
    "preprocess_cfg": {
        "size": optional(SIDES), "mode": optional(choice("RGB")),
        "mean": optional(several(number(-256, 256), "three numbers, of red, green and blue", 3, 3)),
        "std": optional(several(number(1e-6, 256), "three numbers above 0, of red, green and blue", 3, 3)),
        "interpolation": optional(choice("bicubic", "bilinear", "random")),
        "resize_mode": optional(choice("shortest", "longest", "squash")), "fill_color": optional(whole(0, 255)),
    },
}  # fmt: skip


def check_values(values: Any, rules: Rules, where: str) -> None:
    """ValueError naming the first key whose value does not fit its rule, or that has none below a nested key."""
    for key, value in values.items():
        rule, name = rules.get(key), f"{where}.{key}" if where else str(key)
        if isinstance(rule, Rule) and not rule.fits(value):
            if rule is SIDES and (not isinstance(value, (list, tuple)) or len(value) == 2):
                sides = value if isinstance(value, (list, tuple)) else [value]
                value, rule = next(side for side in sides if not SIDE.fits(side)), SIDE
            raise ValueError(f"{name} is {shown(value)}: {rule.remedy}")
        if isinstance(rule, Mapping) and value is not None:
            if not isinstance(value, Mapping):
                raise ValueError(f"{name} is {shown(value)}: give name -> value")
            if strange := [below for below in value if below not in rule]:
                raise ValueError(f"{name} has the key {shown(strange[0])}: leave it out, it may have {', '.join(rule)}")
            check_values(value, rule, name)


def count_blocks(tower: Mapping[str, Any]) -> int:
    """Parameters of a tower's blocks, to a thousandth: four square matrices and two of the MLP, biases, norms."""
    width, hidden = tower["width"], int(tower["width"] * tower["mlp_ratio"])
    return tower["layers"] * (4 * width**2 + 2 * width * hidden + 9 * width + hidden)


def count_patches(vision: Mapping[str, Any]) -> int:
    """Patches of an image."""
    return math.prod(image // patch for image, patch in zip(to_2tuple(vision["image_size"]),
                                                            to_2tuple(vision["patch_size"])))  # fmt: skip


def count_parameters(config: Mapping[str, Any]) -> dict[str, int]:
    """About how many parameters each tower has, from a configuration whose every value was checked.

    vision_cfg and text_cfg have all of their keys.
    """
    vision, text, dim = config["vision_cfg"], config["text_cfg"], config["embed_dim"]
    wide, width = vision["width"], text["width"]
    stem = 6 * wide**2 if config.get("prolip_cfg", {}).get("conv_stem") else 0
    patch = stem or 3 * math.prod(to_2tuple(vision["patch_size"])) * wide
    rows = vision["attn_pooler_queries"] if vision["attentional_pool"] else 0
    counts = {
        "vision_cfg": count_blocks(vision) + patch + (count_patches(vision) + rows) * wide + 2 * wide * dim,
        "text_cfg": count_blocks(text) + (text["vocab_size"] + text["context_length"]) * width + 2 * width * dim,
    }
    decoder = config.get("multimodal_cfg")  # of OpenCLIP's captioning models: each block attends twice
    return counts | ({"multimodal_cfg": 2 * count_blocks(decoder)} if decoder else {})


def check_sizes(config: Mapping[str, Any]) -> None:
    """ValueError where a tower would have too many tokens or parameters."""
    vision = config["vision_cfg"]
    if (patches := count_patches(vision)) > MAX_TOKENS:
        raise ValueError(f"vision_cfg.image_size {vision['image_size']} in patches of {vision['patch_size']} is"
                         f" {patches:,} patches, at most {MAX_TOKENS:,} are read: enlarge patch_size")
    for block, count in count_parameters(config).items():
        if count > MAX_PARAMETERS:
            keys = ("width", "layers", "mlp_ratio", *(("patch_size",) if block == "vision_cfg" else ("vocab_size",)))
            named = ", ".join(f"{key} {config[block][key]}" for key in keys)
            raise ValueError(f"{block} with {named} is a tower of {count:.1e} parameters, at most {MAX_PARAMETERS:.0e}"
                             " are built: make one of them smaller")
