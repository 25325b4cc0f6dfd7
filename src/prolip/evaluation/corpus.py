"""Evaluation on the emoji corpus: retrieval with complete labels, zero-shot subgroups, uncertainty.

    python -m prolip.evaluation.corpus --model local-dir:runs/demo/model \\
        --data data/emoji/emojione.tar --names data/emoji/noto.tar --out runs/demo/eval

Two galleries. `names/...`: which name is it? Names only, one right answer per drawing, the figure to quote.
`captions/...`: every text of every level, and a text is right for every drawing of every concept that carries it; mAP@R
and R-Precision are made for this one.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from prolip.evaluation.loading import RANDOM, load_embedder
from prolip.evaluation.model import PRECISIONS, check_device
from prolip.evaluation.suites.emoji import CorpusResult, evaluate_corpus, format_corpus, gallery, load
from prolip.methods import find_score
from prolip.models.weights.checkpoint import CheckpointError
from prolip.utils import console
from prolip.utils.outputs import check_output


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m prolip.evaluation.corpus", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="local-dir:FOLDER, hf-hub:NAME or a config name")
    parser.add_argument("--data", nargs="+", required=True, metavar="TAR", help="shards whose drawings are evaluated")
    parser.add_argument("--select", help="which concepts, e.g. 'group=animals nature|food drink|travel places'")
    parser.add_argument("--names", nargs="+", metavar="TAR", help="shards whose concepts also stand in the gallery")
    parser.add_argument("--all-names", action="store_true", help="--select does not narrow the gallery")
    parser.add_argument("--similarity", help="csd, mean or a measure (default: the score of the model's method)")
    parser.add_argument("--precision", default="fp32", choices=PRECISIONS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokenizer", help="another tokenizer than the model's")
    parser.add_argument("--intervals", nargs="?", type=int, const=1000, default=0, metavar="DRAWS",
                        help="95%% intervals by bootstrap over concepts (1000 draws)")  # fmt: skip
    parser.add_argument("--against", metavar="FOLDER",
                        help="the --out of another model: with --intervals, also of the difference")  # fmt: skip
    parser.add_argument("--out", help="folder for metrics.json, corpus.json and embeddings.npz")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> CorpusResult:
    """Read, load, evaluate, write, print, in the order in which mistakes are cheapest."""
    if args.similarity:
        find_score(args.similarity)
    check_device(args.device)
    if args.out:
        check_output(args.out, folder=True)
    if args.intervals < 0 or args.intervals == 1:
        raise ValueError(f"--intervals {args.intervals}: give two draws or more, such as 1000, or no number")
    if args.against and not args.intervals:
        raise ValueError("--against is for intervals of differences: give --intervals too")
    against = load(args.against) if args.against else None
    corpus = gallery(args.data, args.select, args.names, args.all_names)
    bare = ":" not in args.model
    if bare:
        print(f"note: {args.model} is a bare config, so its weights are random; a run is local-dir:runs/NAME/model",
              file=sys.stderr)  # fmt: skip
    embedder = load_embedder(
        args.model, RANDOM if bare else None, args.device, args.precision, args.tokenizer, stored=False
    )
    result = evaluate_corpus(embedder, corpus, similarity=args.similarity)
    result.info |= {"model": args.model, "data": args.data, "names": args.names, "select": args.select}
    if args.intervals:
        result.add_intervals(args.intervals, against)
    if args.out:
        result.save(args.out)
    print(format_corpus(result) + (f"\n\nwritten to {args.out}" if args.out else ""))
    return result


@console.exits_in_one_line(OSError, ValueError, CheckpointError)
def main(arguments: Sequence[str] | None = None) -> CorpusResult:
    """The command: what the user can mend ends in one line and exit code 2."""
    return run(parse(arguments))


if __name__ == "__main__":
    console.command(main)
