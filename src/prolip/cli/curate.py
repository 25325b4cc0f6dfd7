"""`prolip curate`: score training data, select samples by rules, write the kept samples, report the dropped ones."""

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

SCORED = "shards:TARS (not pipe:), csv:FILE, parquet:FILE, jsonl:FILE, images:FOLDER, coco:JSON,IMAGES..."
AGAIN = "shards with full addresses; tables omit user info and queries"
MANY = "Several processes, such as a SLURM array, share the shards. The same command resumes an interrupted run."
DROP = """drop samples for which FORMULA is true, with NAME as the reason; repeatable. Formulas use the columns
below, quantile(text_tokens, 0.9), and, or, not"""
#: The folder of scores to read.
FOLDER = flag("folder", "folder written by prolip curate score", metavar="FOLDER", type=Path)


def reader(args: argparse.Namespace) -> ShardReader:
    """Return a reader of the shards that the tables name."""
    from prolip.curate.score import SourceReader, name_of, urls_of
    from prolip.data.reading.remote import ReadPolicy

    addresses = {name_of(url): url for url in (urls_of(args.data) if args.data else ())}
    return SourceReader(ReadPolicy(public_only=not args.allow_private_hosts), addresses=addresses)


@command(
    "curate score",
    "--data data/emoji/noto.tar --model local-dir:runs/demo/model --output runs/curated",
    shared(Data, "data", "part", required=["data"], help={"data": SCORED}),
    MODEL,
    flag("--caption-sampling", "caption fields; uses the one with the highest weight", default="txt", metavar="FIELDS"),
    shared(Compute, "device", "precision", "workers"),
    output("folder for the tables of scores"),
    more=MANY,
)
def score(args: argparse.Namespace) -> int:
    """Embed every sample and write its scores. Return 1 if a shard is unreadable in part or no sample is usable."""
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
        print(f"{len(numbers) - len(missing)} of {len(numbers)} shards already have scores", file=sys.stderr)
    for note in made(missing, scorer.path, scorer.score):
        notes.append(note)
        shard, samples = plain(note["shard"]), note["samples"]
        if note["broken"]:
            print(f"{shard} is damaged; the samples before the damage are scored", file=sys.stderr)
        elif samples and not note["usable"]:
            what = f"none of its {samples} samples is usable; the first: {plain(note['first'])}"
            print(f"{shard}: {what}", file=sys.stderr)
    faults = sum((Counter(note["faults"]) for note in notes), Counter())
    seen = "".join(f"; {kind} {count}" for kind, count in faults.most_common())
    broken = sum(bool(note["broken"]) for note in notes)
    others = f", {len(missing) - len(notes)} by other processes" if len(missing) > len(notes) else ""
    print(f"{len(notes) - broken} shard{'s' * (len(notes) - broken != 1)} scored into {folder / SCORES}{others}{seen}")
    if paths := [path for path in map(scorer.path, numbers) if path.exists()]:
        print(own_first(paths))
    useless = len(notes) == len(urls) and not any(note["usable"] for note in notes)
    if useless:
        print("no sample of any shard is usable", file=sys.stderr)
    return 1 if broken or useless else 0


@command(
    "curate select",
    "runs/curated --drop 'weak:match_probability<0.2' --duplicates 0.97",
    FOLDER,
    flag("--drop", DROP, action="append", default=[], metavar="'NAME: FORMULA'"),
    flag("--duplicates", "keep only the best of images more similar than this: 0.97", type=float, metavar="COSINE"),
    flag("--keep", "fraction of samples to keep, best first by --rank-by (default: all)", default=1.0, metavar="SHARE"),
    flag("--rank-by", "ranking, larger is better, such as normalised_score", metavar="FORMULA"),
    flag("--copies", "average number of copies of a sample to write, 0 to 10", metavar="FORMULA"),
    flag("--yes", "allow rules on scores to drop over half, and rules on scores that are noise", action="store_true"),
    flag("--dropped", "also write shard, key and reasons of each dropped sample (.jsonl)", type=Path, metavar="FILE"),
    flag("--subset", "also write the kept uids, for DataComp's filtering track (.npy)", type=Path, metavar="FILE"),
    more="columns:\n" + "\n".join(f"  {name:<20} {words}" for name, words in MEANINGS.items()),
)
def choose(args: argparse.Namespace) -> None:
    """Select samples by rules on the scores."""
    from prolip.curate.rules import Expression, parse_rules
    from prolip.curate.select import SELECTION, SUMMARY, Choice, select, write_dropped, write_subset

    by, copies = (None if text is None else Expression.parse(text) for text in (args.rank_by, args.copies))
    rules = parse_rules(args.drop)
    choice = Choice(rules=rules, keep=args.keep, by=by, copies=copies, duplicates=args.duplicates)
    for place in filter(None, (args.dropped, args.subset)):
        check_output(place)
    try:
        summary = select(args.folder, choice, args.yes)
    except ValueError as error:
        if (args.folder / SELECTION / SUMMARY).exists():
            error.args = (f"{error}. The earlier selection remains",)
        raise
    often = f", written {summary['written']:,} times" if summary["written"] != summary["kept"] else ""
    print(f"{summary['kept']:,} of {summary['samples']:,} samples are kept{often}")
    for name in summary["listed"]:
        print(f"  {name:<16} {summary['dropped'][name]:>10,} dropped, {summary['dropped_alone'][name]:,} only by it")
    if faults := summary["faults"]:
        print("  faults while reading: " + ", ".join(f"{kind} {count}" for kind, count in faults.items()))
    print(f"written to {args.folder / SELECTION}")
    if args.dropped is not None:
        print(f"{write_dropped(args.folder, args.dropped):,} dropped samples in {args.dropped}")
    if args.subset is not None:
        print(f"{write_subset(args.folder, args.subset):,} uids in {args.subset}")
    if summary["warning"]:
        print(f"warning: {summary['warning']}", file=sys.stderr)


@command(
    "curate write",
    "runs/curated --output runs/kept",
    FOLDER,
    shared(Data, "data", "allow_private_hosts", "part", help={"data": AGAIN}),
    flag("--shard-samples", "samples per new shard", default=10_000, least=1),
    flag("--processes", "processes for indexing (default: all cores but one)", least=0),
    output("folder for the new shards"),
    more=MANY,
)
def write(args: argparse.Namespace) -> None:
    """Write the kept samples as new shards with an index."""
    from prolip.curate.select import described
    from prolip.curate.write import ShardPlan, write_shards

    plan, out = ShardPlan(args.folder, args.shard_samples, reader(args)), Path(args.output)
    part = part_of(args.part)
    check_output(out, folder=True)
    print(described(args.folder, plan.summary["choice"]))
    processes = default_workers() if args.processes is None else args.processes
    counts, missing = write_shards(plan, out, part, processes)
    left = f"; {missing} are still missing (the last process writes the index)" if missing else ", with their index"
    print(f"{sum(counts):,} samples in {len(counts)} new shard{'s' * (len(counts) != 1)} in {out}{left}")


@command(
    "curate report",
    "runs/curated",
    FOLDER,
    shared(Data, "data", "allow_private_hosts", help={"data": AGAIN}),
    flag("--top", "samples shown per reason", default=12, least=0),
)
def report(args: argparse.Namespace) -> None:
    """Write a report of dropped samples and reasons, with examples."""
    from prolip.curate.report import write_page

    started = time.monotonic()
    print(f"{write_page(args.folder, args.top, reader(args))} in {time.monotonic() - started:.0f} s")
