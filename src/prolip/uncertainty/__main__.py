"""Give a trained model variances that mean something, and novelty; its means stay as they are, bit for bit.

    python -m prolip.uncertainty --model local-dir:runs/siglip/model --train-data 'data/emoji/{noto,twemoji}.tar' \\
        --caption-sampling name:14,keywords:4,subgroup:1,group:1 --output runs/siglip/fitted
    python -m prolip.uncertainty --model ViT-B-32 --pretrained openai --train-data pairs.csv --output fitted
    python -m prolip.uncertainty --model ViT-B-32 --pretrained openai --pairs pairs.safetensors --output fitted

The model is one of ours or of OpenCLIP's. Pairs are read from data in any form that training reads, of the kind that
the model is to be used on, or from a file that --save-pairs wrote. Every evaluation takes the folder that it
leaves: --model local-dir:fitted.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from tqdm import tqdm

from prolip.data.captioned import captioned_samples
from prolip.data.config import DataConfig
from prolip.data.faults import FaultCounter, TooManyBadSamples
from prolip.evaluation.loading import load_embedder, load_model
from prolip.evaluation.model import PRECISIONS
from prolip.methods import LikelihoodConfig
from prolip.models.weights.checkpoint import CheckpointError
from prolip.uncertainty.attach import attach, check_place, means_fingerprint
from prolip.uncertainty.collect import embed_images, embed_texts, enough, join
from prolip.uncertainty.novelty import FEWEST
from prolip.uncertainty.pairs import Pairs, check_enough
from prolip.uncertainty.units import Units, in_words
from prolip.utils import console
from prolip.utils.outputs import check_output

#: Settings of `DataConfig` besides train_data that say where pairs are and how to read them.
DATA = ("train_split", "caption_sampling", "select", "dataset_type", "csv_img_key", "csv_caption_key", "csv_separator",
        "max_bad_fraction")  # fmt: skip


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m prolip.uncertainty", description=__doc__, formatter_class=form)
    add, default, method = parser.add_argument, DataConfig(), LikelihoodConfig()
    add("--model", required=True, help="local-dir:FOLDER, hf-hub:NAME, or a name of ours or OpenCLIP's")
    add("--pretrained", help="weights file or OpenCLIP's tag")
    add("--tokenizer", help="another tokenizer than the model's: a folder of its files, or bpe")
    add("--output", required=True, metavar="FOLDER", help="where the model with its variances goes")
    add("--train-data", help="shards, CSV or folder with images and texts, as training takes them")
    for name in DATA:
        value = getattr(default, name)
        kind = str if value is None else type(value)
        add(f"--{name.replace('_', '-')}", default=value, type=kind, help=f"as training's (default: {value!r})")
    add("--samples", type=int, default=method.fit_samples, help=f"at most so many (default: {method.fit_samples:,})")
    add("--pairs", metavar="FILE", help="embeddings that --save-pairs wrote, instead of --train-data")
    add("--save-pairs", metavar="FILE", help="keep the embeddings, to fit again in seconds")
    add("--bank", type=int, default=method.bank, help=f"texts that images are compared with (default: {method.bank})")
    add("--centres", type=int, default=method.centres,
        help=f"texts whose variances are kept one by one (default: {method.centres})")  # fmt: skip
    add("--novelty-centres", type=int, default=method.novelty_centres,
        help="classes of images, and of texts, that a new one may be far from, 0: no novelty"
             f" (default: {method.novelty_centres})")  # fmt: skip
    add("--device", default="cpu")
    add("--precision", default="fp32", choices=PRECISIONS)
    add("--batch-size", type=int, default=128)
    add("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if bool(args.pairs) == bool(args.train_data):
        parser.error("give --train-data, or --pairs with embeddings that --save-pairs wrote")
    return args


def read_pairs(args: argparse.Namespace) -> Pairs:
    """The pairs of --train-data embedded, or those of --pairs; the model that embedded them is gone afterwards."""
    if args.pairs:
        pairs = Pairs.from_tensors(load_file(args.pairs))
        check_enough(len(pairs))
        if not pairs.model:
            print(f"warning: {args.pairs} does not say which model embedded it: be sure that it was {args.model}, or"
                  " write it again with --save-pairs", file=sys.stderr)  # fmt: skip
        return pairs
    fingerprint = means_fingerprint(load_model(args.model, args.pretrained, args.tokenizer))
    embedder = load_embedder(args.model, args.pretrained, args.device, args.precision, args.tokenizer, stored=False)
    if embedder.logit_scale is None:
        raise ValueError(f"{embedder.name} has no logit_scale, which says how sure a cosine is: it was not contrastive")
    config = DataConfig(**{name: getattr(args, name) for name in ("train_data", *DATA)}, seed=args.seed)
    faults = FaultCounter(limit=config.max_bad_fraction)
    samples = captioned_samples(config, embedder.preprocess, args.samples, faults=faults)
    counted = tqdm(enough(samples), desc="images", unit="", disable=not sys.stderr.isatty())
    part = join([embed_images(counted, embedder.encode_hidden, args.batch_size)])
    texts = embedder.encode_hidden_text, embedder.tokenizer, embedder.logit_scale
    pairs = embed_texts(part, *texts, model=fingerprint)
    lost = {kind: count for kind, count in faults.summary().items() if kind not in ("samples", "shards")}
    if lost:
        print(f"left out: {', '.join(f'{count} {kind}' for kind, count in lost.items())}", file=sys.stderr)
    return pairs


@console.ends_in_one_line(OSError, ValueError, ImportError, CheckpointError, SafetensorError, TooManyBadSamples)
def main(arguments: Sequence[str] | None = None) -> int:
    """Embed, fit, write; says what the texts and the images are found to fit."""
    args = parse(arguments)
    config = LikelihoodConfig(
        fit_samples=args.samples, bank=args.bank, centres=args.centres, novelty_centres=args.novelty_centres
    )
    check_place(args.output, args.model)
    if args.save_pairs:
        check_output(args.save_pairs)
        if not Path(args.save_pairs).absolute().parent.is_dir():
            raise ValueError(f"--save-pairs {args.save_pairs}: its folder is not there, make it first")
    start = time.perf_counter()
    pairs = read_pairs(args)
    embedded = time.perf_counter()
    if args.save_pairs:
        pairs.save(Path(args.save_pairs))
    if pairs.caution:
        print(f"warning: {pairs.caution}", file=sys.stderr)
    fitted = attach(args.model, args.pretrained, args.tokenizer, pairs, config, args.output, args.seed)
    done = time.perf_counter()
    how = "read" if args.pairs else "embedded"
    print(f"{len(pairs.image):,} images, {len(pairs.text):,} texts, {len(pairs):,} pairs; {how} in"
          f" {embedded - start:.0f} s, fitted and written in {done - embedded:.0f} s")  # fmt: skip
    units = Units(fitted.score.unit, len(pairs.image), len(pairs.text))
    texts = fitted.text.trace(pairs.text.float(), pairs.text_ids)
    for what, trace, of in (("text", texts, "images"), ("image", fitted.image.trace(pairs.image.float()), "texts")):
        share, bits = units.share(trace, of), units.information(trace, of, bits=True)
        low, middle, high = (in_words(float(share.quantile(q))) for q in (0.05, 0.5, 0.95))
        print(f"{what}s: the median one fits {middle} of the {of} (one in twenty fits {low} or fewer, one in twenty"
              f" {high} or more) and says {bits.median():.1f} bits")  # fmt: skip
    for side, novelty in (("image", fitted.novelty), ("text", fitted.text_novelty)):
        if novelty is None:
            print(f"no novelty of {side}s: it takes {FEWEST} or more of --train-data that differ, a transformer as the"
                  f" {side} tower, and --novelty-centres")  # fmt: skip
    print(f"--model local-dir:{args.output} evaluates it")
    return 0


if __name__ == "__main__":
    console.command(main)
