"""Evaluation on the emoji corpus: two galleries, `names/...` and `captions/...`, classes, uncertainty."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from prolip.corpora.emoji import corpus as emoji
from prolip.corpora.emoji import uncertainty
from prolip.corpora.emoji.corpus import LEVELS, Corpus
from prolip.corpora.emoji.result import CorpusResult
from prolip.embedder import Embedder, token_lengths
from prolip.evaluation.metrics import ranking as metrics
from prolip.evaluation.metrics.bootstrap import mean_of
from prolip.evaluation.metrics.classification import classification, label_ranks
from prolip.evaluation.metrics.ranking import Ranking
from prolip.evaluation.metrics.selective import Deciles, by_decile
from prolip.gaussian import Gaussian
from prolip.prompts import DRAWINGS
from prolip.prompts.templates import mix_groups
from prolip.scores import Similarity
from prolip.utils.messages import naming

#: Drawings embedded at a time.
BATCH = 256
#: Common first prompts; no recipe trains on these templates.
UNSEEN = ("a photo of a {}", "a drawing of a {}", "a picture of a {}")


def evaluate_corpus(embedder: Embedder, corpus: Corpus, similarity: Similarity = None) -> CorpusResult:
    """Embed the drawings and all captions of a corpus and compute every metric.

    similarity: a score or its name, default: the method's score. Keys of `metrics`: names/..., captions/...,
    prompts/..., zero_shot/..., refusal/... and, for scores and models that have them, calibration/..., undoubted/...,
    ambiguity/..., trace/..., spearman/..., inclusion/..., recall_by_trace/..., matches/...
    """
    started = time.perf_counter()
    score = embedder.scored_by(similarity)
    if not corpus.drawings:
        raise ValueError("the corpus has no drawings. Choose concepts that its shards contain")
    if len(corpus.concepts) < 2:
        raise ValueError(f"{corpus.concepts[0].name!r} is the only concept. Choose two or more, or add names")
    texts = corpus.caption_table().texts
    image, novelty = embed_drawings(corpus, embedder)
    text, read = embedder.embed_texts(texts), {}
    if embedder.reader is not None:
        evidence, (low, high) = embedder.reader.evidence(image.mean), embedder.reader.shares(text.trace, text.mean)
        read = {"ambiguity": embedder.reader.ambiguity(image.mean), "share_low": low, "share_high": high}
        read |= {} if evidence is None else {"evidence": torch.stack(evidence, 1)}
    info: dict[str, Any] = {"similarity": score.name, "score": score.to_dict(), "model_score": embedder.score.to_dict()}
    info |= {"probabilistic": embedder.probabilistic, "precision": embedder.precision, "device": str(embedder.device)}
    info |= {"parameters": embedder.parameters, "date": time.strftime("%Y-%m-%d %H:%M")}
    if embedder.logit_scale is not None and embedder.logit_bias is not None:
        info |= {"scale": embedder.logit_scale, "bias": embedder.logit_bias}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    info["machine"] = f"{platform.system()} {platform.machine()}, {cores} cores, {torch.get_num_threads()} threads"
    info["software"] = f"Python {platform.python_version()}, torch {torch.__version__}"
    lengths, said = token_lengths(embedder.tokenizer, texts).numpy(), {name: x.numpy() for name, x in read.items()}
    result = CorpusResult(corpus, image, text, lengths, {}, info, novelty, said)
    result.metrics |= corpus_retrieval(result)
    result.metrics |= prompt_metrics(embedder, result)
    result.metrics |= uncertainty.metrics(result) | uncertainty.calibration(result) | uncertainty.undoubted(result)
    result.metrics |= {key: statistic.value for key, statistic in uncertainty.ambiguity(result).items()}
    for level in ("subgroup", "group"):
        result.metrics |= zero_shot_metrics(embedder, result, level)
    if embedder.probabilistic:
        result.metrics |= uncertainty.trace_metrics(result)
        if result.expected_matches is not None:
            result.metrics |= uncertainty.matches_metrics(result.expected_matches, result.text_relation.sum(1))
            result.metrics |= uncertainty.inside_interval(result)
    result.info |= {"images": len(corpus.drawings), "concepts": len(corpus.concepts), "texts": len(texts)}
    result.info["styles"] = sorted({drawing.style for drawing in corpus.drawings})
    result.info["seconds"] = round(time.perf_counter() - started, 2)
    return result


def embed_drawings(corpus: Corpus, embedder: Embedder) -> tuple[Gaussian, dict[str, np.ndarray]]:
    """Embed the drawings (N, D), with their novelty (N,) by tower end, {} for a model without novelty."""
    image, novelty = embedder.embed((drawing.data for drawing in corpus.drawings), "image", BATCH)
    return image, {name: nats.numpy() for name, nats in novelty.items()}


def corpus_retrieval(result: CorpusResult) -> dict[str, float]:
    """Compute `names/...`, `captions/...` and `recall_by_trace/...`."""
    out: dict[str, float] = {}
    for gallery, (i2t, t2i) in result.rankings.items():
        out |= {f"{gallery}/{key}": value for key, value in metrics.both_directions(i2t, t2i).items()}
        texts, drawings = result.galleries[gallery][1].shape
        for way, ranking, size in (("i2t", i2t, texts), ("t2i", t2i, drawings)):
            for k in (k for k in metrics.KS if k <= size):
                out[f"{gallery}/{way}/chance_R@{k}"] = metrics.chance_recall(ranking.matches, size, k)
    for level in LEVELS:
        rows = torch.from_numpy(result.table.text[result.table.rows(level)])
        of_level = metrics.summarise(Ranking(*(x[rows] for x in result.rankings["captions"][1])))
        out |= {f"captions/t2i/{level}/{key}": of_level[key] for key in ("R@1", "mAP@R", "R-Precision")}
    for name, deciles in recall_by_trace(result).items() if result.probabilistic else ():
        out[f"recall_by_trace/{name}/spearman_deciles"] = deciles.spearman_bins
        out[f"recall_by_trace/{name}/spearman_queries"] = deciles.spearman_queries
    return out


def recall_by_trace(result: CorpusResult) -> dict[str, Deciles]:
    """Compute retrieval by decile of the query's trace: R@1 of names, AP@R of all captions, and of keywords only."""
    image, text = result.uncertainty(result.image), result.uncertainty(result.text)
    names, captions = result.rankings["names"], result.rankings["captions"]
    keywords = result.table.text[result.table.rows("keyword")]
    cases = {
        "names_i2t": (image, names[0].hit(1), names[0].answerable),
        "names_t2i": (text[result.name_texts], names[1].hit(1), names[1].answerable),
        "captions_i2t": (image, captions[0].ap_at_r, captions[0].answerable),
        "captions_t2i": (text, captions[1].ap_at_r, captions[1].answerable),
        "keywords_t2i": (text[keywords], captions[1].ap_at_r[keywords], captions[1].answerable[keywords]),
    }
    return {
        name: by_decile(trace[kept.numpy()], value[kept].double().numpy())  # NumPy takes one element for a number
        for name, (trace, value, kept) in cases.items()
    }


def prompt_metrics(embedder: Embedder, result: CorpusResult) -> dict[str, float]:
    """Compute `prompts/<template>/i2t/R@1` of the drawings among the names in each of UNSEEN, and the mean."""
    truth, out = torch.from_numpy(result.corpus.drawing_concepts), dict[str, float]()
    for template in UNSEEN:
        texts = embedder.embed_texts(template.replace("{}", concept.name) for concept in result.corpus.concepts)
        first = result.score.pairwise(result.image, texts).argmax(1)
        out[f"prompts/{template}/i2t/R@1"] = float((first == truth).double().mean())
    return out | {"prompts/i2t/R@1": sum(out.values()) / len(out)}


def zero_shot_metrics(embedder: Embedder, result: CorpusResult, level: str) -> dict[str, float]:
    """Classify the drawings by `level` without training: a class is its name in all templates (`zero_shot/<level>`),
    its bare name (`..._plain`), or the mixture of its concepts' bare names (`..._members`).
    """
    concepts = result.corpus.concepts
    classes = sorted({getattr(concept, level) for concept in concepts})
    labels = np.array([classes.index(getattr(concept, level)) for concept in concepts])
    text_of = {text: i for i, text in enumerate(result.table.texts)}
    members = [result.name_texts[labels == c] for c in range(len(classes))]
    prompts = embedder.embed_texts(template.replace("{}", name) for name in classes for template in DRAWINGS)
    z = {
        level: mix_groups(prompts, [len(DRAWINGS)] * len(classes)),
        f"{level}_plain": result.text.select([text_of[name] for name in classes]),
        f"{level}_members": mix_groups(result.text.select(np.concatenate(members)), [len(rows) for rows in members]),
    }
    truth = torch.from_numpy(labels[result.corpus.drawing_concepts])
    out: dict[str, float] = {}
    for name, gaussians in z.items():
        scores = result.score.pairwise(result.image, gaussians)
        out |= {f"zero_shot/{name}/{key}": value for key, value in classification(scores, truth).items()}
        ranks = label_ranks(scores, truth)
        result.zero_shot |= {f"zero_shot/{name}/top{k}": mean_of(ranks <= k, "images") for k in (1, 5)}
    return out


def gallery(
    data: Sequence[str],
    select: str | None = None,
    names: Sequence[str] | None = None,
    all_names: bool = False,
    flags: tuple[str, str, str] = ("--data", "--names", "--select"),
) -> Corpus:
    """Return the drawings of `data` that meet `select`, among the names of `data` and `names`.

    The names also meet `select`, except for its style, unless `all_names`. flags: names of these in errors.
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
            raise ValueError(f"{select!r} selects no drawing of these shards. Choose concepts that they contain")
        rule = ";".join(str(condition) for condition in emoji.parse_rule(select) if condition.field != "style")
        return shown.with_concepts(every.concepts if all_names or not rule else every.select(rule).concepts)
