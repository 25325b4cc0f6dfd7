"""Does refusal by risk keep its promise? Random splits of an evaluation on a designer that a model never saw.

    python -m prolip.evaluation.corpus --model local-dir:runs/demo/model --data data/emoji/emojione.tar --out eval
    python scripts/check_risk.py eval --risk 0.1 0.2 0.3

Questions are all texts, each of which is answered by its first drawing, and all drawings, answered by their first text;
an answer is right where the text is true of the drawing. Half of them, drawn at random, find the threshold, and the
other half is answered by it. Printed: the share of the splits in which anything is answered; of these the mean share of
questions answered and of answers wrong; the share of splits with more wrong answers than risked (this counts the chance
of the second half, too), and with more than `prolip.search.risk.most_wrong`, which should be at most twice delta.
"""
from __future__ import annotations

import argparse

import numpy as np
import torch

from prolip.evaluation.suites.emoji import CorpusResult, load
from prolip.search.risk import find_threshold, most_wrong


def questions(result: CorpusResult, way: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Confidences in the first answers, by name, and whether these are wrong."""
    scores = result.score.pairwise(result.image, result.text).double()
    true = torch.from_numpy(result.text_relation.T)
    if way == "texts":
        scores, true = scores.T, true.T
    near = scores.topk(20, dim=1)
    wrong = ~true.gather(1, near.indices[:, :1])[:, 0]
    found = {"similarity": near.values[:, 0], "lead": near.values[:, 0] - near.values[:, 1]}
    scaled = result.score.scaled(near.values)
    if scaled is not None:
        found["share"] = scaled[:, 0] - scaled.logsumexp(1)
    answerable = true.any(1)  # a text of no drawing has no right answer, and is asked of nobody
    return {name: x[answerable].numpy() for name, x in found.items()}, wrong[answerable].double().numpy()


def check(sure: dict[str, np.ndarray], wrong: np.ndarray, args: argparse.Namespace, risk: float) -> str:
    """A row of the table: over the splits."""
    rows = []
    for seed in range(args.splits):
        known, new = np.array_split(np.random.default_rng(seed).permutation(len(wrong)), 2)
        found = find_threshold({k: x[known] for k, x in sure.items()}, wrong[known], risk, args.delta, seed)
        given = found.answers({k: x[new] for k, x in sure.items()})
        count, bad = int(given.sum()), float(wrong[new][given].sum())
        if found.holds and count:
            rows.append((given.mean(), bad / count, bad > risk * count, bad > most_wrong(count, risk, args.delta)))
    share = len(rows) / args.splits
    if not rows:
        return f"{risk} | {wrong.mean():.3f} | {share:.2f} | - | - | - | -"
    answered, error, more, beyond = np.array(rows, dtype=float).mean(0)
    return (f"{risk} | {wrong.mean():.3f} | {share:.2f} | {answered:.3f} | {error:.3f} | {share * more:.2f}"
            f" | {share * beyond:.2f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="what --out of the corpus's evaluation wrote")
    parser.add_argument("--risk", nargs="+", type=float, default=[0.1, 0.2, 0.3])
    parser.add_argument("--delta", type=float, default=0.1)
    parser.add_argument("--splits", type=int, default=100)
    args = parser.parse_args()
    print("| evaluation | questions | risk | wrong of all | splits that answer | answered | wrong of these | more than"
          " risked | more than said |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for folder in args.folders:
        result = load(folder)
        for way in ("drawings", "texts"):
            sure, wrong = questions(result, way)
            for risk in args.risk:
                print(f"| {folder} | {len(wrong)} {way} | {check(sure, wrong, args, risk)} |", flush=True)


if __name__ == "__main__":
    main()
