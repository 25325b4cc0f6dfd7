"""`prolip prompts`: fitting and display of prompt weights."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from prolip.cli.command import COMPUTE, MODEL, Data, check, command, flag, load, output, shared
from prolip.cli.eval import CLASSES, SPLIT, open_named
from prolip.evaluation.datasets.registry import FORMS

BY_PROMPTS = """Give the file as --prompts to prolip eval tasks, datacomp or clip-benchmark. They
refuse to score the images that the weights were fitted to."""


@command(
    "prompts fit",
    "--model local-dir:runs/demo/model --data wds:runs/groups --rule bprw:5 --output weights.json",
    flag("--data", f"images, class names and prompts: {FORMS}", required=True, metavar="SOURCE"),
    SPLIT,
    flag("--rule", "bprw, or bprw:K for K labelled images per class, with settings", default="bprw", metavar="RULE"),
    flag("--templates", "prompts instead of the data set's: one per line, {c} for the class", metavar="FILE"),
    MODEL,
    shared(Data, "skip_damaged"),
    COMPUTE,
    output("file for the weights, NAME.json", "save_features"),
    more=BY_PROMPTS,
)
def fit(args: argparse.Namespace) -> None:
    """Fit prompt weights to images."""
    from prolip.data.reading.csv import show_counts
    from prolip.evaluation.cache import FeatureStore
    from prolip.evaluation.prompts import fit_prompts
    from prolip.prompts.templates import PromptRule, class_prompts
    from prolip.utils.documents import CONFIG_BYTES, entries, text_of

    show_counts()
    rule = PromptRule.parse(args.rule)
    if rule.fit is None:
        raise ValueError(f"--rule {args.rule} has no weights to fit: give bprw or bprw:K")
    if not args.output.endswith(".json"):
        raise ValueError(f"--output {args.output}: give a name that ends in .json, as --prompts requires")
    check(args)
    templates = entries(text_of(args.templates, CONFIG_BYTES), args.templates) if args.templates else ()
    if args.templates and not templates:
        raise ValueError(f"--templates {args.templates} holds no prompt: write one per line, with {{c}} for the class")
    class_prompts(["class"], templates or ["{c}"])
    dataset = open_named("--data", args.data, args.split, args.skip_damaged, CLASSES)
    store, progress = FeatureStore(args.save_features), sys.stderr.isatty()
    settings = {"store": store, "batch_size": args.batch_size, "workers": args.workers, "progress": progress}
    found = fit_prompts(dataset, load(args), rule.fit, templates, **settings)
    found.save(args.output)
    print(f"{found}: {len(found.classnames)} classes, {len(found.templates)} prompts; written to {args.output}")


@command(
    "prompts show",
    "weights.json",
    flag("file", "weights from prolip prompts fit", metavar="FILE.json"),
    flag("--top", "show the N most and least weighted prompts of each class", default=3, least=1),
    output("folder for weights.png, .pdf and .svg (largest weights, entropies)", required=False),
)
def show(args: argparse.Namespace) -> None:
    """List the most and least weighted prompts, plot histograms."""
    from prolip.prompts.weights import PromptWeights
    from prolip.utils import console

    check(args, folder=True)
    found = PromptWeights.load(args.file)
    from prolip.prompts.figures import listing, plot_weights  # after the file is read: matplotlib takes a second
    from prolip.utils.style import save

    print("\n".join(map(console.plain, listing(found, args.top))))
    if args.output:
        figure = plot_weights(found.table, f"Weights of {len(found.templates)} prompts, {found.rule}")
        drawn = [save(figure, Path(args.output) / f"weights.{ending}") for ending in ("png", "pdf", "svg")]
        print(f"plots: {', '.join(map(str, drawn))}")
