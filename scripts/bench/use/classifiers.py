"""Classifiers fitted to one designer's drawings and tested on another's (docs/studies/classification.md).

    python scripts/bench/use/classifiers.py --model local-dir:runs/demo/model

It tests three things: zero-shot with and without labelled images for its probabilities; 1 to 16 shots of each class
with and without names, next to scikit-learn's logistic regression; and answers at a risk. A random half of the second
designer's drawings sets the refused confidence, and the other half is classified.
"""

from __future__ import annotations

import argparse
import warnings

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

from prolip.classifiers import FewShotClassifier, ZeroShotClassifier
from prolip.corpora.emoji import corpus as emoji
from prolip.embedder import Embedder
from prolip.evaluation.metrics.calibration import reliability
from prolip.search.risk_control import most_wrong

RULE = "group=animals nature|food drink|travel places; subgroup!=time"
SHOTS = (1, 2, 4, 8, 16)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="local-dir:FOLDER, hf-hub:NAME, or a name for --pretrained")
    parser.add_argument("--pretrained", help="weights of a named model")
    parser.add_argument("--fit", default="data/emoji/twemoji.tar", help="drawings to fit to (default: twemoji)")
    parser.add_argument("--ask", default="data/emoji/emojione.tar", help="drawings to classify (default: emojione)")
    parser.add_argument("--select", default=RULE, help=f"rule that selects drawings (default: {RULE})")
    parser.add_argument("--classes", default="subgroup", choices=("group", "subgroup", "name"))
    parser.add_argument("--risks", type=float, nargs="+", default=[0.4, 0.3, 0.2, 0.1])
    parser.add_argument("--shots", type=int, nargs="+", default=SHOTS, help="drawings per class")
    parser.add_argument("--repeats", type=int, default=10, help="random draws of shots and of halves (default: 10)")
    return parser.parse_args()


def read(shard: str, rule: str, level: str) -> tuple[list[bytes], np.ndarray]:
    """Read images and their labels."""
    corpus = emoji.read(shard).select(rule)
    labels = [getattr(corpus.concepts[one.concept], level) for one in corpus.drawings]
    return [one.data for one in corpus.drawings], np.array(labels)


def figures(classifier, x: np.ndarray, y: np.ndarray) -> str:
    """Format accuracy, mean -log p of the truth, and expected calibration error."""
    p = classifier.predict_proba(x)
    right = classifier.classes_[p.argmax(1)] == y
    known = np.isin(y, classifier.classes_)
    nats = log_loss(y[known], p[known] / p[known].sum(1, keepdims=True), labels=classifier.classes_)
    return f"acc {right.mean():6.1%}  nats {nats:5.2f}  ECE {reliability(p.max(1), right).ece:.3f}"


def mean_figures(made: list[str]) -> str:
    """Average several lines of metrics, number by number."""
    numbers = np.mean([[float(word.rstrip("%")) for word in line.split() if word[0].isdigit()] for line in made], 0)
    return "acc {:5.1f}%  nats {:5.2f}  ECE {:.3f}".format(*numbers)


def shots_of(y: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return the rows of at most `count` drawings of each class."""
    random = np.random.default_rng(seed)
    return np.concatenate([random.permutation(np.flatnonzero(y == label))[:count] for label in np.unique(y)])


def main() -> None:
    """Embed once, then print all tables."""
    args = parse()
    embedder = Embedder.load(args.model, args.pretrained)
    (fit_pictures, fit_y), (ask_pictures, ask_y) = (read(x, args.select, args.classes) for x in (args.fit, args.ask))
    zero = ZeroShotClassifier(embedder, sorted({*fit_y, *ask_y})).fit()
    fit_x, ask_x = zero.embed(fit_pictures), zero.embed(ask_pictures)
    print(f"{len(zero.classes_)} classes, {len(fit_x)} drawings to fit to, {len(ask_x)} to classify\n")
    print(f"zero-shot, the model's own scale      {figures(zero, ask_x, ask_y)}")
    print(f"zero-shot, fitted                     {figures(zero.fit(fit_x, fit_y), ask_x, ask_y)}")
    for count in args.shots:
        lines: dict[str, list[str]] = {"names and shots": [], "shots alone": [], "logistic regression": []}
        for seed in range(args.repeats):
            rows = shots_of(fit_y, count, seed)
            few = FewShotClassifier(embedder, seed=seed), FewShotClassifier(embedder, text=False, seed=seed)
            for name, model in zip(lines, few):
                lines[name].append(figures(model.fit(fit_x[rows], fit_y[rows]), ask_x, ask_y))
            size = zero.texts_.mean.shape[1]
            plain = LogisticRegression(C=100, max_iter=1000).fit(fit_x[rows, :size], fit_y[rows])
            lines["logistic regression"].append(figures(plain, ask_x[:, :size], ask_y))
        for name, made in lines.items():
            print(f"{count:2} shots, {name:28} {mean_figures(made)}")
    few = FewShotClassifier(embedder).fit(fit_x, fit_y)
    for name, model in (("zero-shot, fitted", zero), (f"all {len(fit_x)} shots and names", few)):
        print(f"\n{name}: {figures(model, ask_x, ask_y)}")
        for risk in args.risks:
            wrong, answered = [], []
            for seed in range(args.repeats):
                one, other, one_y, other_y = train_test_split(ask_x, ask_y, test_size=0.5, random_state=seed)
                predicted = model.calibrate_risk(one, one_y).predict(other, risk=risk)
                answered.append(1 - np.ma.getmaskarray(predicted).mean())
                if count := int((~np.ma.getmaskarray(predicted)).sum()):
                    bad = int((predicted != other_y).sum())
                    wrong.append((bad / count, bad > most_wrong(count, risk, 0.1)))
            share = "none"
            if wrong:
                mean, broken = np.mean(wrong, 0)
                share = f"{mean:.1%} of them wrong, more than chance allows in {broken:.0%} of the halves"
            print(f"  at most {risk:.0%} wrong: {np.mean(answered):6.1%} answered, {share}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)
    main()
