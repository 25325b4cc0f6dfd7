"""`prolip data`: shard indexes, and data sets in the layouts that evaluation and training read."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from prolip.cli.command import Compute, Data, command, flag, output, shared
from prolip.cli.eval import SPLIT, TASK, open_named
from prolip.data.reading.named import KINDS, ROWS, parse_source
from prolip.data.split import parse_split
from prolip.utils.messages import first_few, naming

if TYPE_CHECKING:
    from prolip.data.reading.shard_index import IndexedShard

STORED = (*ROWS, "shards")  # sources that can be written as shards
WRITTEN = ", ".join(KINDS[kind] for kind in STORED)


# --- index ------------------------------------------------------------------------------------------------------------
INDEX = """Reads every shard once. The index holds its samples, bytes and SHA-256.
Skips and names unreadable shards; the exit code is then 1."""


def reading_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of read errors; a late import, because the defaults' module loads fsspec."""
    from prolip.data.reading.remote import ReadPolicy as Policy

    stall = "seconds without a byte before a source stalls"
    flag("--read-timeout", stall, type=float, metavar="SECONDS", default=Policy.read_timeout)(parser)
    flag("--read-retries", "consecutive failures before a shard is skipped", least=0, default=Policy.retries)(parser)


@command(
    "data index",
    "'data/emoji/*.tar' --output index.json",
    flag("shards", "paths, folders, URLs or pipe: commands; {braces}, *, a::b", nargs="+", metavar="SHARDS"),
    flag("--processes", "reading processes; 0: only this one (default: up to 4)", least=0),
    reading_flags,
    output("file for the index; default: index.json next to the shards", required=False),
    more=INDEX,
)
def index(args: argparse.Namespace) -> int:
    """Write an index of shards: counts and checksums. Return 1 if a shard is unreadable."""
    from prolip.data.reading.remote import ReadPolicy
    from prolip.data.reading.shard_index import build_index
    from prolip.data.reading.shards import urls_of

    with naming("--read-timeout"):
        policy = ReadPolicy(read_timeout=args.read_timeout, retries=args.read_retries, pipes=True)
    urls, start, last = urls_of(args.shards), time.monotonic(), 0.0
    found: list[IndexedShard] = []

    def line() -> str:
        read = [result.entry for result in found if result.entry is not None]
        samples, size = sum(entry.samples for entry in read), sum(entry.bytes for entry in read) / 2**20
        speed = size / max(time.monotonic() - start, 1e-9)
        return f"{len(found)} of {len(urls)} shards, {samples} samples, {size:.1f} MiB ({speed:.0f} MiB/s)"

    def add(result: IndexedShard) -> None:
        nonlocal last
        found.append(result)
        if result.message:
            print(f"{result.url}: {result.message}", file=sys.stderr)
        if time.monotonic() - last >= 5:
            last = time.monotonic()
            print(line(), file=sys.stderr)

    processes = min(4, os.cpu_count() or 1) if args.processes is None else args.processes
    place = build_index(urls, args.output, processes, policy, add)
    print(f"{place or 'no index written'}: {line()}")
    if faults := sum((result.faults for result in found), Counter[str]()):
        print("faults: " + ", ".join(f"{kind} {count}" for kind, count in faults.most_common()))
    if bad := sum(result.entry is None for result in found):
        print(f"{bad} of {len(urls)} shards are unreadable and were skipped (named above)")
    return 1 if bad else 0


# --- shards -----------------------------------------------------------------------------------------------------------
SHARDS = """Images keep their bytes. A single caption becomes the sample's .txt. Several become
the list `captions` of its .json, which also holds the class. Training reads both.
--layout wds writes clip_benchmark's files for evaluation: captions, or classes."""


@command(
    "data shards",
    "data/emoji/emojione.tar --layout wds --output runs/emojione",
    flag("source", f"data to write: {WRITTEN}; with --layout wds any test set", metavar="SOURCE"),
    flag("--layout", "reader of the shards", choices=("training", "wds"), default="training"),
    SPLIT,
    TASK,
    flag("--shard-size", "samples per shard", default=1000, least=1),
    shared(Data, "skip_damaged"),
    output("new folder for the shards"),
    more=SHARDS,
)
def shards(args: argparse.Namespace) -> None:
    """Write a table, a folder or a published set as shards."""
    from prolip.data.faults import FaultCounter
    from prolip.data.reading.csv import show_counts
    from prolip.data.reading.rows import read_stored
    from prolip.data.reading.tar import strict_note
    from prolip.evaluation.datasets.write import write_training, write_wds

    show_counts()
    damage = FaultCounter()
    if args.layout == "wds":
        dataset = open_named("SOURCE", args.source, args.split, args.skip_damaged, args.task)
        count, damage = write_wds(dataset, args.output, args.shard_size), dataset.damage or damage
    else:
        source = parse_source(args.source, "SOURCE", STORED)
        found = read_stored(source, damage.add if args.skip_damaged else strict_note, parse_split(args.split))
        count = write_training(found, args.output, args.shard_size)
    use = f"train on them with --train-data {args.output}"
    if args.layout == "wds" or not isinstance(parse_split(args.split), str | None):  # the held-out share
        use = f"evaluate on them with --data {'wds' if args.layout == 'wds' else 'shards'}:{args.output}"
    print(f"{count:,} samples written; {use}")
    if damage.kinds:
        lost = ", ".join(f"{number} {kind}" for kind, number in damage.kinds.items())
        print(f"skipped: {lost}, such as {first_few(list(damage.examples), 1)}", file=sys.stderr)


# --- emoji ------------------------------------------------------------------------------------------------------------
@command(
    "data emoji",
    "--data data/emoji/emojione.tar --classes group --output runs/groups",
    flag("--data", "shards of the corpus", nargs="+", required=True, metavar="TAR"),
    flag("--select", "concepts to use: demo, or 'group=animals nature|food drink'", metavar="RULE"),
    flag("--classes", "write a classification by these instead of a retrieval", choices=("subgroup", "group")),
    output("folder for the task"),
)
def emoji(args: argparse.Namespace) -> None:
    """Write drawings of the bundled corpus as a test set."""
    from prolip.corpora.emoji.corpus import read
    from prolip.corpora.emoji.export import write_emoji, write_emoji_classes

    with naming("--data"):
        corpus = read(args.data)
    with naming("--select"):
        corpus = corpus.select(args.select) if args.select else corpus
    if args.classes:
        write_emoji_classes(corpus, args.output, args.classes)
    else:
        write_emoji(corpus, args.output)
    print(f"{len(corpus.drawings)} drawings written; evaluate them with --data wds:{Path(args.output)}")


# --- few-shot ---------------------------------------------------------------------------------------------------------
FEW_SHOT = """Without --test-data, the command draws at most half of a class's images; the others are the
test images. It writes:
  FOLDER/train.tar      the drawn images, each with the prompt of its class as its caption
  FOLDER/base, novel    test sets of the first half of the classes, and of the second
  FOLDER/all            with --train-on all: one test set instead of two"""


@command(
    "data few-shot",
    "--data wds:runs/groups --shots 16 --output runs/few",
    flag("--data", "set to draw from: wds:FOLDER, images:FOLDER, csv:FILE", required=True, metavar="SOURCE"),
    flag("--split", "split of --data (default: test)"),
    flag("--test-data", "test images (default: --data, with --test-split or the rest)", metavar="SOURCE"),
    flag("--test-split", "split of --test-data (default: test)"),
    flag("--shots", "images per class", default=16, least=1),
    flag("--train-on", "train on the first half of the classes, or on all", choices=("base", "all"), default="base"),
    flag("--template", "prompt of a class, {c} for its name; default: 'a photo of a {c}'"),
    shared(Compute, "seed", help={"seed": "seed of the draw"}),
    output("folder for the training shard and the tests"),
    more=FEW_SHOT,
)
def few_shot(args: argparse.Namespace) -> None:
    """Draw few-shot training and test sets from a classification set."""
    from prolip.evaluation.datasets.few_shot import TEMPLATE, check_new, describe, draw, write_few_shot
    from prolip.evaluation.datasets.registry import open_dataset

    template = TEMPLATE if args.template is None else args.template
    together, folder = args.train_on == "all", Path(args.output)
    if "{c}" not in template and "{}" not in template:
        raise ValueError(f"--template {template!r} has no {{c}} for the class name: add it")
    check_new(folder, ("all",) if together else ("base", "novel"))  # before anything is read
    with naming(f"--data {args.data}"):
        dataset = open_dataset(args.data, args.split, task="classification")
    test, address = None, args.test_data or (args.data if args.test_split else None)
    if address:
        with naming(f"--test-data {address}"):
            test = open_dataset(address, args.test_split, task="classification")
    found = draw(dataset, test, args.shots, args.seed, together)
    write_few_shot(found, dataset, folder, test, template)
    print("\n".join(describe(found, dataset, folder, args.shots)))
