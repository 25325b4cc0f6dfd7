"""`prolip search`: an index of images or texts, and questions to it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from prolip.cli.command import Compute, Data, Model, Output, command, either, flag, load, shared, titled
from prolip.utils import console

if TYPE_CHECKING:
    from prolip.embedder import Embedder
    from prolip.search.index import SearchIndex

RETIRED = {
    "kind": "use --index-type",
    "effort": "use --probe",
    "shortlist": "use --rerank",
    "exactly": "use --exact",
    "together": "use --combine",
    "wider": "use --more-general",
    "narrower": "use --more-specific",
    "anew": "use --rebuild",
}


# --- flags ------------------------------------------------------------------------------------------------------------
#: Those of every command on an index.
INDEX = (
    flag("index", metavar="INDEX", help="folder of the index"),
    flag("--verify", action="store_true", help="first read the whole index and compare its checksums"),
)
#: What is added to an index.
ADDED = (
    *INDEX,
    flag("--restore", action="store_true", help="add deleted items again, too"),
    shared(
        Data,
        "data",
        "skip_damaged",
        required=["data"],
        help={"data": "what to read: images:FOLDER, csv:FILE, shards:TARS, features:FOLDER[,NAME], texts:FILE, ..."},
    ),
)
OWN = shared(Model, help={"model": "model of the index at another address (default: the one the index names)"})
COMPUTE = shared(Compute, "device", "precision", "batch_size", "workers")
#: What refusal takes, of `prolip explore`, too.
REFUSAL = titled(
    "What is refused",
    flag("--risk", type=float, help="refuse queries so that at most this share of the first answers is wrong"),
    flag("--calibrate", metavar="FILE", help='queries with known answers, a line each: {"text": ..., "keys": [...]}'),
    flag("--confidence", type=float, default=0.9, help="probability that --risk holds (default: 0.9)"),
)


# --- building ---------------------------------------------------------------------------------------------------------
def given(args: argparse.Namespace) -> Embedder | None:
    """The model that --model names, None without it."""
    return load(args) if args.model else None


def reading(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of `SearchIndex.add`."""
    names = ("batch_size", "workers", "skip_damaged", "restore", "device", "precision")
    return {name: getattr(args, name) for name in names if name in args} | {"progress": sys.stderr.isatty()}


def opened(args: argparse.Namespace) -> SearchIndex:
    """The index that is there."""
    from prolip.search.index import SearchIndex

    return SearchIndex(args.index, args.verify)


@command(
    "prolip search build runs/index --data shards:data/emoji/emojione.tar --model local-dir:runs/demo/model",
    flag("--index-type", default="flat", metavar="TYPE", help="flat (exact), ivf, hnsw or pq (default: flat)"),
    flag("--lists", type=int, default=0, metavar="N", help="lists of ivf and pq (default: 4 sqrt(items))"),
    flag("--similarity", metavar="SCORE", help="csd, mean, elk or another score (default: that of the model's method)"),
    flag(
        "--dry-run",
        type=int,
        least=1,
        metavar="ITEMS",
        help="print how much room this many items take, and write nothing",
    ),
    *ADDED,
    shared(Model),
    COMPUTE,
    retired=RETIRED,
)
def build_index(args: argparse.Namespace) -> None:
    """Make an index, or update it to what its source holds now."""
    settings = reading(args)
    from prolip.search.ann import IndexSpec, table
    from prolip.search.index import SearchIndex
    from prolip.search.sources import described

    kind, embedder = IndexSpec(args.index_type, args.lists), given(args)
    if args.dry_run:
        card, dim, _ = described(args.data, embedder)
        print(f"{args.dry_run:,} items of {dim} dimensions, csd\n\n{table(args.dry_run, dim, card.probabilistic)}")
    else:
        done = SearchIndex.build(args.index, args.data, embedder, args.similarity, kind, args.verify, **settings)
        summarize(args, done.index, str(done))


@command(
    "prolip search add runs/index --data shards:data/emoji/noto.tar",
    *ADDED,
    OWN,
    COMPUTE,
)
def add_source(args: argparse.Namespace) -> None:
    """Add a source to an index, or update it to what that source holds now."""
    settings = reading(args)
    done = opened(args).add(args.data, given(args), **settings)
    summarize(args, done.index, str(done))


@command(
    "prolip search finish runs/index --rebuild",
    *INDEX,
    flag("--rebuild", action="store_true", help="learn the approximate index again, from all rows"),
    retired=RETIRED,
)
def finish_index(args: argparse.Namespace) -> None:
    """Add all rows to the approximate index."""
    index = opened(args)
    index.finish(args.rebuild, sys.stderr.isatty())
    summarize(args, index)


@command(
    "prolip search delete runs/index --keys emojione/emojione-1f600",
    *INDEX,
    flag("--keys", nargs="+", required=True, metavar="KEY", help="keys to remove from the results"),
)
def delete_keys(args: argparse.Namespace) -> None:
    """Remove keys from the results."""
    from prolip.data.reading.tar import printable

    index = opened(args)
    index.delete([printable(key) for key in args.keys])
    summarize(args, index)


def summarize(args: argparse.Namespace, index: SearchIndex, changes: str = "") -> None:
    """Print what changed, and what the index holds now."""
    if changes:
        print(changes, file=sys.stderr)
    print(f"{len(index):,} items in {args.index}, ranked by {index.score.in_words}, {index.kind.name}")


# --- asking -----------------------------------------------------------------------------------------------------------
def check_risk(args: argparse.Namespace) -> None:
    """ValueError for half of what refusal takes."""
    if (args.risk is None) != (args.calibrate is None):
        raise ValueError("--risk and --calibrate belong together: how much is risked, and questions with known answers")


def pairs_of(args: argparse.Namespace) -> list[tuple[str | None, str | None]]:
    """The text and image of each question. ValueError for none, and for --combine of more of one than of the other."""
    if args.combine and (len(args.text) != len(args.image) or not args.text):
        raise ValueError(f"--combine with {len(args.text)} --text and {len(args.image)} --image: give as many")
    if not args.text + args.image:
        raise ValueError("no question: give --text or --image")
    alone = [(text, None) for text in args.text] + [(None, image) for image in args.image]
    return list(zip(args.text, args.image)) if args.combine else alone


@command(
    "prolip search query runs/index --text cat --top 5",
    *INDEX,
    flag("--text", action="append", default=[], help="text to search by; may be given several times"),
    flag("--image", action="append", default=[], help="path or URL of an image to search by; likewise"),
    flag("--combine", action="store_true", help="make one query of the first --text and --image, and so on"),
    either(
        flag("--more-general", action="store_true", help="return near items that include the query"),
        flag("--more-specific", action="store_true", help="return near items that the query includes"),
    ),
    flag("--top", type=int, default=10, least=1, metavar="N", help="answers to return (default: 10)"),
    flag("--probe", type=int, least=1, metavar="N", help="lists to read (ivf, pq), or candidates to visit (hnsw)"),
    flag("--rerank", type=int, least=1, metavar="N", help="candidates to score again, or to compare by inclusion"),
    flag("--exact", action="store_true", help="rank all items, with any type of index"),
    REFUSAL,
    shared(Data, "allow_private_hosts"),
    shared(Output, "json"),
    OWN,
    shared(Compute, "device", "precision"),
    retired=RETIRED | {"": "search for a text by --text 'a cat', for an image by --image FILE"},
)
def query(args: argparse.Namespace) -> None:
    """Search the index by text and image."""
    check_risk(args)
    wider = args.more_general if args.more_general or args.more_specific else None
    if wider is not None and args.risk is not None:
        raise ValueError(
            "--risk is of the first answer by the score, and --more-general and --more-specific rank by"
            " inclusion: leave one out"
        )
    pairs = pairs_of(args)
    from prolip.search.query import Query, ask, read_queries

    index, questions = opened(args), [Query(*pair) for pair in pairs]
    embedder = index.find_embedder(given(args), args.device, args.precision)
    known = None if args.risk is None else read_queries(args.calibrate, args.allow_private_hosts)
    replies, means, threshold = ask(
        index,
        questions,
        embedder,
        args.top,
        wider,
        known,
        args.risk or 0.0,
        1 - args.confidence,
        probe=args.probe,
        rerank=args.rerank,
        exactly=args.exact,
    )
    if threshold is not None:
        print(threshold, file=sys.stderr)
    for question, answers, own in zip(questions, replies, means):
        if args.json:
            print(
                json.dumps(
                    {
                        "text": question.text,
                        "image": question.image,
                        "refused": answers is None,
                        **vars(own),
                        "answers": [answer.to_dict() for answer in answers or []],
                    }
                )
            )
            continue
        print(f"{console.plain(question)}:{' refused' if answers is None else '' if answers else ' nothing found'}")
        if own.share_range is not None or own.ambiguity is not None:
            print("     ", "  ".join(["the question:", *own.words]))
        for place, answer in enumerate(answers or [], 1):
            print(f"{place:4}  {console.plain(answer)}")


COMMANDS = {
    "search": {
        "build": build_index,
        "add": add_source,
        "finish": finish_index,
        "delete": delete_keys,
        "query": query,
    }
}
