"""Search images, or texts, by text and image, with answers that say how sure they are.

    prolip-search build runs/index --data images:photos --model local-dir:runs/demo/model --kind hnsw
    prolip-search query runs/index --text "a red car" --top 5
    prolip-search query runs/index --text "a red car" --risk 0.1 --calibrate questions.jsonl

`python -m prolip.search` is the same. A build that is started again goes on where it was killed, and brings the index
to what its source holds now. docs/search.md.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from tqdm import tqdm

from prolip.data.faults import FaultCounter
from prolip.data.reading.tar import printable
from prolip.evaluation.loading import load_embedder
from prolip.evaluation.model import PRECISIONS, Embedder, ModelCard
from prolip.models.weights.checkpoint import CheckpointError
from prolip.search import sources
from prolip.search.answers import COMPARED, Question, answers_of, calibrate, confidences, embed, read_questions
from prolip.search.disk.convert import convert
from prolip.search.index import CHUNK, SearchIndex
from prolip.search.indexes import KINDS, Kind, table
from prolip.search.store import NAME
from prolip.utils import console
from prolip.utils.messages import at_least
from prolip.utils.outputs import check_output
from prolip.utils.secrecy import redacted


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("prolip-search", description=__doc__, formatter_class=form)
    commands = parser.add_subparsers(dest="command", required=True)
    about = {"build": "make an index, or bring it to what its source holds now", "extend": "likewise of another source",
             "finish": "have the approximate index hold every row", "delete": "have keys found no more",
             "convert": "renew an index of an earlier version", "query": "ask"}  # fmt: skip
    made = {name: commands.add_parser(name, help=text, description=text) for name, text in about.items()}
    for one in made.values():
        one.add_argument("index", metavar="FOLDER", help="the index")
        one.add_argument("--verify", action="store_true", help="first read all of it and compare checksums")
    for name in ("build", "extend"):
        add = made[name].add_argument
        add("--data", required=True, metavar="SOURCE", help=sources.FORMS)
        add("--batch-size", type=int, default=128)
        add("--workers", type=int, help="threads that decode (default: all cores but one)")
        add("--skip-damaged", action="store_true", help="leave out what cannot be read, and say what it was")
        add("--restore", action="store_true", help="also what delete removed (default: it stays deleted)")
    add = made["build"].add_argument
    add("--similarity", help="csd, mean, elk or another score (default: the score of the model's method)")
    add("--kind", default="flat", choices=KINDS, help="flat: exact; the others approximate (default: flat)")
    add("--lists", type=int, default=0, help="of ivf and pq (default: 4 sqrt(N))")
    add("--dry-run", type=int, metavar="ITEMS", help="say how much room so many items take, and write nothing")
    made["finish"].add_argument("--anew", action="store_true", help="learn the centres again, of what is there now")
    made["delete"].add_argument("--keys", nargs="+", required=True)
    add_questions(made["query"])
    for name, otherwise in (("build", ""), ("extend", " (default: the index's)"), ("query", " (default: the index's)")):
        add = made[name].add_argument
        add("--model", help=f"local-dir:FOLDER, hf-hub:NAME or a name{otherwise}")
        add("--pretrained", help="weights file or OpenCLIP's tag")
        add("--tokenizer", help="another tokenizer than the model's")
        add("--device", default="cpu")
        add("--precision", default="fp32", choices=PRECISIONS)
    return parser.parse_args(arguments)


def add_questions(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--text", action="append", default=[], help="a question; may be given several times")
    add("--image", action="append", default=[], help="a picture's path or URL as a question; likewise")
    add("--together", action="store_true", help="each --text with the --image of its place is one question")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--wider", action="store_true", help="of what is near, what includes the question")
    ways.add_argument("--narrower", action="store_true", help="of what is near, what the question includes")
    add("--top", type=int, default=10, help="answers (default: 10)")
    add("--effort", type=int, help="lists that are read, or candidates of a graph: more finds more, and takes longer")
    add("--shortlist", type=int, help="candidates that are scored again, or looked through for wider and narrower")
    add("--exactly", action="store_true", help="as brute force ranks, with any kind of index")
    add("--risk", type=float, help="refuse, so that at most this share of the first answers is wrong")
    add("--calibrate", metavar="FILE", help='questions with answers: {"text": ..., "keys": [...]} a line')
    add("--confidence", type=float, default=0.9, help="that the risk is kept (default: 0.9)")
    add("--allow-private-hosts", action="store_true", help="for http(s) images that --calibrate names")
    add("--json", action="store_true", help="answers as JSON lines")


# --- building --------------------------------------------------------------------------------------------------------
def build(args: argparse.Namespace) -> SearchIndex:
    """Make an index of a source, or go on with it."""
    kind = Kind(args.kind, args.lists)
    check_output(args.index, folder=True)
    if (Path(args.index) / NAME).exists():
        index = SearchIndex(args.index, args.verify)
        addresses = [source["address"] for source in index.store.values["sources"]]
        same = index.kind == kind and addresses in ([], [redacted(args.data)])
        if not same or args.similarity not in (None, index.score.name):
            raise FileExistsError(f"{args.index} is an index of {', '.join(addresses)}, of the kind {index.kind.name},"
                                  f" by {index.score.name}: extend it, or give another folder")  # fmt: skip
        return fill(index, args)
    card, dim, embedder = embedded_by(args)
    words = {name: getattr(args, name) for name in ("model", "pretrained", "tokenizer")}
    further = {} if embedder is None else {"load": words}
    score, side = card.scored_by(args.similarity), sources.side_of(args.data)
    return fill(SearchIndex.create(args.index, score, dim, kind, side, card, further), args, embedder)


def embedded_by(args: argparse.Namespace) -> tuple[ModelCard, int, Embedder | None]:
    """What a new index knows of its model: the card, the dimensions, and itself, None for kept features."""
    if sources.split(args.data)[0] == "features":
        features = sources.kept(args.data)
        return features.model, features.image.mean.shape[1], None
    if args.model is None:
        raise ValueError("--model is wanted: what the images, and the questions, are embedded by")
    embedder = load_embedder(args.model, args.pretrained, args.device, args.precision, args.tokenizer)
    return embedder.card, embedder.embed_texts([""]).mean.shape[1], embedder


def fill(index: SearchIndex, args: argparse.Namespace, embedder: Embedder | None = None) -> SearchIndex:
    """Bring an index to what a source holds now, and say what changed."""
    faults, address = FaultCounter() if args.skip_damaged else None, args.data
    if sources.side_of(address) != index.side:
        raise ValueError(f"{address} gives {sources.side_of(address)}s, and this index has {index.side}s")
    with index.writing():
        rebuild = sources.Rebuild(index, address, args.restore)
        if sources.split(address)[0] == "features":
            parts = sources.parts_of(sources.kept(address), rebuild)
        else:
            parts = sources.read(rebuild, embedder or load(index, args), args.batch_size, faults, args.workers)
        hidden = not sys.stderr.isatty()
        rebuild.run(tqdm(parts, "read", unit="", unit_scale=args.batch_size, disable=hidden), CHUNK)
        index.finish(progress=not hidden)
    print(rebuild, file=sys.stderr)
    if faults is not None and faults.kinds:
        lost = ", ".join(f"{count} {kind}" for kind, count in faults.kinds.items())
        print(f"left out: {lost}, such as {faults.examples[0] if faults.examples else ''}", file=sys.stderr)
    return index


def load(index: SearchIndex, args: argparse.Namespace) -> Embedder:
    """The model of an index, or the one that is given for it. ValueError where it is another."""
    words = index.store.values.get("load") if args.model is None else vars(args)
    if words is None:
        raise ValueError("this index was made of kept features: give the model that made them, --model")
    embedder = load_embedder(words["model"], words["pretrained"], args.device, args.precision, words["tokenizer"])
    if index.card is not None and embedder.fingerprint != index.card.fingerprint:
        raise ValueError(f"{words['model']} is another model than made this index, {index.card.name}: its weights,"
                         " settings, preprocessing or tokenizer differ")  # fmt: skip
    return embedder


# --- asking ----------------------------------------------------------------------------------------------------------
def questions_of(args: argparse.Namespace) -> list[Question]:
    """What is asked. ValueError for nothing, and for pairs that do not fit."""
    if args.together:
        if len(args.text) != len(args.image) or not args.text:
            raise ValueError(f"--together with {len(args.text)} --text and {len(args.image)} --image: give as many")
        return [Question(text, image) for text, image in zip(args.text, args.image)]
    found = [Question(text) for text in args.text] + [Question(None, image) for image in args.image]
    if not found:
        raise ValueError("no question: give --text or --image")
    return found


def query(args: argparse.Namespace) -> None:
    """Ask, refuse what is to be refused, print."""
    questions, inclusion = questions_of(args), args.wider or args.narrower
    if (args.risk is None) != (args.calibrate is None):
        raise ValueError("--risk and --calibrate belong together: how much is risked, and questions with known answers")
    if inclusion and args.risk is not None:
        raise ValueError("--risk is of the first answer by the score, and --wider and --narrower rank by inclusion")
    index = SearchIndex(args.index, args.verify)
    embedder = load(index, args)
    embedded = embed(questions, embedder)
    if inclusion:
        found = index.search_inclusion(embedded.z, args.top, args.wider, args.shortlist or 1000)
    else:
        most = args.top if args.risk is None else max(args.top, COMPARED)
        search = partial(index.search, k=most, effort=args.effort, shortlist=args.shortlist, exactly=args.exactly)
        found = search(embedded.z)
    given = [True] * len(questions)
    if args.risk is not None:
        asked, right = read_questions(args.calibrate, args.allow_private_hosts)
        threshold = calibrate(index, asked, right, embedder, args.risk, 1 - args.confidence, search)
        print(threshold, file=sys.stderr)
        given = threshold.answers(confidences(index, embedded, found.first(COMPARED))).tolist()
        found = found.first(args.top)
    pairs = [(question.image if index.side == "image" else question.text) is None for question in questions]
    answers = answers_of(index, found, pairs, not inclusion)
    for question, own, answered in zip(questions, answers, given):
        own = own if answered else []
        if args.json:
            print(json.dumps({"text": question.text, "image": question.image, "refused": not answered,
                              "answers": [answer.to_dict() for answer in own]}))  # fmt: skip
            continue
        heading = console.plain(question)
        print(f"{heading}: refused" if not answered else f"{heading}:" if own else f"{heading}: nothing found")
        for place, answer in enumerate(own, 1):
            print(f"{place:4}  {console.plain(answer)}")


@console.ends_in_one_line(OSError, ValueError, ImportError, KeyError, CheckpointError)
def main(arguments: Sequence[str] | None = None) -> int:
    """The command: what the user can mend ends in one line and exit code 2."""
    args = parse(arguments)
    at_least(args, 1, "batch_size", "dry_run", "top", "effort", "shortlist")
    at_least(args, 0, "workers")
    if args.command == "build" and args.dry_run:
        card, dim, _ = embedded_by(args)
        print(f"{args.dry_run:,} items of {dim} dimensions, csd\n\n{table(args.dry_run, dim, card.probabilistic)}")
        return 0
    if args.command == "query":
        query(args)
        return 0
    if args.command == "convert":
        convert(args.index)
    index = build(args) if args.command == "build" else SearchIndex(args.index, args.verify)
    if args.command == "extend":
        fill(index, args)
    elif args.command == "finish":
        index.finish(args.anew, sys.stderr.isatty())
    elif args.command == "delete":
        index.delete([printable(key) for key in args.keys])
    print(f"{len(index):,} items in {args.index}, by {index.score.name}, {index.kind.name}")
    return 0


def script() -> NoReturn:
    """`main` as a process of its own, whose output may die."""
    torch.set_grad_enabled(False)
    console.command(main)


if __name__ == "__main__":
    script()
