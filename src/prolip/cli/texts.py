"""`prolip prompts` and `prolip hierarchy`: how much each prompt counts, and what is a kind of what."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prolip.cli.command import Compute, Data, Flags, Model, Output, check, command, flag, load, shared
from prolip.cli.eval import CLASSES, DRAWINGS, SPLIT, corpus_of, open_named
from prolip.evaluation.datasets.specs import FORMS
from prolip.hierarchy.choices import INCLUSIONS, LEAST, OWN, ROOTS, STEPS
from prolip.utils.outputs import replacing

if TYPE_CHECKING:
    from prolip.embedder import Embedder
    from prolip.hierarchy.traversal import Pairwise

MODEL = "--model local-dir:runs/demo/model"
CORPUS = f"{MODEL} --data data/emoji/emojione.tar"
BY_PROMPTS = """prolip eval tasks, datacomp and clip-benchmark take the file by --prompts. Images
that weights were fitted to may not be scored by them."""


# --- prompts ----------------------------------------------------------------------------------------------------------
@command(
    f"prolip prompts fit {MODEL} --data wds:runs/groups --rule bprw:5 --output weights.json",
    flag("--data", required=True, metavar="SOURCE", help=f"images, class names and prompts: {FORMS}"),
    SPLIT,
    flag(
        "--rule",
        default="bprw",
        metavar="RULE",
        help="bprw (default): by the images nearest to a class; bprw:K: by "
        "K labelled images of it; with settings as of prolip eval tasks --prompts",
    ),
    flag("--templates", metavar="FILE", help="prompts, one a line with {c} for the class, instead of the data set's"),
    shared(Model, required=["model"]),
    shared(Data, "skip_damaged"),
    shared(Compute, "device", "precision", "batch_size", "workers"),
    shared(Output, "output", "save_features", required=["output"], help={"output": "file for the weights, NAME.json"}),
    more=BY_PROMPTS,
    retired={"dataset": "use --data"},
)
def run_fit(args: argparse.Namespace) -> None:
    """Fit weights of prompts to images."""
    from prolip.data.reading.tables.csv import show_counts
    from prolip.evaluation.cache import FeatureStore
    from prolip.evaluation.prompts import fit_prompts
    from prolip.prompts.templates import PromptRule, class_prompts
    from prolip.utils.documents import CONFIG_BYTES, entries, text_of

    show_counts()
    rule = PromptRule.parse(args.rule)
    if rule.fit is None:
        raise ValueError(f"--rule {args.rule} has no weights to fit: give bprw or bprw:K")
    if not args.output.endswith(".json"):
        raise ValueError(f"--output {args.output}: give a name that ends in .json, by which --prompts knows a file")
    check(args)
    templates = entries(text_of(args.templates, CONFIG_BYTES), args.templates) if args.templates else ()
    if args.templates and not templates:
        raise ValueError(
            f"--templates {args.templates} holds no prompt: write one a line, with {{c}} where the class goes"
        )
    class_prompts(["class"], templates or ["{c}"])
    dataset = open_named("--data", args.data, args.split, args.skip_damaged, CLASSES)
    found = fit_prompts(
        dataset,
        load(args),
        rule.fit,
        templates,
        store=FeatureStore(args.save_features),
        batch_size=args.batch_size,
        workers=args.workers,
        progress=sys.stderr.isatty(),
    )
    found.save(args.output)
    print(f"{found}: {len(found.classnames)} classes, {len(found.templates)} prompts; written to {args.output}")


@command(
    "prolip prompts show weights.json",
    flag("file", metavar="FILE.json", help="weights that prolip prompts fit wrote"),
    flag(
        "--top",
        type=int,
        default=3,
        least=1,
        metavar="N",
        help="show N prompts at either end of each class (default: 3)",
    ),
    shared(Output, "output", help={"output": "folder for weights.png, .pdf and .svg: largest weights, entropies"}),
    retired={"most": "use --top", "figures": "use --output"},
)
def run_show(args: argparse.Namespace) -> None:
    """List the most and least weighted prompts, draw histograms."""
    from prolip.prompts.weights import PromptWeights
    from prolip.utils import console

    check(args, folder=True)
    found = PromptWeights.load(args.file)
    from prolip.prompts.figures import listing, write_weights  # after the file is read: matplotlib takes a second

    print("\n".join(map(console.plain, listing(found, args.top))))
    if args.output:
        print(f"drawn: {', '.join(map(str, write_weights(found, args.output)))}")


# --- hierarchy --------------------------------------------------------------------------------------------------------
ONE_MODEL = shared(Model, required=["model"]), shared(Compute, "device", "precision")
#: Several models, computed one after the other.
MODELS = (
    flag(
        "--model",
        action="append",
        required=True,
        metavar="STR",
        help="local-dir:FOLDER, hf-hub:ORG/NAME, or a name; once for each model",
    ),
    shared(
        Model,
        "pretrained",
        "tokenizer",
        help={"pretrained": "weights file, OpenCLIP's tag, or random for untrained weights; of all models"},
    ),
)


def inclusion_by(what: str) -> Flags:
    """The measure of inclusion."""
    text = f"measure by which {what}, or {OWN}: the model's score (default: {INCLUSIONS[0]})"
    return flag("--inclusion", default=INCLUSIONS[0], choices=(*INCLUSIONS, OWN), help=text)


#: How to traverse.
TRAVERSAL = (
    flag(
        "--steps",
        type=int,
        default=STEPS,
        least=2,
        metavar="N",
        help=f"steps from the caption to the root (default: {STEPS})",
    ),
    inclusion_by("a caption includes an image most"),
)


def inclusion_of(args: argparse.Namespace, embedder: Embedder) -> str | Pairwise:
    """A measure by its name, or the model's score."""
    return embedder.score.pairwise if args.inclusion == OWN else args.inclusion


def keep(path: str | None, values: Any) -> None:
    """Write JSON where there is a place for it."""
    if path:
        with replacing(Path(path)) as temporary:
            temporary.write_text(json.dumps(values, indent=1), encoding="utf-8")


@command(
    f"prolip hierarchy entailment {CORPUS}",
    *DRAWINGS,
    flag(
        "--max-pairs", type=int, default=5000, least=1, metavar="N", help="true pairs of each relation (default: 5000)"
    ),
    flag(
        "--intervals",
        type=int,
        default=500,
        least=2,
        metavar="DRAWS",
        help="95%% intervals by bootstrap (default: 500 draws)",
    ),
    *MODELS,
    shared(Compute, "device", "precision", "seed"),
    shared(Output, "output", help={"output": "JSON file for all metrics"}),
    retired={"pairs": "use --max-pairs", "draws": "use --intervals"},
)
def run_entailment(args: argparse.Namespace) -> None:
    """Measure how well scores tell what is a kind of what (AUC)."""
    check(args)
    from prolip.hierarchy import entailment

    corpus = corpus_of(args)
    pairs = entailment.relations(corpus, corpus.caption_table(), args.max_pairs, args.seed)
    results = [entailment.evaluate_entailment(load(args, model), corpus, pairs, args.intervals) for model in args.model]
    keep(args.output, entailment.as_json(results, pairs))
    print(entailment.format_entailment(results, pairs, args.intervals))


@command(
    f"prolip hierarchy traverse {CORPUS}",
    *DRAWINGS,
    *TRAVERSAL,
    flag("--root", default=ROOTS[0], choices=ROOTS, help="end in the most inclusive caption, or in the empty text"),
    flag("--top", type=int, default=10, least=1, metavar="N", help="traverse from the first N drawings (default: 10)"),
    *ONE_MODEL,
    retired={"images": "use --top"},
)
def run_traverse(args: argparse.Namespace) -> None:
    """List the captions met on the way from an image to its root."""
    check(args)
    from prolip.corpora.emoji.corpus import Corpus
    from prolip.corpora.emoji.evaluate import embed_drawings
    from prolip.hierarchy.traversal import format_paths, traverse

    corpus = corpus_of(args)
    shown = Corpus(corpus.concepts, corpus.drawings[: args.top])
    embedder, texts = load(args), corpus.caption_table().texts
    image, text = embed_drawings(shown, embedder)[0], embedder.embed_texts(texts)
    found = traverse(image, text, embedder.embed_texts([""]), args.root, args.steps, inclusion_of(args, embedder))
    names = [corpus.concepts[drawing.concept].name for drawing in shown.drawings]
    print(format_paths(names, texts, found))
    if args.root == "included":
        roots = (texts[i] for i in found.root_caption.tolist())
        print("\n".join(["", *(f"{name:<40}  [ROOT] {root}" for name, root in zip(names, roots))]))


@command(
    f"prolip hierarchy hierarcaps {MODEL} --captions hierarcaps_test.csv --images val2014",
    flag("--captions", required=True, metavar="CSV", help="id,captions,image_url, such as hierarcaps_test.csv"),
    flag("--images", required=True, metavar="FOLDER", help="COCO's val2014"),
    *TRAVERSAL,
    *MODELS,
    shared(Compute, "device", "precision"),
    shared(Output, "output", help={"output": "JSON file for the metrics"}),
)
def run_hierarcaps(args: argparse.Namespace) -> None:
    """Evaluate HierarCaps by both published protocols."""
    check(args)
    from prolip.hierarchy.entailment import short
    from prolip.hierarchy.hierarcaps import evaluate_hierarcaps, format_metrics, read_hierarcaps

    data = read_hierarcaps(args.captions)
    files, named = data.files(args.images), []
    for model in args.model:
        embedder = load(args, model)
        inclusion = inclusion_of(args, embedder)
        found = evaluate_hierarcaps(data, files, embedder, args.steps, inclusion, sys.stderr.isatty())
        named += [(f"{short(embedder.name)[-16:]} {root}", metrics) for root, metrics in found.items()]
    keep(args.output, dict(named))
    print(f"{len(data.chains):,} rows, {len(files):,} images, {len(data.texts):,} captions, {data.levels} levels")
    print(format_metrics(named))


@command(
    "prolip hierarchy hierarimgs --instances instances_val2017.json --images val2017 --output hierarimgs",
    flag("--instances", required=True, metavar="FILE", help="COCO's instances_val2017.json"),
    flag("--images", required=True, metavar="FOLDER", help="COCO's val2017"),
    flag(
        "--least",
        type=int,
        default=LEAST,
        least=0,
        metavar="PIXELS",
        help=f"size that segments exceed (default: {LEAST})",
    ),
    flag("--top", type=int, least=1, metavar="N", help="build only the first N images"),
    shared(
        Output, "output", required=["output"], help={"output": "folder of images at levels; a former one is replaced"}
    ),
    retired={"most": "use --top"},
)
def run_hierarimgs(args: argparse.Namespace) -> None:
    """Build HierarImgs from COCO's segments."""
    check(args, folder=True)
    from prolip.hierarchy.hierarimgs import SEGMENTS, build

    count = build(args.instances, args.images, args.output, args.least, args.top)
    print(f"{count:,} images at {SEGMENTS + 1} levels, below {args.output}")


@command(
    f"prolip hierarchy levels {MODEL} --images hierarimgs --output figures",
    flag("--images", metavar="FOLDER", help="images at levels that prolip hierarchy hierarimgs wrote"),
    flag("--captions", metavar="CSV", help="texts at levels: HierarCaps' CSV"),
    *ONE_MODEL,
    shared(Output, "output", required=["output"], help={"output": "folder for the figures, PNG and SVG"}),
    retired={"levels": "use --images"},
)
def run_levels(args: argparse.Namespace) -> None:
    """Draw traces and inclusion by level."""
    check(args, folder=True)
    if not args.images and not args.captions:
        raise ValueError("give --images with images at levels, or --captions with HierarCaps' CSV, or both")
    import torch

    from prolip.hierarchy.hierarcaps import read_hierarcaps
    from prolip.hierarchy.hierarimgs import read_levels
    from prolip.hierarchy.levels import embed_files

    files = list(zip(*read_levels(args.images))) if args.images else []
    data = read_hierarcaps(args.captions) if args.captions else None
    embedder = load(args)
    if not embedder.probabilistic:
        raise ValueError(f"{embedder.name} has no variances, and traces and inclusion are of them: give another model")
    from prolip.hierarchy.figures import write_levels

    if files:
        images = [embed_files(embedder, paths, sys.stderr.isatty()) for paths in files]
        print(write_levels(embedder.score, images, "image", args.output))
    if data is not None:
        text = embedder.embed_texts(data.texts)
        texts = [text.select(torch.from_numpy(rows)) for rows in data.rows.T]
        print(write_levels(embedder.score, texts, "text", args.output))
    print(f"figures written to {args.output}")


COMMANDS = {
    "prompts": {"fit": run_fit, "show": run_show},
    "hierarchy": {
        "entailment": run_entailment,
        "traverse": run_traverse,
        "hierarcaps": run_hierarcaps,
        "hierarimgs": run_hierarimgs,
        "levels": run_levels,
    },
}
