"""Compare uncertainties of trained models with variances fitted to frozen ones, for docs/studies/uncertainty.md.

    python scripts/studies/uncertainty/study.py \\
        --paper runs/study/paper-s{0,1,2} --ours runs/study/likelihood-s{0,1,2} \\
        --frozen runs/study/siglip-s{0,1,2} --held runs/study/held-s{0,1,2}

Each argument is a run folder of `training.main`, one per seed: of the paper's loss, of the method likelihood, of
SigLIP's loss, and of SigLIP's loss on the shards of `hold_out_texts.py`. Our fit after training and ten baselines are
fitted to the frozen models of the last two. Cells: the mean, and each seed in brackets.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import numpy as np
import torch
from scipy.stats import linregress

from prolip.corpora.emoji.corpus import LEVELS
from prolip.corpora.emoji.evaluate import evaluate_corpus
from prolip.corpora.emoji.result import CorpusResult
from prolip.corpora.emoji.uncertainty import reliabilities
from prolip.evaluation.metrics.bootstrap import Statistic, paired
from prolip.evaluation.metrics.calibration import confidence, reliability
from prolip.evaluation.metrics.selective import (  # noqa: E402
    auroc,
    by_decile,
    partial_spearman,
    recall_auroc,
    risk_coverage,
    spearman,
)
from studies.tables import cell
from studies.uncertainty.baselines import BASELINES
from studies.uncertainty.foreign_inputs import pictures, texts
from studies.uncertainty.subjects import Subject, Trained, baselines, fitted, trained

NAN = float("nan")
#: Subjects that refuse by more signs than their variances.
OURS = ("likelihood", "prolip.uncertainty")
GAINS = ("AUROC i2t", "AURC i2t", "AUROC t2i", "AURC t2i")
#: Column -> value of a table, for one subject.
Row = dict[str, float]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--paper", nargs="*", default=[], metavar="RUN", help="runs by the paper's loss")
    add("--ours", nargs="*", default=[], metavar="RUN", help="runs by the method likelihood")
    add("--frozen", nargs="*", default=[], metavar="RUN", help="runs by SigLIP's loss, for ours and the baselines")
    add("--held", nargs="*", default=[], metavar="RUN", help="runs by SigLIP's loss without some texts")
    add("--baselines", nargs="*", default=list(BASELINES), choices=list(BASELINES))
    add("--seed", type=int, default=0, help="seed of the fits")
    return parser.parse_args(arguments)


# --- columns ---------------------------------------------------------------------------------------------------------
def of_texts(subject: Subject) -> Row:
    """Relate the uncertainty of texts to their number of matching drawings."""
    result, u = subject.result, subject.text
    if u is None:
        return {}
    log_n = np.log(result.table.true_matches)
    found, kept = result.rankings["captions"][1], result.rankings["captions"][1].answerable.numpy()
    precision = found.ap_at_r.double().numpy()[kept]
    row = {level: float(u[result.table.text[result.table.rows(level)]].mean()) for level in LEVELS}
    row |= {"rho log n": spearman(u, log_n), "at equal tokens": partial_spearman(u, log_n, result.token_lengths)}
    row |= {"deciles": by_decile(u[kept], precision).spearman_bins}
    return row | {"-S R2": minus_s_r2(u[kept], found.hit(1).double().numpy()[kept])}


def minus_s_r2(u: np.ndarray, hit: np.ndarray) -> float:
    """Compute -S R^2 (GroVE): Spearman's S and R^2 of a line, both of R@1 over ten bins of uncertainty."""
    bins = by_decile(u, hit)
    line = linregress(np.arange(len(bins.value)), bins.value)
    return float(-bins.spearman_bins * line.rvalue**2)


def of_counts(subject: Subject) -> Row:
    """Compare expected with true numbers of matches; `factor`: the median of the larger over the smaller."""
    metrics = subject.result.metrics
    wanted = {"within 2": "matches/within_factor_2", "factor": "matches/median_factor"}
    return {name: metrics[key] for name, key in wanted.items() if key in metrics}


def of_refusal(subject: Subject) -> Row:
    """Predict wrong first names by the drawing, the text, or both, and wrong nearest drawings."""
    result, row = subject.result, Row()
    i2t, t2i = result.rankings["names"]
    wrong, missed = (~x.hit(1).bool().numpy() for x in (i2t, t2i))
    if subject.image is not None:
        row |= {"AUROC i2t": auroc(subject.image, wrong), "AURC i2t": risk_coverage(subject.image, wrong).aurc}
        row["R-AUROC"] = neighbours(result, subject.image)
    if subject.text is not None:
        u, kept = subject.text[result.name_texts], t2i.answerable.numpy()
        row |= {"AUROC t2i": auroc(u[kept], missed[kept]), "AURC t2i": risk_coverage(u[kept], missed[kept]).aurc}
    return row


def beside(subject: Subject, by_cosine: CorpusResult) -> dict[str, Row]:
    """Return rows for a model's other signs: top score, novelty at both ends of the tower, all signs together."""
    result, metrics = subject.result, subject.result.metrics
    out: dict[str, Row] = {}
    titles = {
        "score": "top score",
        "pair": "both traces",
        "mean": "novelty, mean",
        "first": "novelty, first",
        "answer": "answer",
    }
    out["top cosine"] = refused(by_cosine.metrics, "score")
    for name, title in {**titles, "all": "all"}.items():
        if f"refusal/names_i2t/{name}/auroc" in metrics:
            out[title] = refused(metrics, name)
        if name in result.novelty:
            out[title]["R-AUROC"] = neighbours(result, result.novelty[name])
            out[title] |= {kind: against(found[name], result.novelty[name]) for kind, found in new(subject).items()}
    for end, row in of_new_texts(subject, result.table.texts).items():
        out[titles[end]] |= row
    out["subgroup entropy"] = {"R-AUROC": neighbours(result, left_open(result, "subgroup"))}
    return out


def left_open(result: CorpusResult, level: str) -> np.ndarray:
    """Return the entropy in nats of the answer among the texts of a level, for each drawing."""
    units, rows = result.model_score.units, np.flatnonzero(result.table.text_level == LEVELS.index(level))
    assert units is not None
    nats = units.code_length(result.image.mean @ result.text.select(rows).mean.mT)
    return ((-nats).exp() * nats).sum(1).numpy()


def refused(metrics: dict[str, float], by: str) -> Row:
    """Return the errors among the names in both directions, refused by one sign."""
    return {
        f"{figure} {way}": metrics[f"refusal/names_{way}/{by}/{figure.lower()}"]
        for figure in ("AUROC", "AURC")
        for way in ("i2t", "t2i")
    }


def new(subject: Subject) -> dict[str, dict[str, np.ndarray]]:
    """Return the novelty in nats of foreign images, by kind and end of the tower."""
    embedder, out = subject.embedder, {}
    assert embedder.novelty is not None
    for kind, found in pictures().items():
        hidden = embedder.encode_hidden(torch.stack([embedder.preprocess(x) for x in found]))
        out[kind] = {end: nats.numpy() for end, nats in embedder.novelty(hidden).items()}
    return out


def of_new_texts(subject: Subject, own: Sequence[str]) -> dict[str, Row]:
    """Compute the AUROC of foreign texts against own ones by novelty, for both ends of the tower."""
    embedder = subject.embedder
    if embedder.text_novelty is None:
        return {}
    kinds = {"": own, **texts(subject.result.table.texts)}
    nats = {
        kind: embedder.text_novelty(embedder.encode_hidden(embedder.tokenizer(list(found)), "text"))
        for kind, found in kinds.items()
    }
    return {
        end: {kind: against(x[end].numpy(), own_nats.numpy()) for kind, x in nats.items() if kind}
        for end, own_nats in nats[""].items()
    }


def neighbours(result: CorpusResult, u: np.ndarray) -> float:
    """Compute the R-AUROC of drawings by subgroup."""
    subgroups = [result.corpus.concepts[drawing.concept].subgroup for drawing in result.corpus.drawings]
    return recall_auroc(result.image, np.array(subgroups), u)["R-AUROC"]


def of_foreign(subject: Subject) -> Row:
    """Compute the AUROC of foreign inputs against the corpus's own."""
    preprocess, row = subject.embedder.preprocess, {}
    if subject.image is not None:
        for kind, found in pictures().items():
            u = subject.ask("image", subject.embedder.encode_image(torch.stack([preprocess(x) for x in found])))
            row[kind] = against(u, subject.image)
    if subject.text is not None:
        for kind, words in texts(subject.result.table.texts).items():
            row[kind] = against(subject.ask("text", subject.embedder.embed_texts(words)), subject.text)
    return row


def against(foreign: np.ndarray | None, own: np.ndarray) -> float:
    """Compute the AUROC of foreign against own inputs."""
    if foreign is None:
        return NAN
    return auroc(np.concatenate([foreign, own]), np.arange(len(foreign) + len(own)) < len(foreign))


def of_retrieval(subject: Subject) -> Row:
    """Measure retrieval by the model's own score, in percent, and the calibration of its probabilities (ECE)."""
    keys = {
        "captions i2t": "captions/i2t/mAP@R",
        "captions t2i": "captions/t2i/mAP@R",
        "names i2t": "names/i2t/R@1",
        "names t2i": "names/t2i/R@1",
        "zero-shot": "zero_shot/subgroup_plain/top1",
    }
    metrics = subject.result.metrics
    ece = {"ECE of matches": match_ece(subject), "ECE of answers": answer_ece(subject)}
    return {name: 100 * metrics[key] for name, key in keys.items()} | ece


def match_ece(subject: Subject) -> float:
    """Compute the expected calibration error of the probability that the first text matches a drawing."""
    found = reliabilities(subject.result, "captions").get("calibration/match_i2t")
    return NAN if found is None else found.ece


def answer_ece(subject: Subject) -> float:
    """Compute the expected calibration error of the probability that the first name is correct among all.

    The probability is a softmax of the logits, or of the cosines if a model has units.
    """
    result = subject.result
    found = result.metrics.get("refusal/names_i2t/answer/ece")
    logits = result.score.logit(result.score.pairwise(result.image, result.text.select(result.name_texts)))
    if found is not None or logits is None:
        return NAN if found is None else found
    return reliability(confidence(logits), result.rankings["names"][0].hit(1)).ece


def of_kept_out(subject: Subject, run: Trained) -> Row:
    """Compute the rank correlation of uncertainty and log n over the unseen texts."""
    if subject.text is None:
        return {}
    rows = np.isin(subject.result.table.texts, run.kept_out)
    return {"kept out": spearman(subject.text[rows], np.log(subject.result.table.true_matches[rows]))}


# --- tables ----------------------------------------------------------------------------------------------------------
TABLES: dict[str, tuple[tuple[Callable[[Subject], Row], ...], tuple[str, ...]]] = {
    "Texts": (
        (of_texts, of_counts),
        (*LEVELS, "rho log n", "at equal tokens", "kept out", "within 2", "factor", "deciles", "-S R2"),
    ),
    "Refusal": ((of_refusal,), ("AUROC i2t", "AURC i2t", "AUROC t2i", "AURC t2i", "R-AUROC")),
    "Foreign inputs": ((of_foreign,), ("photographs", "noise", "blank", "gibberish", "sentences", "shuffled")),
    "Retrieval": (
        (of_retrieval,),
        ("captions i2t", "captions t2i", "names i2t", "names t2i", "zero-shot", "ECE of matches", "ECE of answers"),
    ),
}


class Table:
    """A table of values by subject, column and seed."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, list[float]]] = {}

    def add(self, name: str, row: Row) -> None:
        for column, value in row.items():
            self.values.setdefault(name, {}).setdefault(column, []).append(value)

    def lines(self, columns: Iterable[str]) -> list[str]:
        """Format as Markdown, a row for each subject with one of the columns."""
        columns = list(columns)
        out = [f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
        for name, found in self.values.items():
            if any(column in found for column in columns):
                out.append(f"| {name} | {' | '.join(cell(found.get(column, []), None) for column in columns)} |")
        return out


def subjects(options: argparse.Namespace) -> Iterable[Subject]:
    """Yield all compared subjects, a few at a time."""
    for name in ("paper", "ours"):
        for folder in getattr(options, name):
            yield trained({"paper": "the paper's loss", "ours": "likelihood"}[name], Trained(folder))
    for folder in options.frozen:
        run = Trained(folder)
        yield trained("SigLIP, cosine", run)
        yield fitted("prolip.uncertainty", run, options.seed)
        yield from baselines(run, options.seed, options.baselines)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    table, gains = Table(), []
    statistics: dict[str, list[dict[str, Statistic]]] = {}
    for subject in subjects(options):
        for functions, _ in TABLES.values():
            for function in functions:
                table.add(subject.name, function(subject))
        table.add(subject.name, {"seconds": subject.fit})
        if subject.name in OURS:
            by_cosine = evaluate_corpus(subject.embedder, subject.result.corpus, similarity="mean")
            for title, row in beside(subject, by_cosine).items():
                table.add(f"{subject.name}: {title}", row)
            gains.append(f"| {subject.name} | {' | '.join(gained(by_cosine, subject.result))} |")
        statistics.setdefault(subject.name, []).append(subject.result.statistics)
        print(subject.name, file=sys.stderr, flush=True)
    for folder in options.held:
        run = Trained(folder)
        others = baselines(run, options.seed, options.baselines)
        for subject in (fitted("prolip.uncertainty", run, options.seed), *others):
            table.add(subject.name, of_kept_out(subject, run))
            for end, row in of_new_texts(subject, run.kept_out).items():
                table.add(f"{subject.name}: novelty, {end}, of captions kept out", row)
    for title, (_, columns) in TABLES.items():
        print(f"\n{title}\n", *table.lines(columns), sep="\n")
    print("\nSeconds of training, or of fitting\n", *table.lines(["seconds"]), sep="\n")
    print("\nRefusing by all, less answering and refusing by the cosine: a row for each seed\n")
    print(f"| | {' | '.join(GAINS)} |", f"|---|{'---:|' * len(GAINS)}", *gains, sep="\n")
    if "the paper's loss" in statistics and "likelihood" in statistics:
        print("\n".join(["", "likelihood - the paper's loss", "", *differences(statistics)]))


def gained(by_cosine: CorpusResult, result: CorpusResult) -> list[str]:
    """Compute the changes in GAINS from refusing by all signs, with intervals from the same draws."""
    keys = [f"refusal/names_{way}/{{}}/{figure.lower()}" for figure, way in map(str.split, GAINS)]
    first, second = by_cosine.statistics, result.statistics
    if keys[0].format("all") not in second:
        return ["-"] * len(keys)
    found = paired({key: first[key.format("score")] for key in keys}, {key: second[key.format("all")] for key in keys})
    return ["{:+.3f} [{:+.3f}, {:+.3f}]".format(*found[key]) for key in keys]


def differences(statistics: dict[str, list[dict[str, Statistic]]]) -> list[str]:
    """Compute paired intervals of the two trained methods, seed by seed, in points."""
    keys = ("captions/i2t/mAP@R", "captions/t2i/mAP@R", "names/i2t/R@1", "names/t2i/R@1")
    out = [f"| seed | {' | '.join(keys)} |", "|---|---|---|---|---|"]
    for seed, (first, second) in enumerate(zip(statistics["the paper's loss"], statistics["likelihood"])):
        found = paired({key: first[key] for key in keys}, {key: second[key] for key in keys})
        cells = ("{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * x for x in found[key])) for key in keys)
        out.append(f"| {seed} | {' | '.join(cells)} |")
    return out


if __name__ == "__main__":
    main()
