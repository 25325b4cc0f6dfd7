"""`prolip search`: an index of images or texts, and questions to it."""
from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from prolip.cli.command import Command, Compute, Data, Model, Output, add, load
from prolip.utils import console
from prolip.utils.messages import at_least

if TYPE_CHECKING:
    from prolip.evaluation.model import Embedder
    from prolip.search.answers import Question
    from prolip.search.index import SearchIndex
    from prolip.search.sources import Rebuild

SOURCES = "what to read: images:FOLDER, shards:TARS, features:FOLDER[,NAME] or texts:FILE"
OWN = {"model": "model of the index at another address (default: the one the index names)"}
HOSTS = {"allow_private_hosts": "fetch images that --calibrate names even from hosts in private networks"}
RETIRED = {
    "kind": "use --index-type", "effort": "use --probe", "shortlist": "use --rerank", "exactly": "use --exact",
    "together": "use --combine", "wider": "use --more-general", "narrower": "use --more-specific",
    "anew": "use --rebuild",
}  # fmt: skip


# --- flags ------------------------------------------------------------------------------------------------------------
def index_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of all commands on an index."""
    parser.add_argument("index", metavar="INDEX", help="folder of the index")
    parser.add_argument("--verify", action="store_true", help="first read the whole index and compare its checksums")


def source_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of reading a source."""
    parser.add_argument("--restore", action="store_true", help="add deleted items again, too")
    add(parser, Data, "data", "skip_damaged", required=["data"], help={"data": SOURCES})
    add(parser, Compute, "device", "precision", "batch_size", "workers")


def build_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `prolip search build`."""
    index_flags(parser)
    about = "type of the index: flat (exact), ivf, hnsw or pq (approximate) (default: flat)"
    parser.add_argument("--index-type", default="flat", metavar="TYPE", help=about)
    parser.add_argument("--lists", type=int, default=0, help="lists of ivf and pq (default: 4 sqrt(items))")
    about = "csd, mean, elk or another score (default: the score of the model's method)"
    parser.add_argument("--similarity", metavar="SCORE", help=about)
    about = "print how much room this many items take, and write nothing"
    parser.add_argument("--dry-run", type=int, metavar="ITEMS", help=about)
    add(parser, Model)
    source_flags(parser)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `prolip search add`."""
    index_flags(parser)
    add(parser, Model, help=OWN)
    source_flags(parser)


def finish_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `prolip search finish`."""
    index_flags(parser)
    parser.add_argument("--rebuild", action="store_true", help="learn the approximate index again, from all rows")


def delete_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `prolip search delete`."""
    index_flags(parser)
    parser.add_argument("--keys", nargs="+", required=True, metavar="KEY", help="keys to remove from the results")


def query_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `prolip search query`."""
    index_flags(parser)
    one = parser.add_argument
    one("--text", action="append", default=[], help="text to search by; may be given several times")
    one("--image", action="append", default=[], help="path or URL of an image to search by; likewise")
    one("--combine", action="store_true", help="make one query of the first --text and --image, and so on")
    ways = parser.add_mutually_exclusive_group()
    about = "of the nearest items, return those that include the query"
    ways.add_argument("--more-general", action="store_true", help=about)
    about = "of the nearest items, return those that the query includes"
    ways.add_argument("--more-specific", action="store_true", help=about)
    one("--top", type=int, default=10, help="answers to return (default: 10)")
    about = "lists to read (ivf, pq), or candidates to visit (hnsw): more finds more and takes longer"
    one("--probe", type=int, help=about)
    about = "candidates to score again, or to test by --more-general and --more-specific"
    one("--rerank", type=int, help=about)
    one("--exact", action="store_true", help="rank all items, with any type of index")
    risk_flags(parser)
    add(parser, Data, "allow_private_hosts", help=HOSTS)
    add(parser, Output, "json")
    add(parser, Model, help=OWN)
    add(parser, Compute, "device", "precision")


def risk_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of refusal, which `prolip explore` has, too."""
    shown = parser.add_argument_group("Refusal")
    about = "refuse queries, so that at most this share of the first answers is wrong"
    shown.add_argument("--risk", type=float, help=about)
    about = 'questions with known answers, a line each: {"text": ..., "keys": [...]}'
    shown.add_argument("--calibrate", metavar="FILE", help=about)
    shown.add_argument("--confidence", type=float, default=0.9, help="probability that --risk holds (default: 0.9)")


# --- building ---------------------------------------------------------------------------------------------------------
def given(args: argparse.Namespace) -> Embedder | None:
    """The model that --model names, None without it."""
    return load(args) if args.model else None


def reading(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of `prolip.search.build.fill`."""
    at_least(args, 1, "batch_size")
    at_least(args, 0, "workers")
    names = ("batch_size", "workers", "skip_damaged", "device", "precision")
    return {name: getattr(args, name) for name in names} | {"progress": sys.stderr.isatty()}


def build_index(args: argparse.Namespace) -> None:
    """Make an index, or bring it to what its source holds now."""
    at_least(args, 1, "dry_run")
    settings = reading(args)
    from prolip.search.build import build, described
    from prolip.search.indexes import Kind, table

    kind, embedder = Kind(args.index_type, args.lists), given(args)
    if args.dry_run:
        card, dim, _ = described(args.data, embedder)
        print(f"{args.dry_run:,} items of {dim} dimensions, csd\n\n{table(args.dry_run, dim, card.probabilistic)}")
        return
    settings["restore"] = args.restore
    report(args, build(args.index, args.data, embedder, args.similarity, kind, args.verify, **settings))


def add_source(args: argparse.Namespace) -> None:
    """Bring an index to what a further source holds now."""
    settings = reading(args)
    from prolip.search.build import fill

    report(args, fill(opened(args), args.data, given(args), restore=args.restore, **settings))


def report(args: argparse.Namespace, done: Rebuild) -> None:
    """Print what changed."""
    print(done, file=sys.stderr)
    summarize(args, done.index)


def opened(args: argparse.Namespace) -> SearchIndex:
    """The index that is there."""
    from prolip.search.index import SearchIndex

    return SearchIndex(args.index, args.verify)


def summarize(args: argparse.Namespace, index: SearchIndex) -> None:
    """Print what the index holds."""
    print(f"{len(index):,} items in {args.index}, by {index.score.name}, {index.kind.name}")


def finish_index(args: argparse.Namespace) -> None:
    """Add all rows to the approximate index."""
    index = opened(args)
    index.finish(args.rebuild, sys.stderr.isatty())
    summarize(args, index)


def delete_keys(args: argparse.Namespace) -> None:
    """Remove keys from the results."""
    from prolip.data.reading.tar import printable

    index = opened(args)
    index.delete([printable(key) for key in args.keys])
    summarize(args, index)


def convert_index(args: argparse.Namespace) -> None:
    """Bring an index of an earlier version to today's."""
    from prolip.search.disk.convert import convert

    convert(args.index)
    summarize(args, opened(args))


# --- asking -----------------------------------------------------------------------------------------------------------
def questions_of(args: argparse.Namespace) -> list[Question]:
    """What is asked. ValueError for nothing, and for pairs that do not fit."""
    from prolip.search.answers import Question

    if args.combine:
        if len(args.text) != len(args.image) or not args.text:
            raise ValueError(f"--combine with {len(args.text)} --text and {len(args.image)} --image: give as many")
        return [Question(text, image) for text, image in zip(args.text, args.image)]
    found = [Question(text) for text in args.text] + [Question(None, image) for image in args.image]
    if not found:
        raise ValueError("no question: give --text or --image")
    return found


def check_risk(args: argparse.Namespace) -> None:
    """ValueError for half of what refusal takes."""
    if (args.risk is None) != (args.calibrate is None):
        raise ValueError("--risk and --calibrate belong together: how much is risked, and questions with known answers")


def query(args: argparse.Namespace) -> None:
    """Ask, refuse what is to be refused, print."""
    at_least(args, 1, "top", "probe", "rerank")
    check_risk(args)
    inclusion = args.more_general or args.more_specific
    if inclusion and args.risk is not None:
        raise ValueError("--risk is of the first answer by the score, and --more-general and --more-specific rank by"
                         " inclusion: leave one out")  # fmt: skip
    from prolip.search.answers import ask, ask_inclusion, read_questions
    from prolip.search.build import embedder_of

    questions, index = questions_of(args), opened(args)
    embedder, threshold = embedder_of(index, given(args), args.device, args.precision), None
    if inclusion:
        replies = ask_inclusion(index, questions, embedder, args.top, args.more_general, args.rerank or 1000)
    else:
        known = None if args.risk is None else read_questions(args.calibrate, args.allow_private_hosts)
        replies, threshold = ask(index, questions, embedder, args.top, known, args.risk or 0.0, 1 - args.confidence,
                                 effort=args.probe, shortlist=args.rerank, exactly=args.exact)  # fmt: skip
    if threshold is not None:
        print(threshold, file=sys.stderr)
    for question, answers, refused in replies:
        if args.json:
            print(json.dumps({"text": question.text, "image": question.image, "refused": refused,
                              "answers": [answer.to_dict() for answer in answers]}))  # fmt: skip
            continue
        heading = console.plain(question)
        print(f"{heading}: refused" if refused else f"{heading}:" if answers else f"{heading}: nothing found")
        for place, answer in enumerate(answers, 1):
            print(f"{place:4}  {console.plain(answer)}")


BUILD = "prolip search build runs/index --data shards:data/emoji/emojione.tar --model local-dir:runs/demo/model"
COMMANDS = {
    "search": {
        "build": Command("make an index, or update it to what its source holds now", BUILD, build_flags, build_index,
                         retired=RETIRED),
        "add": Command("add a source to an index, or update it to what that source holds now",
                       "prolip search add runs/index --data shards:data/emoji/noto.tar", add_flags, add_source),
        "finish": Command("add all rows to the approximate index", "prolip search finish runs/index --rebuild",
                          finish_flags, finish_index, retired=RETIRED),
        "delete": Command("remove keys from the results",
                          "prolip search delete runs/index --keys emojione/emojione-1f600", delete_flags, delete_keys),
        "query": Command("search the index by text and image", "prolip search query runs/index --text cat --top 5",
                         query_flags, query, retired=RETIRED),
        "convert": Command("convert an index of an earlier version", "prolip search convert runs/index",
                           index_flags, convert_index),
    },
}  # fmt: skip
