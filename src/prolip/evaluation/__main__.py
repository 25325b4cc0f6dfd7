"""Zero-shot classification and retrieval of one model on any data sets, with any similarities.

    python -m prolip.evaluation --model local-dir:runs/demo/model --dataset wds:data/wds_cifar10_test --similarity csd
    python -m prolip.evaluation --model ViT-B-16 --pretrained openai --dataset imagenet:data/val coco:coco.json,coco
    python -m prolip.evaluation --features features --similarity wasserstein2

The third form needs no model: it scores what --save-features has kept. --list-published shows papers' tables.
"""
from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from prolip.data.faults import FaultCounter
from prolip.data.reading.table import show_counts
from prolip.evaluation.datasets import coco
from prolip.evaluation.datasets.specs import FORMS, open_dataset
from prolip.evaluation.feature_store import FeatureStore, slug
from prolip.evaluation.features import Features, load_features
from prolip.evaluation.kinds.base import pair_scores
from prolip.evaluation.kinds.best_prompts import described
from prolip.evaluation.loading import RANDOM, load_embedder
from prolip.evaluation.model import PRECISIONS
from prolip.evaluation.published.papers import find_printed, format_printed
from prolip.evaluation.table import (
    compare_results,
    format_intervals,
    format_table,
    format_uncertainty,
    harmonic_means,
)
from prolip.evaluation.task import TaskResult, check_prompts, compute_features, evaluate_dataset, study_features
from prolip.evaluation.zero_shot import ALL, BPRW, BY_IMAGES, PromptRule, read_prompts
from prolip.methods import find_score
from prolip.models.weights.checkpoint import CheckpointError
from prolip.prompts.fitting import check_pool, fit_prompts
from prolip.utils import console
from prolip.utils.messages import at_least, naming
from prolip.utils.outputs import check_output, replacing

log = logging.getLogger(__name__)

#: Where --published finds nothing.
NONE_PRINTED = "no published row has a figure of these test sets"
#: Flags that say how a model reads images and texts.
OF_MODELS = (
    "model", "pretrained", "tokenizer", "dataset", "split", "save_features", "device", "precision", "skip_damaged",
    "prompts", "prompts_fit", "prompts_split",
)  # fmt: skip


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m prolip.evaluation", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--model", help="local-dir:FOLDER, hf-hub:NAME, or a name of ours or OpenCLIP's with --pretrained")
    add("--pretrained", help=f"weights file or OpenCLIP's tag; {RANDOM} for untrained weights")
    add("--tokenizer", help="another tokenizer than the model's: a folder of its files, or bpe")
    add("--dataset", nargs="+", action="extend", default=[], metavar="WORD:ADDRESS", help=FORMS)
    add("--split", help="another split than test")
    add("--similarity", nargs="+", action="extend", help="csd, mean or measures (default: the method's own score)")
    add("--prompts", default=ALL, metavar="RULE", help="which prompts make a class: all (default); certain:K, the K "
        "least uncertain; below:k, those up to mean + k standard deviations of the class's uncertainties; best, as "
        "many of the least uncertain as half of the labelled images choose for the other half; bprw, weights by which "
        "the prompts describe the images nearest to a class, or bprw:K, K labelled ones of it, half of them for the "
        "other (bprw:K,alpha=2,eps=0.02,prior=trace,nearest=5,samples=20,seed=0); a file of weights of python -m "
        "prolip.prompts fit")
    add("--prompts-fit", metavar="WORD:ADDRESS", help="images that bprw is fitted to, for others to be scored")
    add("--prompts-split", help="their split, if it is another than test")
    add("--save-features", metavar="DIR", help="keep embeddings here, and take those that are here already")
    add("--features", metavar="DIR", help="evaluate what --save-features kept, without a model")
    add("--device", default="cpu")
    add("--precision", default="fp32", choices=PRECISIONS)
    add("--batch-size", type=int, default=256)
    add("--workers", type=int, help="threads that decode images (default: cores - 1, at most 16)")
    add("--uncertainty", action="store_true", help="also refusal by score and traces, calibration of match probability")
    add("--plots", metavar="DIR", help="draw these: DIR/TASK-MODEL-SIMILARITY/*.png")
    add("--instances", metavar="FILE", help="COCO's instances_val2014.json: also PMRP of its captions")
    add("--confusion", action="store_true", help="counts of true and predicted classes in the JSON")
    add("--skip-damaged", action="store_true", help="leave out damaged samples; the result says which")
    add("--intervals", nargs="?", type=int, const=1000, default=0, metavar="DRAWS",
        help="95%% intervals by bootstrap (1000 draws) over images with their captions; also of differences to a test "
        "set's first result")
    add("--published", nargs="+", metavar="NAME", help="also papers' rows of these sets: parts of their names, or all")
    add("--list-published", nargs="*", metavar="NAME", help="evaluate nothing: show these rows (default: all)")
    add("--out", metavar="FILE", help="the results as JSON")
    args = parser.parse_args(arguments)
    args.similarity = args.similarity or [None]
    return args


def check(args: argparse.Namespace) -> None:
    """ValueError for flags that do not go together, before anything is loaded."""
    find_printed(args.published or ())
    for similarity in args.similarity:
        if similarity:
            find_score(similarity)
    rule = read_prompts(args.prompts)
    if args.prompts_fit and rule.way != BPRW:
        raise ValueError(f"--prompts-fit says what bprw is fitted to, and --prompts is {args.prompts}: give --prompts "
                         "bprw or bprw:K, or drop it")  # fmt: skip
    if args.prompts_split and not args.prompts_fit:
        raise ValueError("--prompts-split is the split of --prompts-fit: give both, or --split for what is scored")
    if rule.way in BY_IMAGES and not args.prompts_fit and (args.uncertainty or args.plots or args.save_features):
        raise ValueError(f"--prompts {rule.way} gives classes of two halves of the images: drop --uncertainty, --plots "
                         "and --save-features"
                         + (", or give --prompts-fit other images" if rule.way == BPRW else ""))  # fmt: skip
    given = vars(args) | {"device": args.device != "cpu", "precision": args.precision != "fp32"}
    given["prompts"] = rule.way != ALL
    useless = [f"--{name.replace('_', '-')}" for name in OF_MODELS if given[name]]
    if args.features and useless:
        raise ValueError(
            f"--features evaluates without a model: drop {', '.join(useless)}, or give --model, --dataset and "
            f"--save-features {args.features}, which takes what is there and adds the rest"
        )
    if not args.features and not (args.model and args.dataset):
        raise ValueError("give --model and --dataset, or --features DIR to evaluate saved embeddings")
    if args.intervals == 1:
        raise ValueError("--intervals 1: give two draws or more, such as 1000, or no number")
    at_least(args, 1, "batch_size")
    at_least(args, 0, "workers", "intervals")
    if args.confusion and not args.out:
        raise ValueError("--confusion goes into the JSON: give --out FILE too")
    if args.instances and not Path(args.instances).is_file():
        raise FileNotFoundError(f"--instances: no file {args.instances}: give COCO's instances_val2014.json")
    for path, folder in ((args.out, False), (args.save_features, True), (args.plots, True)):
        if path:
            check_output(path, folder)


def features_of(args: argparse.Namespace) -> Iterator[Features]:
    """The features of all data sets: opened first, so that a missing one is known before the first is embedded."""
    if args.features:
        yield from load_features(FeatureStore(args.features))
        return
    datasets = []
    for spec in args.dataset:
        with naming(f"--dataset {spec}"):
            datasets.append(open_dataset(spec, args.split, FaultCounter() if args.skip_damaged else None))
    pool = None
    if args.prompts_fit:
        with naming(f"--prompts-fit {args.prompts_fit}"):
            pool = open_dataset(args.prompts_fit, args.prompts_split, FaultCounter() if args.skip_damaged else None)
            for dataset in datasets:
                check_pool(pool, dataset)
    embedder = load_embedder(args.model, args.pretrained, args.device, args.precision, args.tokenizer)
    for similarity in args.similarity:
        embedder.card.scored_by(similarity)
    store, prompts = FeatureStore(args.save_features), read_prompts(args.prompts)
    for dataset in datasets:
        check_prompts(prompts, dataset, embedder.card)
    options = {"store": store, "batch_size": args.batch_size, "workers": args.workers, "progress": sys.stderr.isatty()}
    for dataset in datasets:
        own = prompts
        if pool is not None and isinstance(prompts, PromptRule) and prompts.fit is not None:
            own = fit_prompts(pool, embedder, prompts.fit, dataset.templates, **options)
        yield compute_features(dataset, embedder, prompts=own, **options)


def run(args: argparse.Namespace) -> list[TaskResult]:
    """Check, embed, score; the table and the JSON at the end, the JSON also after every data set."""
    check(args)
    results: list[TaskResult] = []
    wanted = args.uncertainty or args.plots
    drawn: set[str] = set()
    harmonic = ""
    for features in features_of(args):
        categories = categories_of(features, args.instances)
        for similarity in args.similarity:
            options = {"confusion": args.confusion, "draws": args.intervals}
            result = evaluate_dataset(features.dataset, features, similarity, **options)
            if categories is not None:
                result.metrics.update(plausible_matches(features, categories, similarity))
            results.append(with_uncertainty(result, features, args.plots, drawn) if wanted else result)
        if args.intervals:
            compare_results(results, args.intervals)
        harmonic = harmonic_means(results, args.intervals)
        if args.out:
            text = json.dumps([result.to_dict() for result in results], indent=1, allow_nan=False)
            with replacing(Path(args.out)) as temporary:
                temporary.write_text(text, encoding="utf-8")
    tables = [format_table(results), *([harmonic] if harmonic else [])]
    tables += [f"prompts: {said_of_prompts(args)}"] if args.prompts != ALL else []
    tables += [format_uncertainty(results)] if wanted else []
    tables += [format_intervals(results)] if args.intervals else []
    if args.published:
        tables.append(format_printed(find_printed(args.published), results) or NONE_PRINTED)
    print("\n\n".join(tables) + (f"\n\nwritten to {args.out}" if args.out else ""))
    return results


def said_of_prompts(args: argparse.Namespace) -> str:
    """Which prompts classes are made of, for readers."""
    if not args.prompts_fit:
        return described(read_prompts(args.prompts))
    split = f", split {args.prompts_split}" if args.prompts_split else ""
    return f"{args.prompts}, fitted to {args.prompts_fit}{split}"


def categories_of(features: Features, instances: str | None) -> Tensor | None:
    """What each image of COCO shows, (N, 80); None, which the log says, where the file does not list these images."""
    image_ids = features.dataset.info.get("image_ids")
    if instances is None or image_ids is None:
        return None
    try:
        return coco.category_labels(instances, image_ids)
    except ValueError as error:
        log.warning("%s has no PMRP: %s", features.dataset.name, error)
        return None


def plausible_matches(features: Features, categories: Tensor, similarity: str | None) -> dict[str, float]:
    """`i2t/PMRP` and `t2i/PMRP`, with their values at zeta 0, 1 and 2."""
    assert features.owners is not None
    found = coco.plausible(pair_scores(features, features.model.scored_by(similarity)), categories, features.owners)
    return {name: value for name, value in found.items() if "/PMRP" in name}


def with_uncertainty(result: TaskResult, features: Features, plots: str | None, drawn: set[str]) -> TaskResult:
    """The result with the figures of `Study` beside its metrics, and its plots where there is a folder for them.

    drawn: names of plots that other results of this command have, which are not overwritten.
    """
    similarity = result.info["similarity"]
    study = study_features(features, similarity)
    if plots:
        card = features.model
        model = card.name if card.precision == "fp32" else f"{card.name}-{card.precision}"
        name = slug(f"{result.key}-{model}-{similarity}")
        name = f"{name}-{result.info['task'][:6]}" if name in drawn else name
        drawn.add(name)
        from prolip.evaluation.plots import write_plots  # late: only plots need matplotlib

        write_plots(study, result.key, Path(plots) / name)
    info = result.info | ({"too_large_for": list(study.too_large_for)} if study.too_large_for else {})
    return replace(result, metrics=result.metrics | study.metrics(), info=info)


@console.exits_in_one_line(OSError, ValueError, CheckpointError)
def main(arguments: Sequence[str] | None = None) -> list[TaskResult]:
    """The command: what the user can mend ends in one line and exit code 2."""
    show_counts()
    args = parse(arguments)
    if args.list_published is not None:
        print(format_printed(find_printed(args.list_published)))
        return []
    return run(args)


if __name__ == "__main__":
    console.command(main)
