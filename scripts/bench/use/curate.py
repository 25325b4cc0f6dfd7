"""Curation of many samples: speed against the training loader's on the same shards, and memory over all steps.

    PYTHONPATH=src OMP_NUM_THREADS=1 python scripts/bench/use/curate.py                    # 1,000,000 samples

One shard of synthetic JPEGs stands for all: the others are links to it. No model runs. The loader decodes, resizes and
tokenizes; scoring does the same and also writes its tables. The two take turns; the ratio is the median over turns.
Then `score`, `select` and `write` run over all samples in this process, which prints its peak memory after each.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import statistics
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torch import Tensor

from prolip.curate.rules import Expression, parse_rules
from prolip.curate.score import Scorer
from prolip.curate.select import Choice, select
from prolip.curate.write import ShardPlan, write_shards
from prolip.data.captions import CaptionSampler
from prolip.data.config import DataConfig
from prolip.data.loader import build_loader
from prolip.data.reading.tar import ShardReader
from prolip.models.tokenizer import get_tokenizer

#: Different images of a shard.
PICTURES = 200


def make_shards(folder: Path, args: argparse.Namespace) -> list[str]:
    """Write one shard, and links to it."""
    generator = np.random.default_rng(0)
    pictures = []
    for _ in range(PICTURES):
        coarse = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse).resize((args.size, args.size)).save(file, "JPEG", quality=90)
        pictures.append(file.getvalue())
    first = folder / "000000.tar"
    with tarfile.open(first, "w") as tar:
        for number in range(args.shard_samples):
            record = json.dumps({"uid": f"{number:032x}"}).encode()
            caption = f"image {number} of something that is described in a few words".encode()
            for suffix, data in (("jpg", pictures[number % PICTURES]), ("txt", caption), ("json", record)):
                member = tarfile.TarInfo(f"{number:08d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    for number in range(1, args.samples // args.shard_samples):
        (folder / f"{number:06d}.tar").symlink_to(first)
    return sorted(str(path) for path in folder.glob("*.tar"))


def brightness(tokenize: Callable[..., Tensor], pixels: Tensor, captions: Sequence[str]) -> dict[str, np.ndarray]:
    """Return brightness as a stand-in for a model's signals."""
    ids = tokenize(list(captions))
    return {"score": pixels.mean((1, 2, 3)).numpy(), "text_tokens": (ids != 0).sum(1).numpy()}


def scorer(urls: Sequence[str], out: Path, args: argparse.Namespace) -> Scorer:
    """Build the scorer of shards as the command does."""
    figure: Any = partial(brightness, get_tokenizer(args.model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        preprocess = image_transform_v2(PreprocessCfg(size=args.image_size), is_train=False)
    made = Scorer(urls, out, figure, preprocess, CaptionSampler.parse("txt"), {}, ShardReader(), args.workers)
    made.begin()
    return made


def loaded(urls: Sequence[str], out: Path, args: argparse.Namespace) -> int:
    """Count the samples that the training loader yields."""
    preprocess = scorer(urls, out, args).preprocess
    config = DataConfig(
        train_data="::".join(urls),
        train_num_samples=len(urls) * args.shard_samples,
        shuffle_buffer=1,
        batch_size=min(250, args.shard_samples),
        workers=max(1, args.workers),
    )
    loader = build_loader(config, preprocess, get_tokenizer(args.model))
    loader.set_epoch(0)
    count = sum(len(batch["key"]) for batch in loader)
    loader.close()
    return count


def scored(urls: Sequence[str], out: Path, args: argparse.Namespace) -> int:
    """Score the shards and count the samples."""
    made = scorer(urls, out, args)
    for number in range(len(urls)):
        made.score(number)
    return len(urls) * args.shard_samples


def pace(way: Callable[..., int], urls: Sequence[str], args: argparse.Namespace) -> float:
    """Return samples per second."""
    with tempfile.TemporaryDirectory() as out:
        started = time.perf_counter()
        count = way(urls, Path(out), args)
        return count / (time.perf_counter() - started)


def peak() -> float:
    """Return the peak memory of this process so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def take_turns(urls: Sequence[str], args: argparse.Namespace) -> None:
    some = urls[: args.turn_shards]
    for way in (loaded, scored):  # not counted
        pace(way, urls[:1], args)
    both = [(pace(loaded, some, args), pace(scored, some, args)) for _ in range(args.rounds)]
    ratios = [second / first for first, second in both]
    medians = [statistics.median(values) for values in zip(*both)]
    print(
        f"loader {medians[0]:.0f} samples/s, scoring {medians[1]:.0f} samples/s: {statistics.median(ratios):.3f}"
        f" ({min(ratios):.3f} to {max(ratios):.3f})"
    )


def run_all(urls: Sequence[str], folder: Path, args: argparse.Namespace) -> None:
    """Run every step over all samples, and print its memory."""
    print(f"before: {peak():.0f} MB\n\n| step | seconds | samples/s | peak so far, MB |\n|---|---:|---:|---:|")
    started, made = time.perf_counter(), scorer(urls, folder / "scores", args)
    for number in range(len(urls)):
        made.score(number)
        if (number + 1) % max(1, len(urls) // 4) == 0:
            line(f"score, {(number + 1) * args.shard_samples:,}", started, (number + 1) * args.shard_samples)
    started = time.perf_counter()
    choice = Choice(
        rules=parse_rules(["dark: score < quantile(score, 0.1)"]),
        keep=0.7,
        by=Expression.parse("score"),
        copies=None,
        duplicates=None,
    )
    summary = select(folder / "scores", choice)
    line("select", started, args.samples)
    started, out = time.perf_counter(), folder / "kept"
    plan = ShardPlan(folder / "scores", args.shard_samples, ShardReader())
    counts, _ = write_shards(plan, out, processes=args.workers)
    count = sum(counts)
    line(f"write, {count:,} kept", started, count)
    assert count == summary["written"]


def line(name: str, started: float, samples: int) -> None:
    seconds = time.perf_counter() - started
    print(f"| {name} | {seconds:.1f} | {samples / seconds:.0f} | {peak():.0f} |", flush=True)


def main() -> None:
    """Print pace and memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--samples", type=int, default=1_000_000)
    add("--shard-samples", type=int, default=10_000)
    add("--size", type=int, default=64, help="side of the JPEGs, pixels (default: %(default)s)")
    add("--model", default="ProLIP-ViT-test", help="model whose tokenizer is used (default: %(default)s)")
    add("--image-size", type=int, default=32, help="side after resizing, pixels (default: %(default)s)")
    add("--workers", type=int, default=1, help="loader processes, scoring threads (default: %(default)s)")
    add("--turn-shards", type=int, default=4, help="shards per turn (default: %(default)s)")
    add("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.samples < args.shard_samples or args.samples % args.shard_samples:
        parser.error("--samples: give a multiple of --shard-samples")
    with tempfile.TemporaryDirectory() as folder:
        shards = Path(folder) / "shards"
        shards.mkdir()
        urls = make_shards(shards, args)
        take_turns(urls, args)
        run_all(urls, Path(folder), args)


if __name__ == "__main__":
    main()
