"""Time and memory of fitting variances to saved pairs, against one pass over them.

    python scripts/bench/use/fit.py --pairs 100000 --dim 512 --threads 2

Pairs are synthetic: texts lie near their images, nearer if they match fewer images. Each round prints the time of a
fit, its part for novelty, and its ratio to one product of all texts with the images of a code length. Peak memory is
the peak of the process during the fit (Linux), minus its size before, which includes the pairs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import torch
from torch import Tensor

from bench.common import forget_peak, held
from prolip.embeddings import Pairs
from prolip.uncertainty import fit, targets
from prolip.uncertainty.novelty import SAMPLE


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--width", type=int, default=768, help="width of the image tower")
    parser.add_argument("--vocabulary", type=int, default=49_408)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def draw(count: int, dim: int, width: int, vocabulary: int) -> Pairs:
    """Draw images, each with a text at the centre of 1, 2, 4, 8 or 16 neighbours, of eight tokens.

    First tokens are drawn for as many texts as a fit keeps, from a text tower as wide as the means.
    """
    g = torch.Generator().manual_seed(0)
    size = 2 ** torch.randint(0, 5, (count,), generator=g)
    noise = 0.3 * torch.randn(count, dim, generator=g) * size.log2().mul(0.3).add(0.5).unsqueeze(1) / dim**0.5
    text = torch.nn.functional.normalize(torch.randn(count, dim, generator=g), dim=1)
    image = torch.nn.functional.normalize(text + noise, dim=1)
    ids = (vocabulary ** torch.rand(count, 8, generator=g)).long().clamp(max=vocabulary - 1)
    kept = torch.linspace(0, count - 1, min(count, SAMPLE)).long()
    first = {"image": width, "text": dim}
    tokens = {f"{side}_first": torch.randn(len(kept), 2 * size, generator=g).half() for side, size in first.items()}
    rows = {f"{side}_first_of": kept.clone() for side in first}
    return Pairs.in_rows(image, text, 50.0, text_ids=ids, **tokens, **rows)


def one_pass(pairs: Pairs) -> Tensor:
    """Compute the products of all texts with the images of a code length."""
    keys = pairs.image[: targets.SAMPLE]
    return torch.cat([(rows @ keys.T).amax(1) for rows in pairs.text.split(4096)])


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    pairs = draw(options.pairs, options.dim, options.width, options.vocabulary)
    size = sum(x.numel() * x.element_size() for x in pairs.tensors().values()) / 2**20
    print(f"{len(pairs):,} pairs of width {options.dim}, {size:.0f} MiB; {options.threads} threads")
    for number in range(options.rounds):
        before = forget_peak() / 2**20
        start = time.perf_counter()
        fit.fit_variances(pairs, vocabulary=options.vocabulary)
        fitted, peak = time.perf_counter(), held() / 2**20
        for side in ("image", "text"):
            fit.fit_novelty_of(pairs, side, centres=512)
        novelty = time.perf_counter()
        one_pass(pairs)
        passed = time.perf_counter()
        print(
            f"round {number}: fit {fitted - start:.1f} s (novelty {novelty - fitted:.1f}),"
            f" {(fitted - start) / (passed - novelty):.1f} times one pass;"
            f" peak {peak - before:.0f} MiB above the pairs, {peak:.0f} in all",
            flush=True,
        )


if __name__ == "__main__":
    main()
