"""Evaluation on the emoji corpus: retrieval with complete labels, zero-shot subgroups, uncertainty.

    python -m prolip.evaluation.corpus --model local-dir:runs/demo/model \\
        --data data/emoji/emojione.tar --names data/emoji/noto.tar --out runs/demo/eval

Two galleries. `names/...`: which name is it? Names only, one right answer per drawing, the figure to quote.
`captions/...`: every text of every level, and a text is right for every drawing of every concept that carries it; mAP@R
and R-Precision are made for this one.
"""
from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from prolip.data import emoji
from prolip.data.emoji import LEVELS, Corpus
from prolip.evaluation import uncertainty, zero_shot
from prolip.evaluation.embed import (
    PRECISIONS,
    PointModel,
    Similarity,
    choose_score,
    embed_images,
    embed_texts,
    is_probabilistic,
    score_of,
    similarity_scores,
    token_lengths,
)
from prolip.evaluation.metrics import ranking as metrics
from prolip.evaluation.metrics.ranking import Ranking
from prolip.evaluation.result import Result, load
from prolip.methods import find_score
from prolip.models.weights.checkpoint import CheckpointError
from prolip.utils import console
from prolip.utils.messages import naming
from prolip.utils.outputs import check_output

__all__ = ["Result", "evaluate", "load"]


def evaluate(
    model: nn.Module,
    tokenizer: Callable,
    preprocess: Callable,
    shards: Corpus | str | Path | Sequence[str | Path],
    select: str | None = None,
    device: torch.device | str = "cpu",
    precision: str = "fp32",
    similarity: Similarity = None,
) -> Result:
    """Embed the drawings and all captions of a corpus and compute every figure.

    model: on `device`, `encode_image` and `encode_text` -> Gaussian; shards: a Corpus or what `emoji.read` takes (a
    Corpus may hold concepts without drawings, `Corpus.with_concepts`: a wider gallery); select: a rule of
    `Corpus.select`; similarity: as in `similarity_scores`, default: the score of the model's method. Keys of
    `metrics`: names/..., captions/..., zero_shot/... and, where variances mean something, trace/..., spearman/...,
    inclusion/..., recall_by_trace/...; shares in [0, 1].
    """
    started = time.perf_counter()
    own, probabilistic = score_of(model), is_probabilistic(model)
    score = choose_score(similarity, own, probabilistic, "the model")
    corpus = shards if isinstance(shards, Corpus) else emoji.read(shards)
    if select:
        corpus = corpus.select(select)
    if not corpus.drawings:
        raise ValueError(f"the rule {select!r} leaves no drawing of these shards: choose concepts that they show")
    table = corpus.caption_table()
    run: dict[str, Any] = {"device": device, "precision": precision}
    facts = describe(model)
    model = model if probabilistic else PointModel(model)
    image = embed_images(model, (drawing.image() for drawing in corpus.drawings), preprocess, **run)
    text = embed_texts(model, tokenizer, table.texts, **run)
    info: dict[str, Any] = {
        "similarity": score.name, "score": score.to_dict(), "probabilistic": probabilistic, "precision": precision,
        "device": str(device), "select": select,
    }  # fmt: skip
    result = Result(corpus, image, text, token_lengths(tokenizer, table.texts).numpy(), {}, info | facts)
    result.metrics |= retrieval_figures(result)
    for level in ("subgroup", "group"):
        result.metrics |= zero_shot_figures(model, tokenizer, result, level, **run)
    if probabilistic:
        result.metrics |= uncertainty.figures(image, text, corpus, result.table, result.token_lengths)
    result.info |= {"images": len(corpus.drawings), "concepts": len(corpus.concepts), "texts": len(table.texts)}
    result.info["styles"] = sorted({drawing.style for drawing in corpus.drawings})
    result.info["seconds"] = round(time.perf_counter() - started, 2)
    return result


def retrieval_figures(result: Result) -> dict[str, float]:
    """`names/...`, `captions/...` and `recall_by_trace/...`."""
    names, captions = result.names_ranking, result.captions_ranking
    out = {f"names/{key}": value for key, value in metrics.both_directions(*names).items()}
    out |= {f"captions/{key}": value for key, value in metrics.both_directions(*captions).items()}
    sizes = {"names": len(result.corpus.concepts), "captions": len(result.table.texts)}
    for gallery, (i2t, t2i) in (("names", names), ("captions", captions)):
        for way, ranking, size in (("i2t", i2t, sizes[gallery]), ("t2i", t2i, len(result.corpus.drawings))):
            for k in (k for k in metrics.KS if k <= size):
                out[f"{gallery}/{way}/chance_R@{k}"] = metrics.chance_recall(ranking.matches, size, k)
    for level in LEVELS:
        rows = torch.from_numpy(result.table.text[result.table.rows(level)])
        of_level = metrics.summarise(Ranking(*(x[rows] for x in captions[1])))
        out |= {f"captions/t2i/{level}/{key}": of_level[key] for key in ("R@1", "mAP@R", "R-Precision")}
    for name, deciles in recall_by_trace(result).items() if result.probabilistic else ():
        out[f"recall_by_trace/{name}/spearman_deciles"] = deciles.spearman_bins
        out[f"recall_by_trace/{name}/spearman_queries"] = deciles.spearman_queries
    return out


def recall_by_trace(result: Result) -> dict[str, uncertainty.Deciles]:
    """Retrieval of queries in deciles of their own trace: R@1 against names, and AP@R in the full caption gallery.

    All texts mix levels, whose difficulty differs, so `keywords_t2i` looks at the keywords alone.
    """
    image, text = result.image.trace.numpy(), result.text.trace.numpy()
    names, captions = result.names_ranking, result.captions_ranking
    keywords = result.table.text[result.table.rows("keyword")]
    cases = {
        "names_i2t": (image, names[0].hit(1), names[0].answerable),
        "names_t2i": (text[result.name_texts], names[1].hit(1), names[1].answerable),
        "captions_i2t": (image, captions[0].ap_at_r, captions[0].answerable),
        "captions_t2i": (text, captions[1].ap_at_r, captions[1].answerable),
        "keywords_t2i": (text[keywords], captions[1].ap_at_r[keywords], captions[1].answerable[keywords]),
    }
    out = {}
    for name, (trace, value, kept) in cases.items():
        chosen = kept.numpy()
        out[name] = uncertainty.by_decile(trace[chosen], value.double().numpy()[chosen])
    return out


def zero_shot_figures(model: nn.Module, tokenizer: Callable, result: Result, level: str, **run) -> dict[str, float]:
    """Zero-shot classification of the drawings by `level`, three ways of building a class from Gaussians.

    `zero_shot/<level>`: prompt templates filled with the class's own name (the usual reading); `..._plain`: its bare
    name; `..._members`: the mixture over the bare names of the concepts that belong to it.
    """
    concepts = result.corpus.concepts
    classes = sorted({getattr(concept, level) for concept in concepts})
    labels = np.array([classes.index(getattr(concept, level)) for concept in concepts])
    text_of = {text: i for i, text in enumerate(result.table.texts)}
    members = [result.name_texts[labels == c] for c in range(len(classes))]
    z = {
        level: zero_shot.class_gaussians(model, tokenizer, [[name] for name in classes], **run),
        f"{level}_plain": result.text.select([text_of[name] for name in classes]),
        f"{level}_members": zero_shot.mix_groups(
            result.text.select(np.concatenate(members)), [len(rows) for rows in members]
        ),
    }
    truth = torch.from_numpy(labels[result.corpus.drawing_concepts])
    out: dict[str, float] = {}
    for name, gaussians in z.items():
        scores = similarity_scores(result.image, gaussians, result.score)
        out |= {f"zero_shot/{name}/{key}": value for key, value in zero_shot.classification(scores, truth).items()}
    return out


def describe(model: nn.Module) -> dict[str, Any]:
    """What a reader of the figures asks about the model and the machine."""
    out: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    out["date"] = time.strftime("%Y-%m-%d %H:%M")
    learnt = dict(model.named_parameters())
    if "logit_scale" in learnt and "logit_bias" in learnt:
        out |= {"scale": learnt["logit_scale"].exp().item(), "bias": learnt["logit_bias"].item()}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    out["machine"] = f"{platform.system()} {platform.machine()}, {cores} cores, {torch.get_num_threads()} threads"
    return out | {"software": f"Python {platform.python_version()}, torch {torch.__version__}"}


def format_table(result: Result) -> str:
    """The figures as a person reads them."""
    m, info = result.metrics, result.info
    lines = [
        f"{info['images']} drawings ({', '.join(info['styles'])}), {info['concepts']} names, {info['texts']} texts; "
        f"ranked by {result.similarity}; {info['seconds']} s",
        "",
        f"{'retrieval':<26}{'R@1':>8}{'R@5':>8}{'R@10':>8}{'mAP@R':>8}{'R-Prec':>8}{'median':>8}{'chance':>8}",
    ]
    for gallery, what in (("names", "names"), ("captions", "all captions")):
        for way, label in (("i2t", f"image -> {what}"), ("t2i", f"{what} -> image")):
            p = f"{gallery}/{way}"
            cells = [m.get(f"{p}/{key}") for key in ("R@1", "R@5", "R@10", "mAP@R", "R-Precision")]
            shares = "".join(share(value, 8) for value in cells)
            lines.append(f"{label:<26}{shares}{m[f'{p}/median_rank']:8.1f}{100 * m[f'{p}/chance_R@1']:8.2f}")
    lines += ["", f"{'zero-shot':<26}{'top-1':>8}{'top-5':>8}{'by class':>9}{'classes':>8}"]
    for level in ("subgroup", "group"):
        for kind in (level, f"{level}_plain", f"{level}_members"):
            top1, top5, recall, count = (
                m.get(f"zero_shot/{kind}/{key}") for key in ("top1", "top5", "mean_per_class_recall", "classes")
            )
            lines.append(f"{kind:<26}{share(top1, 8)}{share(top5, 8)}{share(recall, 9)}{count:8.0f}")
    lines += ["-: there are not so many to choose from"] if any(" - " in f"{line[26:]} " for line in lines) else []
    if not result.probabilistic:
        return "\n".join([*lines, "", "points: this model's method trains means alone, and its variances say nothing"])
    lines += ["", "mean trace                " + "  ".join(f"{k} {m[f'trace/{k}']:.4g}" for k in (*LEVELS, "image"))]
    spreads = "  ".join(f"{kind}s {100 * m[f'trace/{kind}_spread']:.2f}%" for kind in ("text", "image"))
    lines.append(f"middle 90% over median    {spreads}")
    for prefix in ("spearman/", "inclusion/", "recall_by_trace/"):
        lines.append("")
        lines += [f"{k:<56}{v:9.3f}" for k, v in m.items() if k.startswith(prefix) and not k.endswith("/median")]
    return "\n".join(lines)


def share(value: float | None, width: int) -> str:
    """A share in percent; a dash for a figure that is left out, such as R@10 among nine drawings."""
    return f"{'-':>{width}}" if value is None else f"{100 * value:{width}.2f}"


def gallery(
    data: Sequence[str],
    select: str | None = None,
    names: Sequence[str] | None = None,
    all_names: bool = False,
    flags: tuple[str, str, str] = ("--data", "--names", "--select"),
) -> Corpus:
    """The drawings of `data` that meet `select`, to be told from the names of `data` and `names`.

    The added names meet `select` too unless `all_names`; a condition on the style is for the drawings only. flags: what
    data, names and select are called in errors.
    """
    with naming(flags[0]):
        shown = emoji.read(data)
    with naming(flags[1]):
        wider = [*emoji.read(names).concepts, *shown.concepts] if names else [*shown.concepts]
        every = Corpus((), ()).with_concepts(wider)
    if not select:
        return shown.with_concepts(wider)
    with naming(flags[2]):
        shown = shown.select(select)
        if not shown.drawings:
            raise ValueError(f"{select!r} leaves no drawing of these shards: choose concepts that they show")
        rule = ";".join(str(condition) for condition in emoji.parse_rule(select) if condition.field != "style")
        return shown.with_concepts(every.concepts if all_names or not rule else every.select(rule).concepts)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m prolip.evaluation.corpus", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="local-dir:FOLDER, hf-hub:NAME or a config name")
    parser.add_argument("--data", nargs="+", required=True, metavar="TAR", help="shards whose drawings are evaluated")
    parser.add_argument("--select", help="which concepts, e.g. 'group=animals nature|food drink|travel places'")
    parser.add_argument("--names", nargs="+", metavar="TAR", help="shards whose concepts also stand in the gallery")
    parser.add_argument("--all-names", action="store_true", help="--select does not narrow the gallery")
    parser.add_argument("--similarity", help="csd, mean or a measure (default: the score of the model's method)")
    parser.add_argument("--precision", default="fp32", choices=PRECISIONS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokenizer", help="another tokenizer than the model's")
    parser.add_argument("--out", help="folder for metrics.json, corpus.json and embeddings.npz")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> Result:
    """Read, load, evaluate, write, print, in the order in which mistakes are cheapest."""
    import prolip  # late: --help needs no towers
    from prolip.evaluation.embedder import check_device

    if args.similarity:
        find_score(args.similarity)
    check_device(args.device)
    if args.out:
        check_output(args.out, folder=True)
    corpus = gallery(args.data, args.select, args.names, args.all_names)
    model, _, preprocess = prolip.create_model_and_transforms(args.model, device=args.device)
    if ":" not in args.model:
        print(f"note: {args.model} is a bare config, so its weights are random; a run is local-dir:runs/NAME/model",
              file=sys.stderr)  # fmt: skip
    tokenizer = prolip.get_tokenizer(args.model, tokenizer=args.tokenizer)
    options = {"device": args.device, "precision": args.precision, "similarity": args.similarity}
    result = evaluate(model, tokenizer, preprocess, corpus, **options)
    result.info |= {"model": args.model, "data": args.data, "names": args.names, "select": args.select}
    if args.out:
        result.save(args.out)
    print(format_table(result) + (f"\n\nwritten to {args.out}" if args.out else ""))
    return result


def main(arguments: Sequence[str] | None = None) -> Result:
    """The command: what the user can mend ends in one line and exit code 2."""
    args = parse(arguments)
    try:
        return run(args)
    except (OSError, ValueError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    console.command(main)
