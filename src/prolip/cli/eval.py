"""`prolip eval`: evaluation on test sets, the emoji corpus, DataComp's suite, and with clip_benchmark."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prolip.cli.command import (
    COMPUTE,
    MODEL,
    Compute,
    Data,
    Flags,
    Model,
    Output,
    add_all,
    check,
    command,
    flag,
    load,
    output,
    part_of,
    shared,
)
from prolip.evaluation.datasets.registry import FORMS, open_dataset, told_apart
from prolip.utils.flags import Parser, flag_of
from prolip.utils.messages import naming
from prolip.utils.outputs import check_output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prolip.corpora.emoji.corpus import Corpus
    from prolip.evaluation.datasets.base import Dataset, Kind
    from prolip.evaluation.embed import Features

DEMO = "--model local-dir:runs/demo/model"
#: Flags that `--features` makes useless.
OF_MODELS = (
    *("model", "pretrained", "tokenizer", "data", "split", "task", "save_features", "device", "precision"),
    *("skip_damaged", "prompts", "prompts_fit", "prompts_split"),
)
CLASSES: Kind = "classification"
SCORES = "csd, mean or measures (default: the score of the model's method)"
SIMILARITIES = flag("--similarity", SCORES, nargs="+", action="extend", metavar="SCORE")
SPLIT = flag("--split", "name of a split, or a share to hold out by content, such as 0.1")
TASK = flag("--task", "task of data with captions and classes (default: retrieval)", choices=("retrieval", CLASSES))


def intervals_over(of: str) -> Flags:
    """Return the flag of bootstrap intervals over `of`."""
    text = f"add 95%% bootstrap intervals over {of} (1000 draws without a number)"
    return flag("--intervals", text, nargs="?", const=1000, default=0, least=2, metavar="DRAWS")


# --- tasks ------------------------------------------------------------------------------------------------------------
PROMPTS = """--prompts:
  all         every prompt
  certain:K   the K least uncertain prompts of each class
  below:k     uncertainties up to the class's mean + k standard deviations
  best        the least uncertain; one half of the labelled images sets their number for the other half
  bprw        weighted by how well they describe the images nearest to a class
  bprw:K      weighted by K labelled images per class, one half for the other; settings:
              bprw:K,alpha=2,eps=0.02,prior=trace,nearest=5,samples=20,seed=0
  FILE.json   weights of prolip prompts fit"""


def check_tasks(args: argparse.Namespace) -> None:
    """Raise ValueError for contradicting flags, before anything is loaded."""
    from prolip.methods import find_score
    from prolip.prompts.templates import ALL, BPRW, BY_IMAGES, read_prompts

    for similarity in args.similarity or ():
        find_score(similarity)
    rule = read_prompts(args.prompts)
    if args.prompts_fit and rule.way != BPRW:
        what = f"--prompts-fit is for bprw, but --prompts is {args.prompts}"
        raise ValueError(f"{what}: give --prompts bprw or bprw:K, or remove --prompts-fit")
    if args.prompts_split and not args.prompts_fit:
        raise ValueError("--prompts-split needs --prompts-fit: give both, or --split for the test sets")
    if rule.way in BY_IMAGES and not args.prompts_fit and (args.uncertainty or args.plots or args.save_features):
        raise ValueError(
            f"--prompts {rule.way} computes classes of two halves of the images: remove --uncertainty, --plots "
            "and --save-features" + (", or give other images as --prompts-fit" if rule.way == BPRW else "")
        )
    useless = [flag_of(name) for name in OF_MODELS if getattr(args, name) not in (None, False, [], "auto", "fp32", ALL)]
    if args.features and useless:
        raise ValueError(
            f"--features evaluates without a model: remove {', '.join(useless)}, or give --model, --data and "
            f"--save-features {args.features}, which reuses saved features and adds the rest"
        )
    if not args.features and not (args.model and args.data):
        raise ValueError("give --model and --data, or --features FOLDER to evaluate saved embeddings")
    check(args)
    for name in ("confusion", "plots"):
        if getattr(args, name) and not args.output:
            raise ValueError(f"--{name} needs --output: also give --output FILE")
    if args.instances and not Path(args.instances).is_file():
        raise FileNotFoundError(f"--instances {args.instances} does not exist: give COCO's instances_val2014.json")
    if args.plots:
        check_output(Path(args.output).parent / "plots", folder=True)


def open_named(flag: str, spec: str, split: str | None, skip_damaged: bool, task: Kind | None = None) -> Dataset:
    """Open the data set that a flag names."""
    from prolip.data.faults import FaultCounter

    with naming(f"{flag} {spec}"):
        return open_dataset(spec, split, FaultCounter() if skip_damaged else None, task)


def features_of(args: argparse.Namespace) -> Iterator[Features]:
    """Yield the features of all data sets; opens all first, so a missing one fails before any is embedded."""
    from prolip.evaluation.cache import FeatureStore
    from prolip.evaluation.embed import load_features
    from prolip.evaluation.evaluate import embed_datasets
    from prolip.evaluation.prompts import check_pool
    from prolip.prompts.templates import read_prompts

    if args.features:
        return load_features(FeatureStore(args.features))
    datasets = told_apart([open_named("--data", spec, args.split, args.skip_damaged, args.task) for spec in args.data])
    pool = None
    if args.prompts_fit:
        pool = open_named("--prompts-fit", args.prompts_fit, args.prompts_split, args.skip_damaged, CLASSES)
        with naming(f"--prompts-fit {args.prompts_fit}"):
            for dataset in datasets:
                check_pool(pool, dataset)
    embedder = load(args)
    for similarity in args.similarity or ():
        embedder.scored_by(similarity)
    how = {"batch_size": args.batch_size, "workers": args.workers, "progress": sys.stderr.isatty()}
    rule, store = read_prompts(args.prompts), FeatureStore(args.save_features)
    return embed_datasets(datasets, embedder, rule, pool, store=store, **how)


@command(
    "eval tasks",
    f"{DEMO} --data wds:runs/groups",
    flag("--data", f"test sets: {FORMS}", nargs="+", action="extend", default=[], metavar="SOURCE"),
    SPLIT,
    TASK,
    SIMILARITIES,
    flag("--prompts", "prompts of a class: a rule or a file (see below)", default="all", metavar="RULE"),
    flag("--prompts-fit", "images to fit bprw to, other than the scored ones", metavar="SOURCE"),
    flag("--prompts-split", "split of --prompts-fit (default: test)", metavar="SPLIT"),
    flag("--features", "evaluate features saved by --save-features, without a model", metavar="FOLDER"),
    flag("--uncertainty", "add refusal by score and by traces, and calibration", action="store_true"),
    flag("--plots", "plot them next to --output: plots/TASK-MODEL-SIMILARITY/*.png", action="store_true"),
    flag("--instances", "add PMRP of COCO's captions, from its instances_val2014.json", metavar="FILE"),
    flag("--confusion", "add counts of true and predicted classes to --output", action="store_true"),
    intervals_over("images with their captions, also for differences from a test set's first result"),
    shared(Model),
    shared(Data, "skip_damaged"),
    COMPUTE,
    shared(Output, "output", "save_features", help={"output": "JSON file for the results"}),
    more=PROMPTS,
)
def run_tasks(args: argparse.Namespace) -> None:
    """Evaluate a model on test sets."""
    from prolip.data.reading.csv import show_counts
    from prolip.evaluation import table
    from prolip.evaluation.evaluate import evaluate_all
    from prolip.evaluation.prompts import described
    from prolip.prompts.templates import read_prompts

    show_counts()
    check_tasks(args)
    study = args.uncertainty or args.plots
    plots = Path(args.output).parent / "plots" if args.plots else None
    shown = {"draws": args.intervals, "confusion": args.confusion, "instances": args.instances, "study": study}
    results = evaluate_all(features_of(args), args.similarity or [None], plots=plots, output=args.output, **shown)
    tables = [table.format_table(results), table.harmonic_means(results)]
    if args.prompts_fit:
        split = f", split {args.prompts_split}" if args.prompts_split else ""
        tables += [f"prompts: {args.prompts}, fitted to {args.prompts_fit}{split}"]
    elif args.prompts != "all":
        tables += [f"prompts: {described(read_prompts(args.prompts))}"]
    tables += [table.format_uncertainty(results)] if study else []
    tables += [table.format_intervals(results)] if args.intervals else []
    tables += [f"written to {args.output}"] if args.output else []
    print("\n\n".join(filter(None, tables)))


# --- emoji ------------------------------------------------------------------------------------------------------------
#: Description of the two galleries.
GALLERIES = """galleries:
  names/...     names only, one correct answer per drawing: the metric to quote
  captions/...  texts of all levels; a text matches all drawings of its concepts: mAP@R"""


#: Drawings of the corpus, and the names in the gallery.
DRAWINGS = (
    flag("--data", "shards with the drawings to evaluate", nargs="+", required=True, metavar="TAR"),
    flag("--select", "concepts to evaluate: demo, or 'group=animals nature|food drink'", metavar="RULE"),
    flag("--names", "shards whose concepts are added to the gallery", nargs="+", metavar="TAR"),
    flag("--all-names", "keep all names in the gallery despite --select", action="store_true"),
)


def corpus_of(args: argparse.Namespace) -> Corpus:
    """Return the drawings and their names."""
    from prolip.corpora.emoji.evaluate import gallery

    return gallery(args.data, args.select, args.names, args.all_names)


@command(
    "eval emoji",
    f"{DEMO} --data data/emoji/emojione.tar",
    *DRAWINGS,
    flag("--similarity", "csd, mean or a measure (default: the score of the model's method)", metavar="SCORE"),
    intervals_over("concepts"),
    flag("--against", "--output of another model: adds intervals of the difference", metavar="FOLDER"),
    MODEL,
    shared(Compute, "device", "precision"),
    output("folder for metrics.json, corpus.json and embeddings.npz", required=False),
    more=GALLERIES,
)
def run_emoji(args: argparse.Namespace) -> None:
    """Evaluate a model on the emoji corpus, which has complete labels."""
    from prolip.corpora.emoji.evaluate import evaluate_corpus
    from prolip.corpora.emoji.result import format_corpus
    from prolip.corpora.emoji.result import load as load_result
    from prolip.methods import find_score

    if args.similarity:
        find_score(args.similarity)
    check(args, folder=True)
    if args.against and not args.intervals:
        raise ValueError("--against needs --intervals: also give --intervals")
    against = load_result(args.against) if args.against else None
    corpus = corpus_of(args)
    if ":" not in args.model and not args.pretrained:
        args.pretrained = "random"
        what = "is only a config, so its weights are random; for a run give local-dir:runs/NAME/model"
        print(f"note: {args.model} {what}", file=sys.stderr)
    result = evaluate_corpus(load(args), corpus, similarity=args.similarity)
    result.info |= {"model": args.model, "data": args.data, "names": args.names, "select": args.select}
    if args.intervals:
        result.add_intervals(args.intervals, against)
    if args.output:
        result.save(args.output)
    print(format_corpus(result) + (f"\n\nwritten to {args.output}" if args.output else ""))


# --- datacomp ---------------------------------------------------------------------------------------------------------
TAGS = "imagenet, shift, vtab, retrieval, wilds, fairness; counted: the 38 of the average"
PLACES = {
    "data": "folder or URL with the folders of the data sets, or hf-hub to stream them",
    "part": "evaluate part I of N of the tasks, from 0 (I/N); slurm: part of this SLURM array task",
}


@command(
    "eval datacomp",
    f"{DEMO} --data data/datacomp --output runs/demo/datacomp",
    flag("--tasks", f"keys, names or tags ({TAGS}); default: all 40", nargs="+", metavar="TASK"),
    SIMILARITIES,
    flag("--prompts", "files of prolip prompts fit, each for its task", nargs="+", default=[], metavar="FILE"),
    flag("--allow-missing", "evaluate available tasks only, without averages that lack a task", action="store_true"),
    flag("--no-uncertainty", "skip refusal and calibration", action="store_true"),
    flag("--plots", "plot refusal and calibration of every task: OUTPUT/plots/TASK/*.png", action="store_true"),
    flag("--list", "list all tasks and the files to fetch, then exit", action="store_true"),
    shared(Model),
    shared(Data, "data", "skip_damaged", "part", help=PLACES),
    COMPUTE,
    output("folder for results.jsonl and tables.*", "save_features", required=False, output="datacomp"),
)
def run_datacomp(args: argparse.Namespace) -> int:
    """Evaluate a model on the 38 tasks of DataComp and its two face sets. Return 1 if a task failed."""
    from prolip.data.reading.csv import show_counts
    from prolip.evaluation.cache import FeatureStore
    from prolip.evaluation.suites.datacomp import run as suite
    from prolip.evaluation.suites.datacomp.catalogue import BY_KEY
    from prolip.evaluation.suites.datacomp.evaluate import SuiteOptions

    show_counts()
    if args.list:
        print(suite.catalogue_text())
        return 0
    if not (args.model and args.data):
        raise ValueError("give --model and --data, or --list")
    check(args, folder=True)
    options = SuiteOptions(
        tasks=args.tasks,
        similarities=args.similarity or [None],
        prompts=args.prompts,
        part=part_of(args.part),
        allow_missing=args.allow_missing,
        skip_damaged=args.skip_damaged,
        uncertainty=not args.no_uncertainty,
        plots=Path(args.output) / "plots" if args.plots else None,
        store=FeatureStore(args.save_features),
        embedding={"batch_size": args.batch_size, "workers": args.workers, "progress": sys.stderr.isatty()},
    )
    outcome = suite.run(lambda: load(args), args.data, args.output, options, partial(print, flush=True))
    for key, reason in outcome.failed.items():
        print(f"error: {BY_KEY[key].name} failed: {reason}", file=sys.stderr)
    return 1 if outcome.failed else 0


# --- clip-benchmark ---------------------------------------------------------------------------------------------------
UPSTREAM = """For clip_benchmark's own flags: prolip eval clip-benchmark eval --help, and build --help.
Models: all of clip_benchmark, and --model local-dir:FOLDER, hf-hub:ORG/NAME, or a name
such as ProLIP-ViT-B-16 with --pretrained FILE. Computation is float32 without --amp."""

#: Flags that clip_benchmark lacks, and flags with more values here.
ADDED = (
    flag("--similarity", "score of ProLIP models: csd, mean or a measure (default: their method's)", metavar="SCORE"),
    flag("--prompts", "prompt weights from prolip prompts fit", metavar="FILE"),
    flag("--amp", "compute in mixed precision", action="store_true"),
    flag("--tokenizer", "folder of tokenizer files, a file, or bpe; default: the model's"),
    flag("--pretrained", "weights; not needed for local-dir: and hf-hub: models", nargs="+"),
    flag("--output", "JSON file; may contain {dataset} {pretrained} {model} {language} {task} {similarity}"),
)


@command(
    "eval clip-benchmark",
    "eval --model local-dir:runs/demo/model --dataset wds/cars --dataset_root data/wds_cars",
    *ADDED,
    flag("words", "evaluate, or make a table", nargs=argparse.REMAINDER, metavar="eval|build ..."),
    more=UPSTREAM,
)
def run_benchmark(args: argparse.Namespace) -> None:
    """Run clip_benchmark with ProLIP's models.

    ProLIP's flags are removed from the words; the rest goes to clip_benchmark.
    """
    if not args.words:
        raise ValueError("no subcommand: give eval or build (prolip eval clip-benchmark --help)")
    from prolip.evaluation.clip_benchmark.command import run

    parser = Parser(prog="prolip eval clip-benchmark", add_help=False)
    add_all(parser, ADDED)
    if {"-h", "--help"} & set(args.words[1:]) and args.words[0] != "build":
        print(parser.format_help())  # clip_benchmark's follows
    own, words = parser.parse_known_args(args.words, argparse.Namespace(**vars(args) | {"words": None}))
    run(words, own)
