"""The figures of the ProLIP paper, of a model of ours or OpenCLIP's, on a corpus.

    python -m prolip.figures --model local-dir:runs/demo/model --data data/emoji/emojione.tar --out figures
    python -m prolip.figures --model local-dir:runs/demo/model --data data/emoji/emojione.tar --only 4 5 C.1 \\
        --out figures
    python -m prolip.figures --model local-dir:runs/demo/model --data data/emoji/emojione.tar --only C.4 C.5 \\
        --weights weights.json --out figures
"""
from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from prolip.evaluation.loading import load_embedder
from prolip.evaluation.model import PRECISIONS, check_device
from prolip.evaluation.suites.emoji import evaluate_corpus, gallery
from prolip.figures.index import FIGURES, OWN, Source, file_of
from prolip.hierarchy.traversal import INCLUSIONS
from prolip.models.weights.checkpoint import CheckpointError
from prolip.prompts.weights import PromptWeights
from prolip.utils import console
from prolip.utils.messages import at_least
from prolip.utils.outputs import check_output
from prolip.utils.style import STYLE, VECTORS, write

#: Dots an inch of the largest PNG: a figure of 10 x 10 inches then takes 600 MB.
MOST_DPI = 1200


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    listed = "figures:\n" + "\n".join(f"  {key:<5}{drawn.words}" for key, drawn in FIGURES.items())
    parser = argparse.ArgumentParser("python -m prolip.figures", description=__doc__, formatter_class=form,
                                     epilog=listed)  # fmt: skip
    add = parser.add_argument
    add("--model", required=True, help="local-dir:FOLDER, hf-hub:NAME, or a name of ours or OpenCLIP's")
    add("--pretrained", help="weights file or OpenCLIP's tag")
    add("--tokenizer", help="another tokenizer than the model's")
    add("--device", default="cpu")
    add("--precision", default="fp32", choices=PRECISIONS)
    add("--data", nargs="+", required=True, metavar="TAR", help="shards whose drawings are shown")
    add("--select", help="which concepts, e.g. 'group=animals nature|food drink'")
    add("--names", nargs="+", metavar="TAR", help="shards whose concepts have texts, too")
    add("--all-names", action="store_true", help="--select does not narrow these")
    add("--only", nargs="+", choices=FIGURES, metavar="FIGURE", help="these alone, such as 4 5 C.1 (default: all)")
    add("--levels", metavar="FOLDER", help="images at levels for 8, C.2 and C.3, as `python -m prolip.hierarchy "
        "hierarimgs` writes them (default: the drawings with cells erased)")  # fmt: skip
    add("--captions", metavar="CSV", help="texts at levels for 7: HierarCaps' CSV (default: the corpus's own levels)")
    add("--weights", metavar="JSON", help="weights of prompts for C.4 and C.5, as `python -m prolip.prompts fit` "
        "writes them; C.5 shows them beside the drawings of their classes")  # fmt: skip
    add("--inclusion", default=next(iter(INCLUSIONS)), choices=(*INCLUSIONS, OWN),
        help=f"for 9: by which a caption includes a drawing most; {OWN}: the model's own score")  # fmt: skip
    add("--seed", type=int, default=0, help="of every choice (default: 0)")
    add("--vector", default=VECTORS[0], choices=VECTORS, help=f"beside PNG (default: {VECTORS[0]})")
    add("--dpi", type=int, default=STYLE["savefig.dpi"], help="dots of the PNG an inch (default: %(default)s)")
    add("--out", required=True, metavar="FOLDER")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> list[Path]:
    """Check, evaluate, draw; the files written, as they are."""
    check_output(args.out, folder=True)
    check_device(args.device)
    at_least(args, 0, "seed")
    if not 10 <= args.dpi <= MOST_DPI:
        raise ValueError(f"--dpi {args.dpi}: give 10 or more, at most {MOST_DPI}: 100 for a page, 300 for print")
    weights = PromptWeights.load(args.weights) if args.weights else None
    corpus = gallery(args.data, args.select, args.names, args.all_names)
    embedder = load_embedder(args.model, args.pretrained, args.device, args.precision, args.tokenizer, stored=False)
    missing = {}
    for key, drawn in FIGURES.items():
        if drawn.needs_variances and not embedder.probabilistic:
            missing[key] = f"{embedder.name} has no variances"
        if drawn.needs_weights and weights is None:
            missing[key] = "it takes --weights, of prompts"
    for key in args.only or ():
        if key in missing:
            raise ValueError(f"figure {key} cannot be drawn: {missing[key]}")
    source = Source(embedder, evaluate_corpus(embedder, corpus), args.levels, args.captions, weights, args.inclusion,
                    args.seed)  # fmt: skip
    paths: list[Path] = []
    for key in args.only or FIGURES:
        words = f"{key:<5}{FIGURES[key].words}"
        if key in missing:
            print(f"{words}: left out, {missing[key]}")
            continue
        written = write(FIGURES[key].draw(source), args.out, file_of(key), args.vector, args.dpi)
        print(f"{words}: {', '.join(map(str, written))}")
        paths += written
    return paths


@console.ends_in_one_line(OSError, ValueError, ImportError, CheckpointError)
def main(arguments: Sequence[str] | None = None) -> int:
    """The command: what the user can mend ends in one line and exit code 2."""
    args = parse(arguments)
    run(args)
    return 0


def script() -> NoReturn:
    """`main` as a process of its own, whose output may die."""
    console.command(main)


if __name__ == "__main__":
    script()
