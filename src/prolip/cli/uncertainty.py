"""`prolip uncertainty`: calibrated variances and novelty for a trained model; its means do not change."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from prolip.cli.command import MODEL, Compute, Data, command, flag, output, shared
from prolip.data.config import DataConfig
from prolip.uncertainty.options import FitOptions
from prolip.utils.console import say
from prolip.utils.messages import respelling
from prolip.utils.outputs import check_output

if TYPE_CHECKING:
    from prolip.embeddings import Pairs
    from prolip.uncertainty.fit import Fitted

#: Settings of `DataConfig` for reading pairs, except the data and its split.
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
    "caption_sampling": "caption fields with optional weights: txt is the plain caption, others are JSON fields "
    "(CSV columns), e.g. name:2,keywords:1,group",
    "dataset_type": "type of --data; auto: from its first word, suffix or content",
}
NO_CORRECTION = "warning: match probabilities of images unlike the training will be too high: their correction needs "
NO_CORRECTION += "novelty and --changed-images"
MORE = (
    "The model may be ProLIP's or OpenCLIP's. Evaluate the output as --model local-dir:FOLDER.\n"
    "--data accepts csv:, parquet:, jsonl:, images:, shards:, coco:, flickr:, cub: or iapr:, as in training. Use data "
    "like that of the application. --save-pairs saves the embeddings, and --pairs fits to them again."
)


@command(
    "uncertainty",
    "--model local-dir:runs/demo/model --data data/emoji/noto.tar --output runs/demo/fitted",
    MODEL,
    shared(Compute, "device", "precision", "batch_size", "seed"),
    shared(Data, "data", help={"data": "images with texts to fit to (see below)"}),
    flag("--split", "split of coco:, flickr:, cub: and iapr:, as --train-split in training"),
    shared(DataConfig, *READING, help=OF_READING),
    flag("--pairs", "embeddings from --save-pairs, instead of --data", metavar="FILE"),
    flag("--save-pairs", "save the embeddings to this file", metavar="FILE"),
    shared(FitOptions, *FIT, help={"fit_samples": "maximum number of samples to read"}),
    output("folder for the model with its variances"),
    more=MORE,
)
def fit(args: argparse.Namespace) -> None:
    """Add variances, novelty and calibrated match probabilities to a trained model; its means do not change."""
    if bool(args.pairs) == bool(args.data):
        raise ValueError("give either --data, or --pairs with embeddings from --save-pairs")
    from safetensors.torch import load_file

    from prolip.embeddings import Pairs, check_enough
    from prolip.fitting.attach import attach, check_place
    from prolip.loading import check_weights, is_prolip, recognised
    from prolip.models.diagnose import is_model

    config = FitOptions(**{name: getattr(args, name) for name in FIT})
    check_place(args.output, args.model)
    check_weights(args.model, args.pretrained, is_prolip(args.model))
    say(recognised(args.model, args.pretrained))
    if is_model(Path(args.output)):
        say(f"{args.output} holds a model, which this command replaces")
    if args.save_pairs:
        check_output(args.save_pairs)
        if not Path(args.save_pairs).absolute().parent.is_dir():
            raise ValueError(f"--save-pairs {args.save_pairs}: its folder does not exist; create it first")
    start = time.perf_counter()
    if args.pairs:
        pairs = Pairs.from_tensors(load_file(args.pairs))
        check_enough(len(pairs))
        if not pairs.model:
            remedy = f"check that it was {args.model}, or write the file again with --save-pairs"
            print(f"warning: {args.pairs} does not name the model that embedded it: {remedy}", file=sys.stderr)
    else:
        say(f"embedding the images and texts of {args.data}")
        pairs = embed(args, config)
    embedded = time.perf_counter()
    if args.save_pairs:
        pairs.save(Path(args.save_pairs))
    say(f"fitting variances to {len(pairs):,} pairs")
    source = args.pairs or args.data
    fitted = attach(args.model, args.pretrained, args.tokenizer, pairs, config, args.output, args.seed, source)
    done = time.perf_counter()
    how, took = "read" if args.pairs else "embedded", f"fitted and written in {done - embedded:.0f} s"
    counts = f"{len(pairs.image):,} images, {len(pairs.text):,} texts, {len(pairs):,} pairs"
    print(f"{counts}; {how} in {embedded - start:.0f} s, {took}")
    describe(fitted, pairs)
    print(f"use it as --model local-dir:{args.output}", flush=True)
    for caution in pairs.cautions:
        print(f"warning: {caution}", file=sys.stderr)


def embed(args: argparse.Namespace, config: FitOptions) -> Pairs:
    """Embed the pairs of --data."""
    from prolip.data.faults import FaultCounter
    from prolip.fitting.attach import embed_data

    with respelling({"--train-data": "--data", "--train-split": "--split"}):
        reading = {name: getattr(args, name) for name in READING}
        data = DataConfig(train_data=args.data, train_split=args.split, seed=args.seed, **reading)
        faults, model = FaultCounter(limit=data.max_bad_fraction), (args.pretrained, args.tokenizer, args.batch_size)
        pairs = embed_data(args.model, data, config, faults, *model, device=args.device, precision=args.precision)
    lost = {kind: count for kind, count in faults.summary().items() if kind not in ("samples", "shards")}
    if lost:
        print(f"skipped: {', '.join(f'{count} {kind}' for kind, count in lost.items())}", file=sys.stderr)
    return pairs


def describe(fitted: Fitted, pairs: Pairs) -> None:
    """Print how many images a text matches, how many texts an image matches, the correction, and missing novelty."""
    from prolip.uncertainty.novelty import FEWEST
    from prolip.uncertainty.units import Units, in_words, range_in_words

    units = Units(fitted.score.unit, len(pairs.image), len(pairs.text))
    texts = fitted.text.trace(pairs.text.float(), pairs.text_ids)
    for what, trace, of in (("text", texts, "images"), ("image", fitted.image.trace(pairs.image.float()), "texts")):
        share, bits = units.share(trace, of), units.information(trace, of, bits=True)
        low, middle, high = (float(share.quantile(q)) for q in (0.05, 0.5, 0.95))
        print(f"median {what}: matches {in_words(middle)} of the {of}, {bits.median():.1f} bits")
        print(f"  90% of the {what}s: {range_in_words(low, high)}")
    if (reader := fitted.reader) is not None:
        low, high = (x.exp() for x in reader.readings.bounds[2:])
        print(f"reworded texts: 90% have {low:.2g} to {high:.2g} times the expected matches")
        nats = reader.ambiguity(pairs.image.float())
        median = f"{nats.median():.1f} nats between topics for the median image"
        print("ambiguity:", "too few general texts to estimate" if nats.isnan().all() else median)
    if fitted.score.doubt is None or fitted.reader is None or pairs.changed is None or pairs.changed_of is None:
        print(NO_CORRECTION)
    else:
        images = pairs.image[pairs.changed_of].float(), pairs.changed.flatten(0, 1).float()
        doubts = [fitted.score.doubts(fitted.reader.evidence(x)) for x in images]
        own, changed = (doubt.median() for doubt in doubts if doubt is not None)
        print(f"base rate in match probabilities: {own:.0%} (median image), {changed:.0%} (strongly changed)")
    for side, novelty in (("image", fitted.novelty), ("text", fitted.text_novelty)):
        if novelty is None:
            needs = f"at least {FEWEST} different {side}s, a ProLIP or OpenCLIP tower, and --novelty-centres"
            print(f"no novelty of {side}s: it needs {needs}")
