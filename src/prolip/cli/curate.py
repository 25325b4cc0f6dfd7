"""`prolip curate`: score training data, select by rules, write what is kept, report what is not."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from prolip.cli.command import MODEL, Compute, Data, check, command, flag, load, output, part_of, shared
from prolip.curate.rules import MEANINGS
from prolip.utils.console import plain
from prolip.utils.outputs import check_output
from prolip.utils.threads import default_workers

if TYPE_CHECKING:
    from prolip.data.reading.tar import ShardReader

SCORED = "shards:TARS but for pipe:, csv:FILE, parquet:FILE, jsonl:FILE, images:FOLDER, coco:JSON,IMAGES..."
AGAIN = "the shards again, where addresses have user info or queries: tables do not"
MANY = (
    "Start it as often as you like, such as by a SLURM array: the processes share the shards, and the same command "
    "resumes an interrupted run."
)
DROP = """drop samples of which the formula is true, for this reason; as many rules as you like, with columns such
as match_probability, text_bits, quantile(text_tokens, 0.9), and, or, not"""
#: The folder of scores that a command reads.
FOLDER = flag("folder", "folder that prolip curate score wrote", metavar="FOLDER", type=Path)


def reader(args: argparse.Namespace) -> ShardReader:
    """A reader of the shards that the tables name."""
    from prolip.curate.score import SourceReader, name_of, urls_of
    from prolip.data.reading.remote import ReadPolicy

    addresses = {name_of(url): url for url in (urls_of(args.data) if args.data else ())}
    return SourceReader(ReadPolicy(public_only=not args.allow_private_hosts), addresses=addresses)


@command(
    "curate score",
    "--data data/emoji/noto.tar --model local-dir:runs/demo/model --output runs/curated",
    shared(Data, "data", "part", required=["data"], help={"data": SCORED}),
    MODEL,
    flag("--caption-sampling", "fields of captions, of which the likeliest is taken", default="txt", metavar="FIELDS"),
    shared(Compute, "device", "precision", "workers"),
    output("folder for the tables of scores"),
    more=MANY,
)
def score(args: argparse.Namespace) -> int:
    """Embed every sample and write its scores. 1 where a shard cannot be read to its end, or no sample is usable."""
    from prolip.curate.score import Scorer, urls_of
    from prolip.curate.select import own_first
    from prolip.curate.tables import SCORES, made
    from prolip.data.captions import CaptionSampler

    check(args, folder=True)
    CaptionSampler.parse(args.caption_sampling)
    urls = urls_of(args.data)
    first, parts = part_of(args.part)
    numbers, folder = range(first, len(urls), parts), Path(args.output)
    threads = default_workers() if args.workers is None else args.workers
    scorer = Scorer.of(load(args), urls, folder, args.caption_sampling, threads)
    scorer.begin()
    missing, notes = scorer.missing(numbers), []
    if len(numbers) > len(missing):
        print(f"{len(numbers) - len(missing)} of {len(numbers)} shards have their scores already", file=sys.stderr)
    for note in made(missing, scorer.path, scorer.score):
        notes.append(note)
        shard, samples = plain(note["shard"]), note["samples"]
        if note["broken"]:
            print(f"{shard} cannot be read to its end; what came before is scored", file=sys.stderr)
        elif samples and not note["usable"]:
            what = f"none of its {samples} samples can be used, the first: {plain(note['first'])}"
            print(f"{shard}: {what}", file=sys.stderr)
    faults = sum((Counter(note["faults"]) for note in notes), Counter())
    seen = "".join(f"; {kind} {count}" for kind, count in faults.most_common())
    broken = sum(bool(note["broken"]) for note in notes)
    others = f", {len(missing) - len(notes)} by other processes" if len(missing) > len(notes) else ""
    print(f"{len(notes) - broken} shards scored into {folder / SCORES}{others}{seen}")
    if paths := [path for path in map(scorer.path, numbers) if path.exists()]:
        print(own_first(paths))
    useless = len(notes) == len(urls) and not any(note["usable"] for note in notes)
    if useless:
        print("no sample of any shard can be used", file=sys.stderr)
    return 1 if broken or useless else 0


@command(
    "curate select",
    "runs/curated --drop 'weak:match_probability<0.2' --duplicates 0.97",
    FOLDER,
    flag("--drop", DROP, action="append", default=[], metavar="'NAME: FORMULA'"),
    flag("--duplicates", "keep only the best of images nearer than this, e.g. 0.97", type=float, metavar="COSINE"),
    flag("--keep", "share of all samples to keep, the best by --rank-by (default: all)", default=1.0, metavar="SHARE"),
    flag("--rank-by", "what is better, such as normalised_score", metavar="FORMULA"),
    flag("--copies", "times that a sample is written on average, 0 to 10", metavar="FORMULA"),
    flag("--yes", "drop more than half by rules on scores, and by scores that are noise", action="store_true"),
    flag("--subset", "also write the kept uids, for DataComp's filtering track (.npy)", type=Path, metavar="FILE"),
    more="columns:\n" + "\n".join(f"  {name:<18} {words}" for name, words in MEANINGS.items()),
)
def choose(args: argparse.Namespace) -> None:
    """Select what is kept, by rules on the scores."""
    from prolip.curate.rules import Expression, parse_rules
    from prolip.curate.select import SELECTION, Choice, select, write_subset

    by, copies = (None if text is None else Expression.parse(text) for text in (args.rank_by, args.copies))
    rules = parse_rules(args.drop)
    choice = Choice(rules=rules, keep=args.keep, by=by, copies=copies, duplicates=args.duplicates)
    if args.subset is not None:
        check_output(args.subset)
    summary = select(args.folder, choice, args.yes)
    often = f", written {summary['written']:,} times" if summary["written"] != summary["kept"] else ""
    print(f"{summary['kept']:,} of {summary['samples']:,} samples are kept{often}")
    for name in summary["listed"]:
        print(f"  {name:<16} {summary['dropped'][name]:>10,} dropped, {summary['dropped_alone'][name]:,} by it alone")
    if faults := summary["faults"]:
        print("  seen while reading: " + ", ".join(f"{kind} {count}" for kind, count in faults.items()))
    print(f"written to {args.folder / SELECTION}")
    if args.subset is not None:
        print(f"{write_subset(args.folder, args.subset):,} uids in {args.subset}")
    if summary["warning"]:
        print(f"warning: {summary['warning']}", file=sys.stderr)


@command(
    "curate write",
    "runs/curated --output runs/kept",
    FOLDER,
    shared(Data, "data", "allow_private_hosts", "part", help={"data": AGAIN}),
    flag("--shard-samples", "samples of a new shard", default=10_000, least=1),
    flag("--processes", "processes that index (default: all cores but one)", least=0),
    output("folder for the new shards"),
    more=MANY,
)
def write(args: argparse.Namespace) -> None:
    """Write the kept samples as new shards with an index."""
    from prolip.curate.write import ShardPlan, write_shards

    plan, out = ShardPlan(args.folder, args.shard_samples, reader(args)), Path(args.output)
    part = part_of(args.part)
    check_output(out, folder=True)
    processes = default_workers() if args.processes is None else args.processes
    counts, missing = write_shards(plan, out, part, processes)
    left = f"; {missing} are still missing, the index follows with the last" if missing else ", with their index"
    print(f"{sum(counts):,} samples in {len(counts)} new shards in {out}{left}")


@command(
    "curate report",
    "runs/curated",
    FOLDER,
    shared(Data, "data", "allow_private_hosts", help={"data": AGAIN}),
    flag("--top", "samples shown of each reason", default=12, least=0),
)
def report(args: argparse.Namespace) -> None:
    """Write a page of what was dropped and why, with examples."""
    from prolip.curate.report import write_page

    started = time.monotonic()
    print(f"{write_page(args.folder, args.top, reader(args))} in {time.monotonic() - started:.0f} s")
