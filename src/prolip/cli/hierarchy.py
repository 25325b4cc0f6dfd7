"""`prolip hierarchy`: hierarchies of texts and images."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prolip.cli.command import MODEL, Compute, Flags, Model, check, command, flag, load, output, shared
from prolip.cli.eval import DRAWINGS, corpus_of
from prolip.hierarchy import INCLUSIONS, LEAST, OWN, ROOTS, STEPS
from prolip.utils.outputs import replacing

if TYPE_CHECKING:
    from prolip.embedder import Embedder
    from prolip.hierarchy.traversal import Pairwise

DEMO = "--model local-dir:runs/demo/model"
CORPUS = f"{DEMO} --data data/emoji/emojione.tar"
COMPUTE = shared(Compute, "device", "precision")
#: Several models, evaluated one after the other.
MODELS = (
    flag("--model", "local-dir:FOLDER, hf-hub:ORG/NAME, or a name; repeatable", action="append", required=True),
    shared(Model, "pretrained", "tokenizer"),
)


def inclusion_by(use: str) -> Flags:
    """Return the flag of the inclusion measure."""
    text = f"measure of inclusion, for {use}: {', '.join(INCLUSIONS)}, or {OWN} for the model's score"
    return flag("--inclusion", text, default=INCLUSIONS[0], choices=(*INCLUSIONS, OWN), metavar="MEASURE")


#: Flags of a traversal.
TRAVERSAL = (
    flag("--steps", "steps from the caption to the root", default=STEPS, least=2),
    inclusion_by("the caption that most includes an image"),
)


def inclusion_of(args: argparse.Namespace, embedder: Embedder) -> str | Pairwise:
    """Return the name of a measure, or the model's score."""
    return embedder.score.pairwise if args.inclusion == OWN else args.inclusion


def keep(path: str | None, values: Any) -> None:
    """Write JSON to `path`, if given."""
    if path:
        with replacing(Path(path)) as temporary:
            temporary.write_text(json.dumps(values, indent=1), encoding="utf-8")


@command(
    "hierarchy entailment",
    f"{CORPUS}",
    *DRAWINGS,
    flag("--max-pairs", "true pairs per relation", default=5000, least=1),
    flag("--intervals", "draws of 95%% bootstrap intervals", default=500, least=2, metavar="DRAWS"),
    *MODELS,
    shared(Compute, "device", "precision", "seed"),
    output("JSON file for all metrics", required=False),
)
def run_entailment(args: argparse.Namespace) -> None:
    """Measure how well scores rank true kind-of pairs above others (AUC)."""
    check(args)
    from prolip.corpora.emoji import kinds
    from prolip.hierarchy import entailment

    corpus = corpus_of(args)
    pairs = kinds.relations(corpus, corpus.caption_table(), args.max_pairs, args.seed)
    results = [kinds.evaluate_entailment(load(args, model), corpus, pairs, args.intervals) for model in args.model]
    used = {name: {"used": len(x), "found": x.found, "with_sibling": x.with_sibling} for name, x in pairs.items()}
    models = []
    for result in results:
        auc = {"/".join(key): list(value) for key, value in result.auc.items()}
        by_level = {"/".join(key): value for key, value in result.by_level.items()}
        models.append({"model": result.model, "auc": auc, "by_level": by_level})
    keep(args.output, {"pairs": used, "models": models})
    print(entailment.format_entailment(results, pairs, args.intervals))


@command(
    "hierarchy traverse",
    f"{CORPUS}",
    *DRAWINGS,
    *TRAVERSAL,
    flag("--root", "end at the most inclusive caption, or at the empty text", default=ROOTS[0], choices=ROOTS),
    flag("--top", "start from the first N drawings", default=10, least=1),
    MODEL,
    COMPUTE,
)
def run_traverse(args: argparse.Namespace) -> None:
    """List the captions on the path from an image to its root."""
    check(args)
    from prolip.corpora.emoji.corpus import Corpus
    from prolip.corpora.emoji.evaluate import embed_drawings
    from prolip.hierarchy.traversal import traverse

    corpus = corpus_of(args)
    shown = Corpus(corpus.concepts, corpus.drawings[: args.top])
    embedder, texts = load(args), corpus.caption_table().texts
    image, text = embed_drawings(shown, embedder)[0], embedder.embed_texts(texts)
    found = traverse(image, text, embedder.embed_texts([""]), args.root, args.steps, inclusion_of(args, embedder))
    names = [corpus.concepts[drawing.concept].name for drawing in shown.drawings]
    for row, name in enumerate(names):
        path = (texts[i] or '""' for i in found.path(row))
        print(f"{name[:40]:<40}  {' → '.join(path)}")
    if args.root == "included":
        roots = (texts[i] for i in found.root_caption.tolist())
        print("\n".join(["", *(f"{name:<40}  [ROOT] {root}" for name, root in zip(names, roots))]))


@command(
    "hierarchy hierarcaps",
    f"{DEMO} --captions hierarcaps_test.csv --images val2014",
    flag("--captions", "CSV with id,captions,image_url, such as hierarcaps_test.csv", required=True, metavar="CSV"),
    flag("--images", "COCO's folder val2014", required=True, metavar="FOLDER"),
    *TRAVERSAL,
    *MODELS,
    COMPUTE,
    output("JSON file for the metrics", required=False),
)
def run_hierarcaps(args: argparse.Namespace) -> None:
    """Evaluate on HierarCaps with both published protocols."""
    check(args)
    from prolip.evaluation.table import aligned
    from prolip.hierarchy.entailment import short
    from prolip.hierarchy.hierarcaps import benchmark_metrics, embed_files, paper_metrics, read_hierarcaps
    from prolip.hierarchy.traversal import traverse

    data = read_hierarcaps(args.captions)
    files, named = data.files(args.images), []
    for model in args.model:
        embedder = load(args, model)
        image, steps = embed_files(embedder, files, sys.stderr.isatty()), args.steps
        text, empty, inclusion = (
            embedder.embed_texts(data.texts),
            embedder.embed_texts([""]),
            inclusion_of(args, embedder),
        )
        for root in ROOTS if embedder.probabilistic else ("empty",):
            metrics = paper_metrics(data, traverse(image, text, empty, root, steps, inclusion))
            metrics |= benchmark_metrics(data, image, text, empty, steps) if root == "empty" else {}
            named.append((f"{short(embedder.name)[-16:]} {root}", metrics))
    keep(args.output, dict(named))
    print(
        f"{len(data.chains):,} rows, {len(files):,} images, {len(data.texts):,} captions, {len(data.chains[0])} levels"
    )
    keys = dict.fromkeys(key for _, metrics in named for key in metrics)
    cells = [(key, [f"{metrics[key]:.4f}" if key in metrics else "-" for _, metrics in named]) for key in keys]
    print("\n".join(aligned([name for name, _ in named], cells, 24)))


@command(
    "hierarchy hierarimgs",
    "--instances instances_val2017.json --images val2017 --output hierarimgs",
    flag("--instances", "COCO's file instances_val2017.json", required=True, metavar="FILE"),
    flag("--images", "COCO's folder val2017", required=True, metavar="FOLDER"),
    flag("--least", "smallest size of a segment", default=LEAST, least=0, metavar="PIXELS"),
    flag("--top", "build only the first N images", least=1),
    output("folder for images by level; overwrites an existing one"),
)
def run_hierarimgs(args: argparse.Namespace) -> None:
    """Build HierarImgs from COCO's segments."""
    check(args, folder=True)
    from prolip.hierarchy.hierarimgs import SEGMENTS, build

    count = build(args.instances, args.images, args.output, args.least, args.top)
    print(f"{count:,} images at {SEGMENTS + 1} levels in {args.output}")


@command(
    "hierarchy levels",
    f"{DEMO} --images hierarimgs --output figures",
    flag("--images", "images by level from prolip hierarchy hierarimgs", metavar="FOLDER"),
    flag("--captions", "texts by level: HierarCaps' CSV", metavar="CSV"),
    MODEL,
    COMPUTE,
    output("folder for the figures, PNG and SVG"),
)
def run_levels(args: argparse.Namespace) -> None:
    """Plot traces and inclusion by level."""
    check(args, folder=True)
    if not args.images and not args.captions:
        raise ValueError("no input: give --images with images by level, --captions with HierarCaps' CSV, or both")
    import torch

    from prolip.hierarchy.hierarcaps import embed_files, read_hierarcaps
    from prolip.hierarchy.hierarimgs import read_levels

    files = list(zip(*read_levels(args.images))) if args.images else []
    data = read_hierarcaps(args.captions) if args.captions else None
    embedder = load(args)
    if not embedder.probabilistic:
        raise ValueError(f"{embedder.name} is deterministic: traces and inclusion need a probabilistic model")
    from prolip.hierarchy.levels import write_levels

    if files:
        images = [embed_files(embedder, paths, sys.stderr.isatty()) for paths in files]
        print(write_levels(embedder.score, images, "image", args.output))
    if data is not None:
        text = embedder.embed_texts(data.texts)
        texts = [text.select(torch.from_numpy(rows)) for rows in data.rows.T]
        print(write_levels(embedder.score, texts, "text", args.output))
    print(f"figures written to {args.output}")
