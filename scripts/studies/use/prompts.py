"""Measure whether weighted prompts classify drawings of an unseen designer better (docs/studies/prompts.md).

    python scripts/studies/use/prompts.py --runs runs/study --methods prolip pcmepp likelihood --seeds 0 1 2

Classes are the subgroups of EmojiOne, prompts OpenCLIP's 80 or the corpus's 4. One half of the drawings chooses for the
other, so no drawing influences its own score. Intervals are by paired bootstrap over drawings, with the same draws for
all seeds. Embeddings are saved in --work. The tables name missing models and skip them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from open_clip.zero_shot_metadata import OPENAI_IMAGENET_TEMPLATES
from torch import Tensor

from prolip.corpora.emoji import corpus as emoji
from prolip.corpora.emoji.export import write_emoji_classes
from prolip.embedder import Embedder
from prolip.evaluation.cache import FeatureStore
from prolip.evaluation.datasets.webdataset import open_wds
from prolip.evaluation.embed import EVERY, Features, image_features
from prolip.evaluation.metrics.bootstrap import Interval, Statistic, combine, intervals, mean_of
from prolip.evaluation.prompts import cross_weights, halves
from prolip.evaluation.tasks.base import own_labels
from prolip.evaluation.tasks.classification import score_task
from prolip.gaussian import Gaussian, mixture
from prolip.prompts import DRAWINGS
from prolip.prompts.bprw import drawn_images, log_likelihoods, points_of
from prolip.prompts.figures import entropy
from prolip.prompts.templates import PromptRule
from prolip.utils.outputs import replacing

ROOT = Path(__file__).resolve().parents[3]
DESIGNER = "data/emoji/emojione.tar"
CHOICES = {"80": [template("{}") for template in OPENAI_IMAGENET_TEMPLATES], "4": list(DRAWINGS)}
#: Global top-K has one K for all classes, chosen by the other half; the rest are rules of --prompts.
TOP = "top-K"
RULES = ["all", "below:1", TOP, "best", "bprw", "bprw:5", "bprw:9", "bprw:5,prior=trace"]
FIGURES, DRAWS = ("acc1", "mean_per_class_recall"), 1000


def features_of(model: Path, dataset_folder: Path, work: Path) -> Features:
    """Embed the images and all prompts (C, T, D) with a model, once."""
    dataset, embedder = open_wds(dataset_folder), Embedder.load(f"local-dir:{model}")
    features = image_features(dataset, embedder, FeatureStore(work / "features"))
    file = work / "prompts" / f"{dataset_folder.name}-{embedder.fingerprint}.pt"
    if not file.exists():
        texts = [template.replace("{c}", name) for name in dataset.classnames for template in dataset.templates]
        with replacing(file) as temporary:
            torch.save(tuple(embedder.embed_texts(texts)), temporary)
    z = Gaussian(*(x.unflatten(0, (len(dataset.classnames), -1)) for x in torch.load(file)))
    return replace(features, text=mixture(z), prompts=z)


def top_everywhere(features: Features) -> tuple[PromptRule, Statistic]:
    """Return global top-K with the K of most hits in the other half: the rule of one half, and the hits."""
    prompts, labels, score = features.prompts, own_labels(features), features.model.scored_by()
    assert prompts is not None
    rules = [PromptRule("certain", k) for k in range(1, prompts.mean.shape[1] + 1)]
    uncertainty = score.uncertainty(prompts)
    hits = []
    for rule in rules:
        classes = mixture(prompts, rule.weights(uncertainty))
        hits.append(score.pairwise(features.image, classes).argmax(1) == labels)
    hit, first = torch.stack(hits), halves(features.keys, labels)
    own, best = torch.empty(len(labels), dtype=torch.bool), 0
    for half in (first, ~first):
        best = int(hit[:, ~half].sum(1).flip(0).argmax())  # the larger K of equal ones
        own[half] = hit[len(rules) - 1 - best, half]
    return rules[len(rules) - 1 - best], mean_of(own, "images")


def statistics_of(features: Features, word: str) -> dict[str, Statistic]:
    """Return the metrics of a rule as functions of the drawings."""
    if word == TOP:
        return {"acc1": top_everywhere(features)[1]}
    rule, score = PromptRule.parse(word), features.model.scored_by()
    if rule.way in ("best", "bprw"):
        return score_task(replace(features, rule=rule), score).statistics
    assert features.prompts is not None
    text = mixture(features.prompts, rule.weights(score.uncertainty(features.prompts)))
    return score_task(replace(features, rule=EVERY, text=text, prompts=None), score).statistics


def mean_interval(parts: Sequence[Statistic], less: Sequence[Statistic] = ()) -> Interval:
    """Return the interval of the mean over seeds, minus the mean of `less`, on the same draws."""
    terms = [(1 / len(parts), part) for part in parts] + [(-1 / len(less), part) for part in less]
    return intervals({"mean": combine(terms)}, DRAWS)["mean"]


def rows_of(subjects: Sequence[Features], rules: Sequence[str]) -> Iterator[str]:
    """Yield a row per rule: metrics over seeds, and their differences to the first rule."""
    found: dict[str, list[dict[str, Statistic]]] = {}
    for word in rules:
        found[word] = own = [statistics_of(one, word) for one in subjects]
        cells = []
        for key in FIGURES:
            if key not in own[0]:
                cells += ["", ""]
                continue
            parts, plain = [one[key] for one in own], [one[key] for one in found[rules[0]]]
            cells.append(f"{100 * mean_interval(parts).value:.1f}")
            change = mean_interval(parts, plain)
            said = "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(round(100 * x, 1) + 0.0 for x in change))
            cells.append("" if word == rules[0] else said)
        yield f"| {word} | " + " | ".join(cells) + " |"


def why(features: Features) -> list[float]:
    """Measure the evidence in the likelihoods, as means over classes with five labelled images each.

    Returns the entropy of weights as a share of log T, for bprw:5 and bprw; the squared distance of prompts' means to
    their middle; the trace of a prompt, and its spread (standard deviation over the mean) in a class; the squared
    distance from a point to the middle; and the standard deviation over the prompts of a point's log likelihood, nats.
    """
    prompts, labels, score = features.prompts, own_labels(features), features.model.scored_by()
    assert prompts is not None
    shares = []
    for word in ("bprw:5", "bprw"):
        parts = cross_weights(replace(features, rule=PromptRule.parse(word)), prompts, labels, score)
        nats = torch.cat([entropy(weights) for _, weights in parts])
        shares.append(float(nats.mean() / torch.tensor(prompts.mean.shape[1]).log()))
    middle = prompts.mean.mean(1, keepdim=True)
    trace = prompts.trace
    chosen = drawn_images(features.keys, labels, len(prompts.mean), 5, 0)
    distances, ratios = [], []
    for c, points in enumerate(points_of(features.image, chosen, 20, 0)):
        if len(points):
            distances.append((points - middle[c]).square().sum(1).mean())
            own = prompts.select(slice(c, c + 1)).to(torch.float64)
            ratio = log_likelihoods(points.double().unsqueeze(0), own, 0.02)
            ratios.append(ratio[0].std(1).mean())
    spread: Tensor = (prompts.mean - middle).square().sum(2).mean()
    return [
        *shares,
        float(spread),
        float(trace.mean()),
        float((trace.std(1) / trace.mean(1)).mean()),
        float(torch.stack(distances).mean()),
        float(torch.stack(ratios).mean()),
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/study"), help="runs of methods/study.py")
    parser.add_argument("--methods", nargs="+", default=["prolip", "pcmepp", "likelihood"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--prompts", nargs="+", choices=list(CHOICES), default=list(CHOICES), help="numbers of prompts")
    parser.add_argument("--rules", nargs="+", default=RULES, help="rules to compare; the first is the reference")
    parser.add_argument("--work", type=Path, default=Path("runs/study/prompts"), help="folder for embeddings")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    corpus = emoji.read([str(ROOT / DESIGNER)])
    reasons = []
    for name in args.prompts:
        folder = args.work / f"wds_{name}"
        if not (folder / "test" / "nshards.txt").exists():
            write_emoji_classes(corpus, folder, templates=CHOICES[name])
        for method in args.methods:
            models = {seed: args.runs / f"{method}-s{seed}" / "model" for seed in args.seeds}
            there = [seed for seed, model in models.items() if (model / "config.json").exists()]
            if not there:
                print(
                    f"no model of {method} in {args.runs}. Train it with scripts/studies/methods/study.py\n",
                    file=sys.stderr,
                )
                continue
            subjects = [features_of(models[seed], folder, args.work) for seed in there]
            lacking = [str(seed) for seed in args.seeds if seed not in there]
            seeds = ", ".join(map(str, there)) + (f" (not trained: {', '.join(lacking)})" if lacking else "")
            print(f"\n**{method}**, {len(CHOICES[name])} prompts, seeds {seeds}\n")
            print("| prompts | acc1 | difference | mean recall of classes | difference |\n|---|---|---|---|---|")
            for row in rows_of(subjects, args.rules):
                print(row, flush=True)
            for seed, one in zip(there, subjects):
                reasons.append(f"| {method}-s{seed} | {name} | " + " | ".join(f"{x:.3g}" for x in why(one)) + " |")
    print(
        "\n| model | prompts | entropy of bprw:5, of log T | of bprw | prompts to their middle | trace of a prompt "
        "| its spread in a class | points to the middle | nats between prompts |\n" + 9 * "|---" + "|"
    )
    print("\n".join(reasons))


if __name__ == "__main__":
    main()
