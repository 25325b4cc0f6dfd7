"""Check that refusal by risk keeps its bound, over random splits of an evaluation on an unseen designer.

    prolip eval emoji --model local-dir:runs/demo/model --data data/emoji/emojione.tar --output eval
    python scripts/studies/uncertainty/risk.py eval --risk 0.1 0.2 0.3

Queries are drawings, answered by the first of the names (`names_i2t`) or of all texts (`captions_i2t`), and names and
texts, answered by their first drawing (`..._t2i`). An answer is correct if the pair matches. The confidence is chosen
among all signs of the evaluation (`refusal/...`), the lead over the second, and the share among the first 20. A random
half of the queries sets the threshold for the other half. The table shows the share of splits with any answer; in these
the mean share of answered queries and of wrong answers; the share of splits with more wrong answers than the risk,
which includes chance in the second half; and the share with more than `prolip.search.risk_control.most_wrong`, which
should be at most twice 1 - confidence.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from prolip.corpora.emoji import uncertainty
from prolip.corpora.emoji.result import CorpusResult, load
from prolip.search.risk_control import find_threshold, most_wrong


def questions(result: CorpusResult) -> Iterator[tuple[str, dict[str, np.ndarray], np.ndarray]]:
    """Yield the name of each case, confidences in the first answers by name, and a mask of wrong answers."""
    for name, ranking, signs in uncertainty.cases(result):
        gallery, _, way = name.partition("_")
        scores = result.score.pairwise(result.image, result.galleries[gallery][0]).double()
        near = (scores if way == "i2t" else scores.T).topk(20, dim=1).values
        found = {key: -x for key, x in signs.items()}
        found["lead"] = (near[:, 0] - near[:, 1]).numpy()
        scaled = result.score.scaled(near)
        if scaled is not None:
            found["share"] = (scaled[:, 0] - scaled.logsumexp(1)).numpy()
        asked = ranking.answerable.numpy()  # a text of no drawing has no correct answer, and is skipped
        yield name, {key: x[asked] for key, x in found.items()}, (~ranking.hit(1)).double().numpy()[asked]


def check(sure: dict[str, np.ndarray], wrong: np.ndarray, args: argparse.Namespace, risk: float) -> str:
    """Format a row of the table, over the splits."""
    rows, delta = [], 1 - args.confidence
    for seed in range(args.splits):
        known, new = np.array_split(np.random.default_rng(seed).permutation(len(wrong)), 2)
        found = find_threshold({k: x[known] for k, x in sure.items()}, wrong[known], risk, delta, seed)
        given = found.answers({k: x[new] for k, x in sure.items()})
        count, bad = int(given.sum()), float(wrong[new][given].sum())
        if found.holds and count:
            beyond = bad > most_wrong(count, risk, delta)
            rows.append((given.mean(), bad / count, bad > risk * count, beyond))
    share = len(rows) / args.splits
    if not rows:
        return f"{risk} | {wrong.mean():.3f} | {share:.2f} | - | - | - | -"
    answered, error, more, beyond = np.array(rows, dtype=float).mean(0)
    return (
        f"{risk} | {wrong.mean():.3f} | {share:.2f} | {answered:.3f} | {error:.3f} | {share * more:.2f}"
        f" | {share * beyond:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="--output folder of prolip eval emoji")
    parser.add_argument("--risk", nargs="+", type=float, default=[0.1, 0.2, 0.3])
    parser.add_argument("--confidence", type=float, default=0.9, help="confidence of the bound (default: 0.9)")
    parser.add_argument("--splits", type=int, default=100)
    args = parser.parse_args()
    print(
        "| evaluation | questions | risk | wrong of all | splits that answer | answered | wrong of these | more than"
        " risked | more than said |\n|---|---|---|---|---|---|---|---|---|"
    )
    for folder in args.folders:
        result = load(folder)
        for name, sure, wrong in questions(result):
            for risk in args.risk:
                print(f"| {folder} | {len(wrong)} {name} | {check(sure, wrong, args, risk)} |", flush=True)


if __name__ == "__main__":
    main()
