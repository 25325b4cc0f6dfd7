"""The metrics of an evaluation on the corpus as a person reads them."""
from __future__ import annotations

from prolip.data.emoji import LEVELS
from prolip.evaluation.suites.emoji.result import CorpusResult


def format_corpus(result: CorpusResult) -> str:
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
