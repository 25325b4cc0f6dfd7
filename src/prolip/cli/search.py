"""`prolip search`: an index of images or texts, and queries."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from prolip.cli.command import COMPUTE, Compute, Data, Model, Output, command, either, flag, load, shared, titled
from prolip.utils import console

if TYPE_CHECKING:
    from prolip.embedder import Embedder
    from prolip.search.index import SearchIndex

DATA = "data to read: images:FOLDER, csv:FILE, shards:TARS, features:FOLDER[,NAME], texts:FILE, ..."
#: Flags shared by all commands on an index.
INDEX = (
    flag("index", "folder of the index", metavar="INDEX"),
    flag("--verify", "first read the whole index and check its checksums", action="store_true"),
)
#: Flags for adding to an index.
ADDED = (
    *INDEX,
    flag("--restore", "also add deleted items again", action="store_true"),
    shared(Data, "data", "skip_damaged", required=["data"], help={"data": DATA}),
)
OWN = shared(Model, help={"model": "new address of the index's model (default: as stored in the index)"})
#: Flags of refusal, shared with `prolip explore`.
REFUSAL = titled(
    "Refusal",
    flag("--risk", "refuse queries so that at most this fraction of first answers is wrong", type=float),
    flag("--calibrate", 'known answers, one query per line: {"text" or "image": ..., "keys": [...]}', metavar="FILE"),
    flag("--confidence", "probability that the bound --risk holds", default=0.9),
)


def given(args: argparse.Namespace) -> Embedder | None:
    return load(args) if args.model else None


def reading(args: argparse.Namespace) -> dict[str, Any]:
    names = ("batch_size", "workers", "skip_damaged", "restore", "device", "precision")
    return {name: getattr(args, name) for name in names if name in args} | {"progress": sys.stderr.isatty()}


def opened(args: argparse.Namespace) -> SearchIndex:
    from prolip.search.index import SearchIndex

    return SearchIndex(args.index, args.verify)


@command(
    "search build",
    "runs/index --data shards:data/emoji/emojione.tar --model local-dir:runs/demo/model",
    flag("--index-type", "flat (exact), ivf, hnsw or pq", default="flat", metavar="TYPE"),
    flag("--lists", "number of lists of ivf and pq (default: 4 sqrt(items))", default=0, least=0),
    flag("--similarity", "csd, mean, elk or another score (default: of the model's method)", metavar="SCORE"),
    flag("--dry-run", "only print the size of an index of ITEMS", least=1, metavar="ITEMS"),
    *ADDED,
    shared(Model),
    COMPUTE,
)
def build_index(args: argparse.Namespace) -> None:
    """Build an index, or update it from its source."""
    from prolip.search.ann import IndexSpec, table
    from prolip.search.index import SearchIndex
    from prolip.search.sources import described

    kind, embedder = IndexSpec(args.index_type, args.lists), given(args)
    if args.dry_run:
        card, dim, _ = described(args.data, embedder)
        print(f"{args.dry_run:,} items of {dim} dimensions, csd\n\n{table(args.dry_run, dim, card.probabilistic)}")
    else:
        done = SearchIndex.build(args.index, args.data, embedder, args.similarity, kind, args.verify, **reading(args))
        summarize(args, done.index, str(done))


@command("search add", "runs/index --data shards:data/emoji/noto.tar", *ADDED, OWN, COMPUTE)
def add_source(args: argparse.Namespace) -> None:
    """Add a source to an index, or update the index from that source."""
    done = opened(args).add(args.data, given(args), **reading(args))
    summarize(args, done.index, str(done))


@command(
    "search finish",
    "runs/index --rebuild",
    *INDEX,
    flag("--rebuild", "rebuild the approximate index from all items", action="store_true"),
)
def finish_index(args: argparse.Namespace) -> None:
    """Add all items to the approximate index."""
    index = opened(args)
    index.finish(args.rebuild, sys.stderr.isatty())
    summarize(args, index)


@command(
    "search delete",
    "runs/index --keys emojione/emojione-1f600",
    *INDEX,
    flag("--keys", "keys to remove from the results", nargs="+", required=True, metavar="KEY"),
)
def delete_keys(args: argparse.Namespace) -> None:
    """Remove keys from the results."""
    from prolip.data.reading.tar import printable

    index = opened(args)
    index.delete([printable(key) for key in args.keys])
    summarize(args, index)


def summarize(args: argparse.Namespace, index: SearchIndex, changes: str = "") -> None:
    if changes:
        print(changes, file=sys.stderr)
    print(f"{len(index):,} items in {args.index}, ranked by {index.score.in_words}, {index.kind.name}")


def check_risk(args: argparse.Namespace) -> None:
    """Raise ValueError for --risk without --calibrate, or the reverse."""
    if (args.risk is None) != (args.calibrate is None):
        raise ValueError("--risk and --calibrate need each other: give a risk, and queries with known answers")


@command(
    "search query",
    "runs/index --text cat --top 5",
    *INDEX,
    flag("--text", "text to search for; repeatable", action="append", default=[]),
    flag("--image", "path or URL of an image to search for; repeatable", action="append", default=[]),
    flag("--combine", "combine the first --text and --image into one query, and so on", action="store_true"),
    either(
        flag("--more-general", "rank near items by how well they include the query", action="store_true"),
        flag("--more-specific", "rank near items by how well the query includes them", action="store_true"),
    ),
    flag("--top", "number of answers", default=10, least=1),
    flag("--probe", "number of lists to read (ivf, pq) or candidates to visit (hnsw)", least=1),
    flag("--rerank", "number of candidates to score again, or to compare by inclusion", least=1),
    flag("--exact", "rank all items, also with an approximate index", action="store_true"),
    REFUSAL,
    shared(Data, "allow_private_hosts"),
    shared(Output, "json"),
    OWN,
    shared(Compute, "device", "precision"),
)
def query(args: argparse.Namespace) -> None:
    """Search the index by text and image."""
    check_risk(args)
    wider = args.more_general if args.more_general or args.more_specific else None
    if wider is not None and args.risk is not None:
        what = "--risk needs a ranking by score, but --more-general and --more-specific rank by inclusion"
        raise ValueError(f"{what}: remove one")
    if args.combine and (len(args.text) != len(args.image) or not args.text):
        raise ValueError(f"--combine with {len(args.text)} --text and {len(args.image)} --image: give equal numbers")
    if not args.text + args.image:
        raise ValueError("no query: give --text or --image")
    alone = [(text, None) for text in args.text] + [(None, image) for image in args.image]
    pairs = zip(args.text, args.image) if args.combine else alone
    from prolip.search.query import Query, ask, read_queries

    index, questions = opened(args), [Query(*pair) for pair in pairs]
    known = None if args.risk is None else read_queries(args.calibrate, args.allow_private_hosts)
    embedder = index.find_embedder(given(args), args.device, args.precision)
    settings = {"probe": args.probe, "rerank": args.rerank, "exactly": args.exact}
    risk = (known, args.risk or 0.0, 1 - args.confidence)
    replies, means, threshold, compared = ask(index, questions, embedder, args.top, wider, *risk, **settings)
    if threshold is not None:
        print(threshold, file=sys.stderr)
    for question, answers, own, number in zip(questions, replies, means, compared):
        if args.json:
            fields = {"text": question.text, "image": question.image, "refused": answers is None}
            print(json.dumps(fields | vars(own) | {"answers": [answer.to_dict() for answer in answers or []]}))
            continue
        state = "refused" if answers is None else "" if answers else "nothing found"
        said = ", ".join(part for part in (state, number) if part)
        print(f"{console.plain(question)}: {said}".rstrip())
        if own.share_range is not None or own.ambiguity is not None:
            print("     ", "  ".join(["the query:", *own.words]))
        for place, answer in enumerate(answers or [], 1):
            print(console.columns(f"{place:4}", answer.parts))
