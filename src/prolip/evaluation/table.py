"""Format results of tasks as text: shares in percent, how well uncertainty predicts errors, intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from prolip.evaluation.evaluate import PARTS, TaskResult, parts_of
from prolip.measures.chance import chance_remark, is_at_chance

#: Metrics of the table, in this order, if a task has them.
COLUMNS = (
    *("acc1", "acc5", "mean_per_class_recall", "mAP"),
    *(f"{way}/{metric}" for way in ("i2t", "t2i") for metric in ("R@1", "R@5", "R@10", "mAP@R")),
    *("mean_recall@1", "i2t/PMRP", "t2i/PMRP", "avg_jaccard_score", "jaccard_score_10-12"),
)
FEWEST = 10  # correct answers and errors that the AUROC of the table needs
#: Metrics of refusal and their titles: error of all, of the most certain 80% and half, area under the risk-coverage
#: curve and its least value, rank correlation with the error, and separation of errors from right answers.
REFUSAL = {
    "error": "error",
    "error@80": "80% kept",
    "error@50": "50% kept",
    "aurc": "AURC",
    "aurc_oracle": "oracle",
    "spearman": "rho",
    "auroc": "AUROC",
}
SINGLES = {
    "refusal/R-AUROC": "R-AUROC",
    "refusal/1-NN": "1-NN",
    "calibration/match/ece": "ECE of matches",
    "calibration/match/base_rate": "base rate",
    "calibration/match/probability_over_base_rate": "probability / base rate",
    "calibration/match_top1/ece": "top-1 ECE",
    "calibration/match_i2t/ece": "top-1 ECE i2t",
    "calibration/match_t2i/ece": "top-1 ECE t2i",
    "calibration/confidence/ece": "ECE of confidence",
}


def titles(results: Sequence[TaskResult]) -> list[str]:
    """Return the title of each result: task; model and precision if there are several; if titles are still equal
    (other prompts, another split), the beginning of KEY in FEATURES/tasks/NAME-KEY.json.
    """
    cards = [result.info["model"] for result in results]
    several = [field for field in ("name", "precision") if len({card[field] for card in cards}) > 1]
    names = ["  ".join([result.key, *(card[field] for field in several)]) for result, card in zip(results, cards)]
    keys = [result.info["task"] for result in results]
    twice = Counter(name for name, _ in set(zip(names, keys)))
    return [f"{name}  {key[:6]}" if twice[name] > 1 else name for name, key in zip(names, keys)]


def aligned(
    head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], least: int = 7, corner: str = ""
) -> list[str]:
    """Return lines of a table: the head, and rows of a label and cells; columns as wide as their title, or `least`."""
    first, widths = max((len(label) for label, _ in rows), default=0), [max(least, len(title) + 2) for title in head]
    return [
        f"{label:<{first}}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths))
        for label, cells in [(corner, head), *rows]
    ]


def format_table(results: Sequence[TaskResult]) -> str:
    """Format a line per task, model and similarity, shares in percent; one block per kind of task."""
    blocks: dict[tuple[str, ...], list[tuple[str, TaskResult]]] = {}
    for title, result in zip(titles(results), results):
        blocks.setdefault(tuple(name for name in COLUMNS if name in result.metrics), []).append((title, result))
    lines = []
    for columns, rows in blocks.items():
        first, second = max(len(title) for title, _ in rows), max(len(row.info["similarity"]) for _, row in rows)
        labelled = []
        for title, row in rows:
            label = f"{title:<{first}}  {row.info['similarity']:<{second}}  {row.info['images']:>7}"
            labelled.append((label, [f"{100 * row.metrics[column]:.2f}" for column in columns]))
        head, *body = aligned(columns, labelled, corner=f"{'images':>{first + second + 11}}")
        lines += ["", head]
        for line, (_, row) in zip(body, rows):
            damaged, absent = row.info.get("damaged"), row.info.get("too_small_for")
            lost = ", ".join(f"{kind} {n}" for kind, n in damaged["kinds"].items()) if damaged else ""
            lines.append(line + f"  ! left out: {lost}" * bool(damaged))
            lines[-1] += f"  ! too small for {', '.join(absent)}" if absent else ""
            lines[-1] += f"  ! {remark}" if (remark := at_chance(row)) else ""
    return "\n".join(lines[1:])


def at_chance(row: TaskResult) -> str:
    """Return a remark if as many first answers would be right by chance; "" otherwise."""
    images = row.info["images"]
    for metric, candidates in (("acc1", row.info.get("classes", 1)), ("i2t/R@1", images)):
        if (
            candidates > 1
            and metric in row.metrics
            and is_at_chance(round(row.metrics[metric] * images), images, candidates)
        ):
            return chance_remark(candidates)
    return ""


def format_uncertainty(results: Sequence[TaskResult]) -> str:
    """Format a line per task, similarity and uncertainty, with the number of correct answers; then single metrics.

    AUROC is "-" if fewer than FEWEST answers are correct or wrong.
    """
    rows, singles = [], []
    for title, result in zip(titles(results), results):
        name, m = f"{title}  {result.info['similarity']}", result.metrics
        studied = {} if result.study is None else result.study.samples
        for place in (key.removesuffix("/aurc") for key in m if key.endswith("/aurc")):
            way = place.removeprefix("refusal/").replace("/", " by ")
            found = {metric: m.get(f"{place}/{metric}") for metric in REFUSAL}
            correct, samples = "-", studied.get(place.rpartition("/")[0])
            if samples is not None and found["auroc"] is not None:  # errors of 0 or 1
                wrong = int(samples.error.sum())
                correct = str(len(samples.error) - wrong)
                found["auroc"] = found["auroc"] if min(int(correct), wrong) >= FEWEST else None
            cells = ["-" if x is None else f"{x:.4f}" for x in found.values()]
            rows.append((f"{name}  {way}", [correct, *cells]))
        shown = [f"{title} {m[key]:.4f}" for key, title in SINGLES.items() if key in m]
        shown += [f"{SINGLES[key]} left out: too many images" for key in result.info.get("too_large_for", ())]
        singles += [f"{name}  {', '.join(shown)}"] if shown else []
    return "\n".join(aligned(["correct", *REFUSAL.values()], rows, 11, "refused") + singles)


def harmonic_means(results: Sequence[TaskResult]) -> str:
    """Format lines for each folder with results on its `base` and `novel` classes: accuracies and H; "" for none."""
    lines = []
    for (folder, model, _, *how), both in parts_of(results).items():
        for name, (value, *limits) in both["base"].info["harmonic_mean"].items():
            base, novel = (100 * both[part].metrics[name] for part in PARTS)
            interval = " [{:.1f}, {:.1f}]".format(*(100 * x for x in limits)) if limits else ""
            lines.append(
                f"{folder}  {model}  {'  '.join(filter(None, how))}  {name:<21}  base {base:5.2f}  novel {novel:5.2f}"
                f"  H {100 * value:5.2f}{interval}"
            )
    return "\n".join(["base and novel classes, harmonic mean", *lines]) if lines else ""


def format_intervals(results: Sequence[TaskResult]) -> str:
    """Format the columns of `format_table` with 95% intervals, and the differences of compared results."""
    blocks: dict[tuple[str, ...], list[tuple[str, dict[str, str]]]] = {}
    for title, result in zip(titles(results), results):
        found = result.info.get("intervals", {})
        columns = tuple(name for name in COLUMNS if name in found)
        name = f"{title}  {result.info['similarity']}"
        values = {c: [100 * x for x in (result.metrics[c], *found[c])] for c in columns}
        cells = {c: "{:.2f} [{:.1f}, {:.1f}]".format(*x) for c, x in values.items()}
        blocks.setdefault(columns, []).append((name, cells))
        if change := result.info.get("difference"):
            signed = {c: "{:+.2f} [{:+.1f}, {:+.1f}]".format(*(100 * x for x in change["metrics"][c])) for c in columns}
            blocks[columns].append((f"  minus {change['to']['model']}  {change['to']['similarity']}", signed))
    lines = ["95% intervals by bootstrap over queries (an image and its captions: one); differences on the same draws"]
    for columns, rows in blocks.items():
        cell = max([24, *(len(text) + 2 for _, cells in rows for text in cells.values())])
        lines += ["", *aligned(columns, [(name, [cells[c] for c in columns]) for name, cells in rows], cell)]
    return "\n".join(lines)
