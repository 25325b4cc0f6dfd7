"""The command `prolip figures`, available in a clone: the figures of the ProLIP paper."""

from __future__ import annotations

import argparse

from prolip.cli.command import MODEL, Compute, check, command, flag, load, output, shared, titled
from prolip.cli.eval import DRAWINGS, corpus_of
from prolip.cli.hierarchy import inclusion_by
from studies.papers.figures.index import FIGURES, VECTORS

#: Dots per inch of the largest PNG: a figure of 10 x 10 inches then takes 600 MB.
MOST_DPI = 1200


@command(
    "figures",
    "--model local-dir:runs/demo/model --data data/emoji/emojione.tar --only 4 5 --output figures",
    *DRAWINGS,
    MODEL,
    shared(Compute, "device", "precision", "seed"),
    output("folder for the figures"),
    titled(
        "Choice of figures",
        flag("--only", "draw only these, such as 4 5 C.1", nargs="+", choices=FIGURES, metavar="FIGURE"),
        flag("--images", "images at levels of prolip hierarchy hierarimgs: 8, C.2, C.3", metavar="FOLDER"),
        flag("--captions", "texts at levels for 7, from HierarCaps (default: the corpus's levels)", metavar="CSV"),
        flag("--prompts", "weights of prompts for C.4 and C.5, a file of prolip prompts fit", metavar="FILE"),
        inclusion_by("the roots of 9"),
        flag("--vector", "vector format next to PNG", default=VECTORS[0], choices=VECTORS),
        flag("--dpi", "dots per inch of the PNG: 100 for a page, 300 for print (default: 160)", type=int),
    ),
    more="figures:\n" + "\n".join(f"  {key:<5}{figure.words}" for key, figure in FIGURES.items()),
)
def draw(args: argparse.Namespace) -> None:
    """Draw the figures of the ProLIP paper, from a model and a corpus."""
    from prolip.prompts.weights import PromptWeights
    from studies.papers.figures.draw import Source, draw_figures

    check(args, folder=True)
    if args.dpi is not None and not 10 <= args.dpi <= MOST_DPI:
        raise ValueError(f"--dpi {args.dpi}: give 10 to {MOST_DPI}, such as 100 for a page or 300 for print")
    weights = PromptWeights.load(args.prompts) if args.prompts else None
    corpus = corpus_of(args)
    source = Source(load(args), corpus, args.images, args.captions, weights, args.inclusion, args.seed)
    for key, files, missing in draw_figures(source, args.output, args.only, args.vector, args.dpi):
        words = f"{key:<5}{FIGURES[key].words}"
        print(f"{words}: skipped, {missing}" if missing else f"{words}: {', '.join(map(str, files))}")
