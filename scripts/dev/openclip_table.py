"""Write docs/reference/openclip_models.md: each OpenCLIP architecture, its tokens and the methods that train it.

    python scripts/dev/openclip_table.py --write docs/reference/openclip_models.md

Every image tower is built without memory, which takes two minutes in total. --names limits the table, and prints it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import open_clip
import torch

from prolip.methods import all_methods
from prolip.models.readers import kinds_of, reader_towers
from prolip.models.registry import get_model_config
from studies.tables import markdown, write

HEADS = ("name", "image tower", "text tower", "tokens read", "means from", "tokenizer", "masked views", "methods")
#: Pooling in code -> its words in the table.
POOLED = {
    "map": "attention",
    "avg": "mean",
    "token": "[CLS]",
    "tok": "[CLS]",
    "cls_emb": "[CLS]",
    "argmax": "highest id",
    "eos": "end",
    "cls_pooler": "first",
    "mean_pooler": "mean",
}


def row(name: str) -> list[str]:
    """Return the row of one architecture."""
    config, _ = get_model_config(name)
    with torch.device("meta"):
        image, _, _ = reader_towers(config)
    (kind, _, pool), (words, _, token) = (of_tower.partition(", pooled by ") for of_tower in kinds_of(config))
    if trunk := getattr(image.tower, "trunk", None):  # timm's
        pool = getattr(trunk, "global_pool", None) or trunk.head.global_pool.pool_type
    token = token or config["text_cfg"].get("hf_pooler_type", "mean_pooler")
    pools = "; ".join(POOLED.get(one, one) for one in (pool or "attention", token))
    tokenizer = "file" if config["text_cfg"].get("hf_tokenizer_name") else "bundled"
    seen = f"{image.num_tokens} of {image.width}"
    squares = f"{image.grid_size[0]} x {image.grid_size[1]} squares"
    refused = [one for one, method in all_methods().items() if method.objective.unserved(method.config(), config)]
    methods = f"all but {', '.join(refused)}" if refused else "all"
    return [name, kind, words, seen, pools, tokenizer, squares, methods]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--names", nargs="+", choices=open_clip.list_models(), default=open_clip.list_models(), metavar="NAME")
    add("--write", type=Path, metavar="PAGE", help="page whose table to replace; default: print it")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write or print the table."""
    options = parse(arguments)
    table = markdown(HEADS, [row(name) for name in options.names])
    if options.write:
        write(options.write, {"architectures": table}, "dev/openclip_table")
    else:
        print("\n".join(table))


if __name__ == "__main__":
    from prolip.utils import console

    console.command(main)
