"""The table of docs/openclip_models.md: what of each of OpenCLIP's architectures is read, and which methods train it.

    python scripts/openclip_table.py --write docs/openclip_models.md

Every image tower is built without memory, which takes two minutes in all. --names limits the table, and prints it.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import open_clip  # noqa: E402
import torch  # noqa: E402

from prolip.methods import method_table  # noqa: E402
from prolip.models.config import transformers_config  # noqa: E402
from prolip.models.readers import kinds_of, reader_towers  # noqa: E402
from prolip.models.registry import get_model_config  # noqa: E402
from study import markdown, write  # noqa: E402

HEADS = ("name", "image tower", "text tower", "tokens read", "means from", "tokenizer", "masked views", "methods")
#: Part of a timm model's name -> its kind, and what it pools where OpenCLIP's configuration does not say; the first
#: that fits.
KINDS = {
    "siglip": ("ViT", "attention"), "vitamin": ("ViTamin", "mean"), "convnext": ("ConvNeXt", "mean"),
    "fastvit": ("FastViT", "mean"), "mci_224": ("hybrid ViT", "[CLS]"), "eva": ("EVA", "[CLS]"),
    "pe_core": ("PE", "attention"), "swin": ("Swin", "mean"), "relpos": ("ViT, relative positions", "[CLS]"),
    "gap": ("ViT", "mean"), "vit": ("ViT", "[CLS]"),
}  # fmt: skip
POOLS = {"map": "attention", "avg": "mean", "token": "[CLS]"}


def image_tower(config: Mapping[str, Any]) -> tuple[str, str]:
    """Its kind, and what its embedding is pooled from."""
    vision = config["vision_cfg"]
    if name := vision.get("timm_model_name"):
        kind, pool = next(found for part, found in KINDS.items() if part in name)
        return f"timm {kind}", POOLS.get(vision.get("timm_pool") or "", pool)
    if isinstance(vision["layers"], list):
        return "ResNet", "attention"
    if vision.get("attentional_pool"):
        return "ViT", "attention"
    return "ViT", "mean" if vision.get("pool_type") == "avg" else "[CLS]"


def text_tower(config: Mapping[str, Any]) -> tuple[str, str]:
    """Its kind, and which token its embedding is."""
    text = config["text_cfg"]
    if name := text.get("hf_model_name"):
        kind = transformers_config(name)["model_type"]
        return f"transformers {kind}", "first" if "cls" in text.get("hf_pooler_type", "") else "mean"
    if text.get("embed_cls"):
        return "causal", "[CLS]"
    way = "bidirectional" if text.get("no_causal_mask") else "causal"
    return way, {"argmax": "highest id", "eos": "end", "last": "last"}[text.get("pool_type", "argmax")]


def row(name: str) -> list[str]:
    """Of one architecture."""
    config, _ = get_model_config(name)
    with torch.device("meta"):
        image, _, _ = reader_towers(config)
    (kind, pool), (words, token) = image_tower(config), text_tower(config)
    tokenizer = "file" if config["text_cfg"].get("hf_tokenizer_name") else "bundled"
    seen = f"{image.num_tokens} of {image.width}"
    squares = f"{image.grid_size[0]} x {image.grid_size[1]} squares"
    refused = [method for method, reason in method_table([config])[kinds_of(config)].items() if reason]
    methods = f"all but {', '.join(refused)}" if refused else "all"
    return [name, kind, words, seen, f"{pool}; {token}", tokenizer, squares, methods]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--names", nargs="+", choices=open_clip.list_models(), default=open_clip.list_models(), metavar="NAME")
    add("--write", type=Path, metavar="PAGE", help="page whose table is replaced; without, it is printed")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the table."""
    options = parse(arguments)
    table = markdown(HEADS, [row(name) for name in options.names])
    if options.write:
        write(options.write, {"architectures": table}, "emoji", "openclip_table")
    else:
        print("\n".join(table))


if __name__ == "__main__":
    from prolip.utils import console

    console.command(main)
