"""What is a kind of what, in the eyes of a model.

    python -m prolip.hierarchy entailment --model local-dir:runs/demo/model --model local-dir:runs/paper/model \\
        --data data/emoji/emojione.tar --names data/emoji/noto.tar
    python -m prolip.hierarchy traverse --model local-dir:runs/demo/model --data data/emoji/emojione.tar --images 8
    python -m prolip.hierarchy hierarcaps --model local-dir:runs/demo/model --captions hierarcaps_test.csv \\
        --images val2014
    python -m prolip.hierarchy hierarimgs --instances instances_val2017.json --images val2017 --out hierarimgs
    python -m prolip.hierarchy levels --model local-dir:runs/demo/model --levels hierarimgs --out figures
    python -m prolip.hierarchy ambiguity --model local-dir:runs/demo/model --data data/emoji/emojione.tar --out figures
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from prolip.data.emoji import Corpus
from prolip.evaluation.loading import load_embedder
from prolip.evaluation.model import PRECISIONS, Embedder, check_device
from prolip.evaluation.suites.emoji import gallery
from prolip.evaluation.suites.emoji.evaluate import embed_drawings
from prolip.hierarchy import ambiguity, entailment, figures, hierarcaps, hierarimgs, levels
from prolip.hierarchy.traversal import INCLUSIONS, ROOTS, STEPS, Pairwise, format_paths, traverse
from prolip.models.weights.checkpoint import CheckpointError
from prolip.utils import console
from prolip.utils.messages import at_least
from prolip.utils.outputs import check_output, replacing
from prolip.utils.style import write

Add = Callable[..., Any]
#: The score of the model's method, in place of a measure of inclusion.
OWN = "own"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m prolip.hierarchy", description=__doc__, formatter_class=form)
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK")

    add = tasks.add_parser("entailment", help="AUC of every score for what is a kind of what").add_argument
    _model(add, several=True)
    _corpus(add)
    add("--pairs", type=int, default=5000, help="at most so many true pairs of each relation (default: 5000)")
    add("--draws", type=int, default=500, help="of the bootstrap (default: 500)")
    add("--seed", type=int, default=0, help="of pairs and negatives")
    add("--out", metavar="FILE", help="all figures as JSON")

    add = tasks.add_parser("traverse", help="captions met from an image to its root").add_argument
    _model(add, several=False)
    _corpus(add)
    _traversal(add)
    add("--root", default="included", choices=ROOTS)
    add("--images", type=int, default=10, help="traverse from the first so many drawings (default: 10)")

    add = tasks.add_parser("hierarcaps", help="HierarCaps by both published protocols").add_argument
    _model(add, several=True)
    add("--captions", required=True, metavar="CSV", help="id,captions,image_url, such as hierarcaps_test.csv")
    add("--images", required=True, metavar="FOLDER", help="COCO's val2014")
    _traversal(add)
    add("--out", metavar="FILE", help="the metrics as JSON")

    add = tasks.add_parser("hierarimgs", help="build HierarImgs from COCO's segments").add_argument
    add("--instances", required=True, metavar="JSON", help="instances_val2017.json")
    add("--images", required=True, metavar="FOLDER", help="val2017")
    add("--out", required=True, metavar="FOLDER")
    add("--least", type=int, default=hierarimgs.LEAST, help="pixels that every segment exceeds (default: 5000)")
    add("--most", type=int, help="only so many images")

    add = tasks.add_parser("levels", help="traces and inclusion by level, with figures").add_argument
    _model(add, several=False)
    add("--levels", metavar="FOLDER", help="images at levels, as `hierarimgs` writes them")
    add("--captions", metavar="CSV", help="texts at levels: HierarCaps' CSV")
    add("--out", required=True, metavar="FOLDER", help="for the figures, PNG and SVG")

    add = tasks.add_parser("ambiguity", help="erase, mix, drop words: PCME's studies, with a figure").add_argument
    _model(add, several=True)
    _corpus(add)
    add("--inputs", type=int, default=256, help="drawings, and captions, that are changed (default: 256)")
    add("--seed", type=int, default=0)
    add("--out", required=True, metavar="FOLDER", help="for the figure, PNG and SVG")
    return parser.parse_args(arguments)


def _model(add: Add, several: bool) -> None:
    more = {"action": "append"} if several else {}
    add("--model", required=True, **more, help="local-dir:FOLDER, hf-hub:NAME, or a name of ours or OpenCLIP's"
        + ("; once for each model" if several else ""))  # fmt: skip
    add("--pretrained", help="weights file or OpenCLIP's tag" + (", of all of them" if several else ""))
    add("--tokenizer", help="another tokenizer than the model's")
    add("--device", default="cpu")
    add("--precision", default="fp32", choices=PRECISIONS)


def _corpus(add: Add) -> None:
    add("--data", nargs="+", required=True, metavar="TAR", help="shards whose drawings are used")
    add("--select", help="which concepts, e.g. 'group=animals nature|food drink'")
    add("--names", nargs="+", metavar="TAR", help="shards whose concepts have texts, too")
    add("--all-names", action="store_true", help="--select does not narrow these")


def _traversal(add: Add) -> None:
    add("--steps", type=int, default=STEPS, help=f"from the caption to the root (default: {STEPS})")
    add("--inclusion", default="log_inclusion", choices=(*INCLUSIONS, OWN),
        help=f"by which a caption includes an image most; {OWN}: the model's own score")  # fmt: skip


def load(args: argparse.Namespace, model: str) -> Embedder:
    return load_embedder(model, args.pretrained, args.device, args.precision, args.tokenizer, stored=False)


def inclusion_of(args: argparse.Namespace, embedder: Embedder) -> str | Pairwise:
    return embedder.score.pairwise if args.inclusion == OWN else args.inclusion


def corpus_of(args: argparse.Namespace) -> Corpus:
    return gallery(args.data, args.select, args.names, args.all_names)


def save(path: str | None, values: Any) -> None:
    if path:
        with replacing(Path(path)) as temporary:
            temporary.write_text(json.dumps(values, indent=1), encoding="utf-8")


def run_entailment(args: argparse.Namespace) -> str:
    corpus = corpus_of(args)
    pairs = entailment.relations(corpus, corpus.caption_table(), args.pairs, args.seed)
    results = [
        entailment.evaluate_entailment(load(args, model), corpus, pairs, args.draws) for model in args.model
    ]
    save(args.out, entailment.as_json(results, pairs))
    return entailment.format_entailment(results, pairs, args.draws)


def run_traverse(args: argparse.Namespace) -> str:
    corpus = corpus_of(args)
    shown = Corpus(corpus.concepts, corpus.drawings[: args.images])
    embedder, texts = load(args, args.model), corpus.caption_table().texts
    image, text = embed_drawings(shown, embedder)[0], embedder.embed_texts(texts)
    found = traverse(image, text, embedder.embed_texts([""]), args.root, args.steps, inclusion_of(args, embedder))
    names = [corpus.concepts[drawing.concept].name for drawing in shown.drawings]
    lines = [format_paths(names, texts, found)]
    if args.root == "included":
        roots = (texts[i] for i in found.root_caption.tolist())
        lines += ["", *(f"{name:<40}  [ROOT] {root}" for name, root in zip(names, roots))]
    return "\n".join(lines)


def run_hierarcaps(args: argparse.Namespace) -> str:
    data = hierarcaps.read_hierarcaps(args.captions)
    files, named = data.files(args.images), []
    for model in args.model:
        embedder = load(args, model)
        image = levels.embed_files(embedder, files, sys.stderr.isatty())
        text, empty = embedder.embed_texts(data.texts), embedder.embed_texts([""])
        for root in ROOTS if embedder.probabilistic else ("empty",):
            found = traverse(image, text, empty, root, args.steps, inclusion_of(args, embedder))
            metrics = hierarcaps.paper_metrics(data, found)
            if root == "empty":
                metrics |= hierarcaps.benchmark_metrics(data, image, text, empty, args.steps)
            named.append((f"{entailment.short(embedder.name)[-16:]} {root}", metrics))
    save(args.out, dict(named))
    head = f"{len(data.chains):,} rows, {len(files):,} images, {len(data.texts):,} captions, {data.levels} levels"
    return f"{head}\n{hierarcaps.format_metrics(named)}"


def run_hierarimgs(args: argparse.Namespace) -> str:
    count = hierarimgs.build(args.instances, args.images, args.out, args.least, args.most)
    return f"{count:,} images at {hierarimgs.SEGMENTS + 1} levels, below {args.out}"


def run_levels(args: argparse.Namespace) -> str:
    if not args.levels and not args.captions:
        raise ValueError("give --levels with images at levels, or --captions with HierarCaps' CSV, or both")
    files = list(zip(*hierarimgs.read_levels(args.levels))) if args.levels else []
    data = hierarcaps.read_hierarcaps(args.captions) if args.captions else None
    embedder, lines = load(args, args.model), []
    if not embedder.probabilistic:
        raise ValueError(f"{embedder.name} has no variances, and traces and inclusion are of them: give another model")
    if files:
        z = [levels.embed_files(embedder, paths, sys.stderr.isatty()) for paths in files]
        traces = levels.traces_by_level([embedder.score.uncertainty(x).numpy() for x in z])
        inclusions = levels.inclusion_by_level(z)
        lines.append(levels.format_levels(inclusions, traces, "images"))
        write(figures.trace_by_level(traces, "images"), args.out, "image_traces")
        write(figures.trace_differences(traces, "images"), args.out, "image_differences")
        write(figures.inclusion_by_level(inclusions), args.out, "image_inclusion")
    if data is not None:
        text = embedder.embed_texts(data.texts)
        traces = levels.traces_by_level(list(embedder.score.uncertainty(text).numpy()[data.rows.T]))
        inclusions = levels.inclusion_by_level([text.select(torch.from_numpy(rows)) for rows in data.rows.T])
        lines.append(levels.format_levels(inclusions, traces, "texts"))
        write(figures.trace_by_level(traces, "texts"), args.out, "text_traces")
        write(figures.inclusion_by_level(inclusions), args.out, "text_inclusion")
    return "\n".join([*lines, f"figures written to {args.out}"])


def run_ambiguity(args: argparse.Namespace) -> str:
    corpus, named, lines = corpus_of(args), {}, []
    for model in args.model:
        embedder = load(args, model)
        if not embedder.probabilistic:
            raise ValueError(f"{embedder.name} has no variances, and the studies are of them: give another model")
        studies = [*ambiguity.study_images(embedder, corpus, args.inputs, args.seed).values(),
                   ambiguity.study_texts(embedder, corpus, args.inputs, args.seed)]  # fmt: skip
        named[entailment.short(embedder.name)] = studies
        lines += [embedder.name, *map(ambiguity.format_study, studies), ""]
    written = write(figures.ambiguity(named), args.out, "ambiguity")
    return "\n".join([*lines, f"written to {', '.join(map(str, written))}"])


TASKS = {
    "entailment": run_entailment, "traverse": run_traverse, "hierarcaps": run_hierarcaps,
    "hierarimgs": run_hierarimgs, "levels": run_levels, "ambiguity": run_ambiguity,
}  # fmt: skip
#: Whose --out is a folder.
FOLDERS = ("hierarimgs", "levels", "ambiguity")


@console.ends_in_one_line(OSError, ValueError, ImportError, CheckpointError)
def main(arguments: Sequence[str] | None = None) -> int:
    """The command: what the user can mend ends in one line and exit code 2."""
    args = parse(arguments)
    at_least(args, 2, "draws", "steps")
    at_least(args, 1, "pairs", "images", "inputs", "most")
    at_least(args, 0, "seed", "least")
    if getattr(args, "out", None):
        check_output(args.out, folder=args.task in FOLDERS)
    if hasattr(args, "device"):
        check_device(args.device)
    print(TASKS[args.task](args))
    return 0


def script() -> NoReturn:
    """`main` as a process of its own, whose output may die."""
    console.command(main)


if __name__ == "__main__":
    script()
