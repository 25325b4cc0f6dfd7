"""`prolip uncertainty`: variances that mean something, and novelty, for a trained model; its means stay the same."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from prolip.cli.command import MODEL, Compute, Data, command, flag, output, shared
from prolip.data.config import DataConfig
from prolip.uncertainty.options import FitOptions
from prolip.utils.messages import respelling
from prolip.utils.outputs import check_output

if TYPE_CHECKING:
    from prolip.embeddings import Pairs
    from prolip.uncertainty.fit import Fitted

#: Settings of `DataConfig` besides the data and its split that say how to read pairs.
READING: tuple[str, ...] = (
    "caption_sampling",
    "select",
    "dataset_type",
    "csv_img_key",
    "csv_caption_key",
    "csv_separator",
)
READING += ("image_root", "max_bad_fraction")
FIT = ("fit_samples", "bank", "centres", "novelty_centres", "readings", "changed_images")
OF_READING = {
    "caption_sampling": "fields of captions to read, with optional weights: txt is the plain caption, others are JSON "
    "fields (CSV columns), e.g. name:2,keywords:1,group",
    "dataset_type": "what --data is; auto goes by its first word or suffix, or by a folder's content",
}
NO_DOUBT = "no doubt: match probabilities of images unlike the training will be too high. It takes novelty and "
NO_DOUBT += "--changed-images"
MORE = (
    "The model is one of ours or of OpenCLIP's; its folder is evaluated as --model local-dir:FOLDER.\n"
    "--data takes what training takes: csv:, parquet:, jsonl:, images:, shards:, coco:, flickr:, cub: or iapr:. "
    "It should be like the data that the model is used on. --save-pairs keeps the embeddings, and --pairs fits to "
    "them again."
)


@command(
    "uncertainty",
    "--model local-dir:runs/demo/model --data data/emoji/noto.tar --output runs/demo/fitted",
    MODEL,
    shared(Compute, "device", "precision", "batch_size", "seed"),
    shared(Data, "data", help={"data": "images with texts to fit to (see below)"}),
    flag("--split", "which images of coco:, flickr:, cub: and iapr:, as --train-split of training"),
    shared(DataConfig, *READING, help=OF_READING),
    flag("--pairs", "embeddings that --save-pairs wrote, instead of --data", metavar="FILE"),
    flag("--save-pairs", "keep the embeddings in this file", metavar="FILE"),
    shared(FitOptions, *FIT, help={"fit_samples": "samples that are read at most"}),
    output("folder for the model with its variances"),
    more=MORE,
)
def fit(args: argparse.Namespace) -> None:
    """Give a trained model variances, novelty and doubt; its means stay as they are."""
    if bool(args.pairs) == bool(args.data):
        raise ValueError("give --data, or --pairs with embeddings that --save-pairs wrote")
    from safetensors.torch import load_file

    from prolip.embeddings import Pairs, check_enough
    from prolip.fitting.attach import attach, check_place

    config = FitOptions(**{name: getattr(args, name) for name in FIT})
    check_place(args.output, args.model)
    if args.save_pairs:
        check_output(args.save_pairs)
        if not Path(args.save_pairs).absolute().parent.is_dir():
            raise ValueError(f"--save-pairs {args.save_pairs}: its folder is not there, make it first")
    start = time.perf_counter()
    if args.pairs:
        pairs = Pairs.from_tensors(load_file(args.pairs))
        check_enough(len(pairs))
        if not pairs.model:
            remedy = f"be sure that it was {args.model}, or write it again with --save-pairs"
            print(f"warning: {args.pairs} does not say which model embedded it: {remedy}", file=sys.stderr)
    else:
        pairs = embed(args, config)
    embedded = time.perf_counter()
    if args.save_pairs:
        pairs.save(Path(args.save_pairs))
    fitted = attach(args.model, args.pretrained, args.tokenizer, pairs, config, args.output, args.seed)
    if pairs.caution:
        print(f"warning: {pairs.caution}", file=sys.stderr)
    done = time.perf_counter()
    how, took = "read" if args.pairs else "embedded", f"fitted and written in {done - embedded:.0f} s"
    counts = f"{len(pairs.image):,} images, {len(pairs.text):,} texts, {len(pairs):,} pairs"
    print(f"{counts}; {how} in {embedded - start:.0f} s, {took}")
    describe(fitted, pairs)
    print(f"--model local-dir:{args.output} evaluates it")


def embed(args: argparse.Namespace, config: FitOptions) -> Pairs:
    """The pairs of --data."""
    from prolip.data.faults import FaultCounter
    from prolip.fitting.attach import embed_data

    with respelling({"--train-data": "--data", "--train-split": "--split"}):
        reading = {name: getattr(args, name) for name in READING}
        data = DataConfig(train_data=args.data, train_split=args.split, seed=args.seed, **reading)
        faults, model = FaultCounter(limit=data.max_bad_fraction), (args.pretrained, args.tokenizer, args.batch_size)
        pairs = embed_data(args.model, data, config, faults, *model, device=args.device, precision=args.precision)
    lost = {kind: count for kind, count in faults.summary().items() if kind not in ("samples", "shards")}
    if lost:
        print(f"left out: {', '.join(f'{count} {kind}' for kind, count in lost.items())}", file=sys.stderr)
    return pairs


def describe(fitted: Fitted, pairs: Pairs) -> None:
    """Print how many images a text fits, how many texts an image, and whether there are doubt and novelty."""
    from prolip.uncertainty.novelty import FEWEST
    from prolip.uncertainty.units import Units, in_words

    units = Units(fitted.score.unit, len(pairs.image), len(pairs.text))
    texts = fitted.text.trace(pairs.text.float(), pairs.text_ids)
    for what, trace, of in (("text", texts, "images"), ("image", fitted.image.trace(pairs.image.float()), "texts")):
        share, bits = units.share(trace, of), units.information(trace, of, bits=True)
        low, middle, high = (in_words(float(share.quantile(q))) for q in (0.05, 0.5, 0.95))
        tails = f"one in twenty fits {low} or fewer, one in twenty {high} or more"
        print(f"{what}s: the median one fits {middle} of the {of} ({tails}) and says {bits.median():.1f} bits")
    if (reader := fitted.reader) is not None:
        low, high = (x.exp() for x in reader.readings.bounds[2:])
        print(f"texts in other words: nine in ten fit {low:.2g} to {high:.2g} times as many images as it says")
        nats = reader.ambiguity(pairs.image.float())
        median = f"the median one leaves {nats.median():.1f} nats open about its topic"
        print("ambiguity of images:", "too few general texts to say" if nats.isnan().all() else median)
    if fitted.score.doubt is None or fitted.reader is None or pairs.changed is None or pairs.changed_of is None:
        print(NO_DOUBT)
    else:
        images = pairs.image[pairs.changed_of].float(), pairs.changed.flatten(0, 1).float()
        doubts = [fitted.score.doubts(fitted.reader.evidence(x)) for x in images]
        own, changed = (doubt.median() for doubt in doubts if doubt is not None)
        medians = f"{own:.0%} of the median image, {changed:.0%} of one that was changed strongly"
        print(f"doubt, the share of a match probability that is not the model's: {medians}")
    for side, novelty in (("image", fitted.novelty), ("text", fitted.text_novelty)):
        if novelty is None:
            takes = f"{FEWEST} or more of --data that differ, one of OpenCLIP's towers or ours, and --novelty-centres"
            print(f"no novelty of {side}s: it takes {takes}")
