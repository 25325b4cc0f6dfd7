"""Weights of prompts, fitted to images and kept in a file; what they look like.

    python -m prolip.prompts fit --model local-dir:runs/demo/model --dataset wds:data/wds_cars --split train \\
        --rule bprw:5 --out runs/cars.json
    python -m prolip.prompts show runs/cars.json --figures runs/cars
    python -m prolip.evaluation --model local-dir:runs/demo/model --dataset wds:data/wds_cars --prompts runs/cars.json

Whatever evaluates takes the file by --prompts: python -m prolip.evaluation, prolip.evaluation.datacomp,
prolip-clip-benchmark. Images that weights were fitted to may not be scored by them.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from prolip.data.faults import FaultCounter
from prolip.data.reading.table import show_counts
from prolip.evaluation.datasets.folders import TEMPLATES
from prolip.evaluation.datasets.specs import FORMS, open_dataset
from prolip.evaluation.feature_store import FeatureStore
from prolip.evaluation.kinds.base import class_prompts
from prolip.evaluation.loading import RANDOM, load_embedder
from prolip.evaluation.model import PRECISIONS
from prolip.evaluation.zero_shot import BPRW, PromptRule
from prolip.models.weights.checkpoint import CheckpointError
from prolip.prompts.fitting import fit_prompts
from prolip.prompts.weights import PromptWeights
from prolip.utils import console
from prolip.utils.documents import CONFIG_BYTES, entries, text_of
from prolip.utils.messages import at_least, naming
from prolip.utils.outputs import check_output


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m prolip.prompts", description=__doc__, formatter_class=form)
    commands = parser.add_subparsers(dest="command", required=True)
    fit = commands.add_parser("fit", help="fit weights to images", formatter_class=form)
    add = fit.add_argument
    add("--model", required=True, help="local-dir:FOLDER, hf-hub:NAME, or a name of ours with --pretrained")
    add("--pretrained", help=f"weights file or OpenCLIP's tag; {RANDOM} for untrained weights")
    add("--tokenizer", help="another tokenizer than the model's: a folder of its files, or bpe")
    add("--dataset", required=True, metavar="WORD:ADDRESS", help=f"images, class names and prompts: {FORMS}")
    add("--split", help="another split than test")
    add("--rule", default=BPRW, metavar="RULE", help="bprw (default): by the images nearest to a class; bprw:K: by K "
        "labelled ones of it; with settings as of --prompts, bprw:K,alpha=2,eps=0.02,prior=trace,nearest=5,samples=20,"
        "seed=0")  # fmt: skip
    add("--templates", metavar="FILE", help="prompts, a line each with {c} where the class goes, instead of the data "
        f"set's own ({TEMPLATES})")  # fmt: skip
    add("--out", required=True, metavar="FILE.json", help="for the weights")
    add("--save-features", metavar="DIR", help="keep embeddings of images here, and take those that are here already")
    add("--device", default="cpu")
    add("--precision", default="fp32", choices=PRECISIONS)
    add("--batch-size", type=int, default=256)
    add("--workers", type=int, help="threads that decode images (default: cores - 1, at most 16)")
    add("--skip-damaged", action="store_true", help="leave out damaged samples")
    show = commands.add_parser("show", help="list the most and least weighted prompts, draw histograms")
    show.add_argument("file", metavar="FILE.json", help="what fit has written")
    show.add_argument("--most", type=int, default=3, help="prompts at either end of each class (default: 3)")
    show.add_argument("--figures", metavar="DIR", help="largest weights and entropies: DIR/weights.png, .pdf and .svg")
    return parser.parse_args(arguments)


def fit(args: argparse.Namespace) -> PromptWeights:
    """Check, embed, fit, write."""
    rule = PromptRule.parse(args.rule)
    if rule.fit is None:
        raise ValueError(f"--rule {args.rule} has no weights to fit: give bprw or bprw:K")
    if not args.out.endswith(".json"):
        raise ValueError(f"--out {args.out}: give a name that ends in .json, by which --prompts knows a file")
    at_least(args, 1, "batch_size")
    at_least(args, 0, "workers")
    check_output(args.out)
    if args.save_features:
        check_output(args.save_features, folder=True)
    templates = entries(text_of(args.templates, CONFIG_BYTES), args.templates) if args.templates else ()
    if args.templates and not templates:
        raise ValueError(f"--templates {args.templates} holds no prompt: write one a line, with {{c}} where the class"
                         " goes")  # fmt: skip
    class_prompts(["class"], templates or ["{c}"])
    with naming(f"--dataset {args.dataset}"):
        dataset = open_dataset(args.dataset, args.split, FaultCounter() if args.skip_damaged else None)
    embedder = load_embedder(args.model, args.pretrained, args.device, args.precision, args.tokenizer)
    found = fit_prompts(
        dataset, embedder, rule.fit, templates, store=FeatureStore(args.save_features), batch_size=args.batch_size,
        workers=args.workers, progress=sys.stderr.isatty(),
    )  # fmt: skip
    found.save(args.out)
    return found


def show(args: argparse.Namespace) -> PromptWeights:
    """The listing, and the figure where there is a folder for it."""
    from prolip.prompts.figures import listing, write_weights  # late: only this needs matplotlib

    at_least(args, 1, "most")
    if args.figures:
        check_output(args.figures, folder=True)
    found = PromptWeights.load(args.file)
    print("\n".join(map(console.plain, listing(found, args.most))))
    if args.figures:
        print(f"drawn: {', '.join(map(str, write_weights(found, args.figures)))}")
    return found


@console.exits_in_one_line(OSError, ValueError, CheckpointError)
def main(arguments: Sequence[str] | None = None) -> PromptWeights:
    """The command: what the user can mend ends in one line and exit code 2."""
    show_counts()
    args = parse(arguments)
    if args.command == "show":
        return show(args)
    found = fit(args)
    print(f"{found}: {len(found.classnames)} classes, {len(found.templates)} prompts; written to {args.out}")
    return found


if __name__ == "__main__":
    console.command(main)
