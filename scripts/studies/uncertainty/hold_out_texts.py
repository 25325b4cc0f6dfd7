"""Shards without some of their keywords and subgroups, to test a model on unseen texts.

    python scripts/studies/uncertainty/hold_out_texts.py \\
        data/emoji/{noto,noto-v1,twemoji,fluent-emoji-flat,fluent-emoji}.tar \\
        --select "group=animals nature|food drink|travel places; subgroup!=time" --seed 0 --output runs/held0

The script removes a fifth of the keywords and subgroups of the selected concepts, drawn by the seed, from every sample.
Names and groups stay. held.json next to the shards lists the removed texts.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "src"))

import numpy as np

from prolip.corpora.emoji import corpus as emoji
from prolip.utils.outputs import replacing_folder

HELD = "held.json"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("shards", nargs="+", type=Path, help="tar files with the layout of data/emoji")
    add("--output", type=Path, required=True, help="folder for the new shards")
    add("--select", help="concepts whose texts may be removed; default: all")
    add("--share", type=float, default=0.2, help="share of texts to remove (default: %(default)s)")
    add("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    corpus = emoji.read(options.shards)
    held = draw_texts(corpus.select(options.select) if options.select else corpus, options.share, options.seed)
    with replacing_folder(options.output, kept=lambda name: True) as place:
        for shard in options.shards:
            rewrite(shard, place / shard.name, held)
        (place / HELD).write_text(json.dumps(sorted(held), ensure_ascii=False, indent=0), encoding="utf-8")
    print(f"{len(held)} texts are not in {options.output}; {HELD} lists them")


def draw_texts(corpus: emoji.Corpus, share: float, seed: int) -> set[str]:
    """Draw a share of the keywords and subgroups that are not also names or groups."""
    texts = {level: {text for concept in corpus.concepts for text in concept.captions(level)} for level in emoji.LEVELS}
    free = sorted((texts["keyword"] | texts["subgroup"]) - texts["name"] - texts["group"])
    return set(np.random.default_rng(seed).choice(free, round(share * len(free)), replace=False).tolist())


def rewrite(shard: Path, to: Path, held: set[str]) -> None:
    """Write the shard without these texts."""
    with tarfile.open(shard) as old, tarfile.open(to, "w") as new:
        for member in old:
            data = old.extractfile(member).read()  # type: ignore[union-attr]
            if member.name.endswith(".json"):
                sample = json.loads(data)
                sample["keywords"] = [text for text in sample["keywords"] if text not in held]
                if sample["subgroup"] in held:
                    sample["subgroup"] = ""
                data = json.dumps(sample, ensure_ascii=False).encode()
            member.size = len(data)
            new.addfile(member, io.BytesIO(data))


if __name__ == "__main__":
    main()
