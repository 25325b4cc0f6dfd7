"""Curate image-text data by what a model knows of it, and by what it does not know.

    python -m prolip.curate score  --data 'shards/{000..099}.tar' --model local-dir:runs/demo/model --out runs/curated
    python -m prolip.curate select --out runs/curated --drop 'mismatch: match_probability < 0.2' --duplicates 0.97 \\
        --keep 0.7 --by normalised_score
    python -m prolip.curate write  --out runs/curated --shards-out kept
    python -m prolip.curate report --out runs/curated

score embeds every sample once and writes a Parquet table for each shard. Start it as often as you like, such as by a
SLURM array: the processes share the shards, and a run that was broken off goes on. A shard that has changed is scored
again. select is cheap: try as many rules as you like. write makes shards of what is kept, with an index, the same bytes
whoever writes them.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from prolip.curate.claims import claimed, stamp, turned
from prolip.curate.expressions import Expression, parse_rules
from prolip.curate.figures import MEANINGS, Figures
from prolip.curate.page import write_page
from prolip.curate.score import Scorer
from prolip.curate.select import SELECTION, Choice, select, write_subset
from prolip.curate.tables import SCORES
from prolip.curate.write import Plan, begin, finish, write_shard
from prolip.data.faults import ShardFault
from prolip.data.reading.entries import canonical, find_index
from prolip.data.reading.opening import ReadPolicy
from prolip.data.reading.shards import expand_shards
from prolip.data.reading.tar import ShardReader
from prolip.data.samples.captions import CaptionSampler
from prolip.evaluation.loading import load_embedder
from prolip.evaluation.model import PRECISIONS, check_device
from prolip.models.weights.checkpoint import CheckpointError
from prolip.utils import console
from prolip.utils.console import plain
from prolip.utils.messages import at_least
from prolip.utils.outputs import check_output
from prolip.utils.threads import default_workers, in_threads


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m prolip.curate", description=__doc__, formatter_class=as_written)
    commands = parser.add_subparsers(dest="command", required=True, metavar="score|select|write|report")
    scoring = commands.add_parser("score", help="embed every sample, write its figures")
    columns = "\n".join(f"  {name:<18} {words}" for name, words in MEANINGS.items())
    selecting = commands.add_parser("select", help="say what is kept", epilog=f"figures:\n{columns}",
                                    formatter_class=as_written)  # fmt: skip
    writing = commands.add_parser("write", help="write what is kept as new shards")
    reporting = commands.add_parser("report", help="a page of what was dropped, with examples")
    for command in (scoring, selecting, writing, reporting):
        command.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the tables")
    for command, what in ((scoring, "shard"), (writing, "new shard")):
        command.add_argument("--part", metavar="I/N", help=f"only every N-th {what} from the I-th, counted from 0; "
                             "default: all that no other process holds")  # fmt: skip
    for command in (writing, reporting):
        add = command.add_argument
        add("--data", help="the shards again, where addresses have user info or queries: tables do not")
        add("--allow-private-hosts", action="store_true", help="for http(s) shards that the tables name")
    add_score(scoring)
    add_select(selecting)
    add = writing.add_argument
    add("--shards-out", type=Path, required=True, metavar="DIR", help="folder of the new shards")
    add("--shard-samples", type=int, default=10_000, help="in each of them (default: %(default)s)")
    add("--workers", type=int, default=default_workers(), help="processes that index (default: %(default)s)")
    add = reporting.add_argument
    add("--examples", type=int, default=12, help="samples shown of each reason (default: %(default)s)")
    return parser.parse_args(arguments)


def add_score(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", required=True, help="shards, as --train-data of training.main takes them but for pipe:")
    add("--model", required=True, help="local-dir:FOLDER, hf-hub:NAME, or a name with --pretrained")
    add("--pretrained", help="weights of a model that is given by its name")
    add("--caption-sampling", default="txt", help="where captions are, as in training; of several the likeliest")
    add("--workers", type=int, default=default_workers(), help="threads that decode (default: %(default)s)")
    add("--precision", default="fp32", choices=PRECISIONS)
    add("--device", default="cpu")


def add_select(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--drop", action="append", default=[], metavar="'NAME: FORMULA'",
        help="a rule: samples of which the formula is true go, for this reason; as many as you like, with columns such"
             " as match_probability, text_bits, quantile(text_tokens, 0.9), and, or, not")  # fmt: skip
    add("--duplicates", type=float, metavar="COSINE", help="of images nearer than this only the best stays, e.g. 0.97")
    add("--keep", type=float, default=1.0, metavar="SHARE", help="of all samples, the best --by (default: all)")
    add("--by", metavar="FORMULA", help="what is better, such as normalised_score")
    add("--copies", metavar="FORMULA", help="how often a sample is written on average, 0 to 10")
    add("--subset", type=Path, metavar="FILE", help="also the kept uids, as DataComp's filtering track has them (.npy)")


def reader_of(options: argparse.Namespace) -> ShardReader:
    """A reader of shards whose addresses stand in tables."""
    given = expand_shards(options.data) if options.data else ()
    addresses = {canonical(shard.url): shard.url for shard in given}
    return ShardReader(ReadPolicy(public_only=not options.allow_private_hosts), addresses=addresses)


def part_of(text: str | None, count: int) -> range:
    """The numbers that --part leaves to this process."""
    if text is None:
        return range(count)
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise ValueError(f"--part {text!r}: give I/N with I from 0 to N - 1, such as 0/16")
    return range(int(part), count, int(parts))


def score(options: argparse.Namespace) -> int:
    """Score what no other process scores; 1 where a shard cannot be read to its end, or no sample could be used."""
    check_device(options.device)
    captions = CaptionSampler.parse(options.caption_sampling)
    urls = [shard.url for shard in expand_shards(options.data)]
    numbers = part_of(options.part, len(urls))
    check_output(options.out, folder=True)
    model = load_embedder(options.model, options.pretrained, options.device, options.precision)
    about = {"model": model.name, "fingerprint": model.fingerprint, "precision": options.precision,
             "captions": options.caption_sampling, "score": model.score.name}  # fmt: skip
    scorer = Scorer(urls, options.out, Figures(model), model.preprocess, captions, about,
                    ShardReader(ReadPolicy(), find_index(urls)), options.workers)  # fmt: skip
    scorer.begin()
    stamps = {number: stamp(scorer.path(number)) for number in numbers}  # before it is asked whether they are done
    done = in_threads(scorer.is_done, iter(numbers), options.workers, 64)
    waiting = [number for number, is_done in zip(numbers, done) if not is_done]
    if len(numbers) > len(waiting):
        print(f"{len(numbers) - len(waiting)} of {len(numbers)} shards have their scores already", file=sys.stderr)
    notes = []
    for number in tqdm(turned(waiting), unit="shard", disable=None):
        with claimed(scorer.path(number), stamps[number]) as mine:
            if mine:
                notes.append(scorer.score(number))
                complain(notes[-1])
    faults = sum((Counter(note["faults"]) for note in notes), Counter())
    seen = "".join(f"; {kind} {count}" for kind, count in faults.most_common())
    broken = sum(bool(note["broken"]) for note in notes)
    others = f", {len(waiting) - len(notes)} by other processes" if len(waiting) > len(notes) else ""
    print(f"{len(notes) - broken} shards scored into {options.out / SCORES}{others}{seen}")
    useless = len(notes) == len(urls) and not any(note["usable"] for note in notes)
    if useless:
        print("no sample of any shard can be used", file=sys.stderr)
    return 1 if broken or useless else 0


def complain(note: dict[str, Any]) -> None:
    """Say loudly what is wrong with a whole shard."""
    shard, samples = plain(note["shard"]), note["samples"]
    if note["broken"]:
        print(f"{shard} cannot be read to its end; what came before is scored", file=sys.stderr)
    elif samples and not note["usable"]:
        print(f"{shard}: none of its {samples} samples can be used, the first: {plain(note['first'])}", file=sys.stderr)


def choose(options: argparse.Namespace) -> int:
    """Select, and print what became of the samples."""
    by, copies = (None if text is None else Expression.parse(text) for text in (options.by, options.copies))
    choice = Choice(rules=parse_rules(options.drop), keep=options.keep, by=by, copies=copies,
                    duplicates=options.duplicates)  # fmt: skip
    if options.subset is not None:
        check_output(options.subset)
    summary = select(options.out, choice)
    print(f"{summary['kept']:,} of {summary['samples']:,} samples are kept"
          + (f", written {summary['written']:,} times" if summary["written"] != summary["kept"] else ""))  # fmt: skip
    for name, dropped in summary["dropped"].items():
        if dropped:
            print(f"  {name:<16} {dropped:>10,} dropped, {summary['dropped_alone'][name]:,} by it alone")
    if faults := summary["faults"]:
        print("  seen while reading: " + ", ".join(f"{kind} {count}" for kind, count in faults.items()))
    print(f"written to {options.out / SELECTION}")
    if options.subset is not None:
        print(f"{write_subset(options.out, options.subset):,} uids in {options.subset}")
    return 0


def write(options: argparse.Namespace) -> int:
    """Write the new shards of this part, and the index where they are the last."""
    plan = Plan(options.out, options.shard_samples, reader_of(options))
    numbers = part_of(options.part, plan.count)
    check_output(options.shards_out, folder=True)
    begin(plan, options.shards_out)
    waiting = [number for number in numbers if not plan.path(options.shards_out, number).exists()]
    counts = []
    for number in tqdm(turned(waiting), unit="shard", disable=None):
        with claimed(plan.path(options.shards_out, number), None) as mine:
            if mine:
                counts.append(write_shard(plan, options.shards_out, number))
    missing = finish(plan, options.shards_out, options.workers)
    left = f"; {missing} are still missing, the index follows with the last" if missing else ", with their index"
    print(f"{sum(counts):,} samples in {len(counts)} new shards in {options.shards_out}{left}")
    return 0


def report(options: argparse.Namespace) -> int:
    """Write the page."""
    started = time.monotonic()
    print(f"{write_page(options.out, options.examples, reader_of(options))} in {time.monotonic() - started:.0f} s")
    return 0


@console.ends_in_one_line(OSError, ValueError, ImportError, CheckpointError, ShardFault)
def main(arguments: Sequence[str] | None = None) -> int:
    """The command: what the user can mend ends in one line and exit code 2."""
    options = parse(arguments)
    at_least(options, 0, "workers", "examples")
    at_least(options, 1, "shard_samples")
    commands = {"score": score, "select": choose, "write": write, "report": report}
    return commands[options.command](options)


if __name__ == "__main__":
    console.command(main)
