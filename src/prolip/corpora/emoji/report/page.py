"""The report page: one self-contained HTML file, from the files of a run folder."""

from __future__ import annotations

import io
import math
import platform
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from prolip.corpora.emoji.report import examples, figures, uncertainty
from prolip.corpora.emoji.report.runs import RunFolder, flatten, read
from prolip.methods import find_method
from prolip.utils import style
from prolip.utils.console import plain
from prolip.utils.outputs import check_output, replacing

#: Copyright of the drawings of each style, as in data/emoji/LICENSES; pages with drawings show it.
CREDITS = {
    "noto": "Noto Emoji, Google, Apache-2.0",
    "noto-v1": "Noto Emoji, Google, Apache-2.0",
    "twemoji": "Twemoji, Twitter and contributors, CC-BY-4.0",
    "emojione": "EmojiOne 2, CC-BY-4.0",
    "fluent-emoji-flat": "Fluent Emoji, Microsoft, MIT",
    "fluent-emoji": "Fluent Emoji, Microsoft, MIT",
    "fluent-emoji-high-contrast": "Fluent Emoji, Microsoft, MIT",
}

#: Meaning of a test set's main metric, by its last word.
QUOTED = {
    "mean_recall@1": "of the images and texts rank their own match first",
    "acc1": "of the images rank their own class first",
    "mAP": "mean average precision of the classes",
}
#: Of a test set and of the training data: number of ranked pairs, and R@1 among them.
SAMPLED = ("pairs", "pairs_R@1", "train_pairs_R@1")
#: Time limit of the page at the end of a run, seconds.
LIMIT = 120


def make_report(
    folder: str | Path, evaluation: str | None = None, out: str | Path | None = None, seed: int = 0, title: str = ""
) -> Path:
    """Write `report.html` and `figures/*.png` into a run folder; return the page's path.

    evaluation: name of the evaluation's folder in it, None: eval if it exists; out: another path for the page.
    """
    if evaluation and not (Path(folder) / evaluation / "metrics.json").is_file():
        remedy = f"write one with prolip eval emoji --output {Path(folder) / evaluation}"
        raise FileNotFoundError(f"no evaluation {evaluation} in {folder}: {remedy}")
    run = read(folder, evaluation or "eval")
    below, page = run.folder / "figures", Path(out) if out else run.folder / "report.html"
    check_output(below, folder=True)
    check_output(page)
    facts(run), headlines(run)  # missing data is reported before minutes of drawing
    pictures = {}
    for name, figure in figures.draw_all(run, seed).items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=style.STYLE["savefig.dpi"], facecolor="white")
        pictures[name] = buffer.getvalue()
        with replacing(below / f"{name}.png") as temporary:
            temporary.write_bytes(pictures[name])
    text = render(run, pictures, seed, title)
    with replacing(page) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return page


def end_with_report(folder: Path) -> str:
    """Return the path of a finished run's page, or why there is none; in the main thread within LIMIT seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it took longer than {LIMIT} s")

    bounded = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, stop) if bounded else None
    try:
        if bounded:
            signal.alarm(LIMIT)
        return f"report: {make_report(folder)}"
    except Exception as error:  # a failed page must not fail the run
        return f"warning: no report ({error}). Write it with prolip report {folder}"
    finally:
        if bounded:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)


def render(run: RunFolder, pictures: dict[str, bytes], seed: int = 0, title: str = "") -> str:
    """Return the page as HTML; sections without data name what is missing."""
    loader = PackageLoader("prolip.corpora.emoji.report", ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.lstrip_blocks = True
    environment.finalize = lambda value: plain(value.replace("\n", " ")) if type(value) is str else value
    environment.filters |= {"percent": percent, "figure": number, "amount": examples.amount}
    result, uncertain = run.result, run.result if run.result and run.result.probabilistic else None
    last, meaning = run.evals[-1] if run.evals else {}, ""
    with suppress(KeyError, ValueError):  # the run does not name its method, or the method is not installed
        meaning = find_method(str((run.config or {})["method"])).meaning
    context: dict[str, Any] = {"run": run, "result": result, "seed": seed, "folder": str(run.folder)}
    context |= {"title": title or f"ProLIP: {run.folder.resolve().name}", "variances": meaning}
    context |= {"pictures": {name: style.data_uri(data, "png") for name, data in pictures.items()}}
    context |= {"facts": facts(run), "headlines": headlines(run), "settings": flatten(run.config or {})}
    sampled = figures.sampled_sets(run)
    context |= {"sampled": [(name, *(last.get(f"{name}/{key}") for key in SAMPLED)) for name in sampled]}
    context |= {"quantiles": ", ".join(f"{100 * quantile:g}%" for quantile in uncertainty.QUANTILES)}
    context |= {"lead": uncertainty.section(uncertain, seed) if uncertain else None, "shown": run.shown}
    context |= {"reading": uncertainty.read_all(uncertain) if uncertain else {}, "colours": {}, "credits": []}
    if result:
        context["colours"] = style.LEVEL_COLOURS
        context["shown"] = {"the drawings": uncertainty.show_corpus(result)} | run.shown
        context["credits"] = list(dict.fromkeys(CREDITS.get(s, s) for s in result.info["styles"]))
    return environment.get_template("page.html.j2").render(context)


def headlines(run: RunFolder) -> list[tuple[str, str, str]]:
    """Return the main metrics, each with its meaning and the value by chance: of the corpus, if it was evaluated
    on it, and of every other test set.
    """
    out = []
    if result := run.result:
        m, names, images = result.metrics, len(result.corpus.concepts), len(result.corpus.drawings)
        if not m["zero_shot/subgroup_members/classes"] >= 1:
            raise ValueError(f"the evaluation of {images} drawings has no metrics. Evaluate again")
        words = {
            "names/i2t": f"of the {images:,} drawings get their own name first, out of {names:,} names",
            "names/t2i": f"of the names find their own drawing first, out of {images:,}",
        }
        for key, said in words.items():
            if f"{key}/R@1" in m:
                out.append((percent(m[f"{key}/R@1"]), said, f"chance {percent(m[f'{key}/chance_R@1'])}"))
        said = f"mAP@R of drawings against all {len(result.table.texts):,} texts: names, keywords, subgroups, groups"
        out.append((percent(m["captions/i2t/mAP@R"]), said, "every true caption counts"))
    for key in figures.main_metrics(run):
        name, _, metric = key.rpartition("/")
        value = run.evals[-1].get(key)
        if value is not None and metric in QUOTED:
            said, test = f"{name}, step {run.evals[-1]['step']:,}", run.shown.get(name)
            if test is not None and metric != "mAP":
                said += f"; {test.images:,} images, {test.texts:,} texts; chance about {percent(1 / test.texts)}"
            out.append((percent(value), QUOTED[metric], said))
    return out


def facts(run: RunFolder) -> dict[str, str]:
    """Return what ran, where and how long: {label: value}."""
    out: dict[str, str] = {}
    if run.train:
        last = run.train[-1]
        out["training"] = f"{last['step']:,} steps" + (f", {last['samples']:,} samples" if "samples" in last else "")
        if "epoch" in last:
            out["training"] += f", {last['epoch']:.1f} epochs"
        if seconds := last.get("seconds"):
            rate = last.get("samples", 0) / seconds
            minutes, rest = divmod(round(seconds), 60)
            out["training time"] = (
                f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"
            )
            out["speed"] = f"{rate:{',.0f' if rate >= 10 else '.2g'}} samples/s on average"
    if run.result:
        info = run.result.info
        out["evaluated on"] = f"{info['images']:,} drawings by {', '.join(info['styles'])}"
        out["model"] = f"{info.get('model') or run.folder.name}, {info['parameters']:,} parameters"
        out["ranked by"] = run.result.score.in_words
        of_score = info.get("score", info)  # the score that ranked may have its own scale
        if of_score.get("scale") is not None and of_score.get("bias") is not None:
            out["logit"] = f"{of_score['scale']:.3g} x similarity {of_score['bias']:+.3g}"
        out["machine of the evaluation"] = f"{info['machine']}; {info['software']}"
        out["evaluated"] = f"{info['date']}, in {info['seconds']:.0f} s"
    out["page made"] = f"{time.strftime('%Y-%m-%d %H:%M')}, Python {platform.python_version()}"
    return out


def percent(value: float | None, digits: int = 1) -> str:
    """Format 0.3725 as 37.2%, small shares with one more digit, NaN and None as a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{100 * value:.{digits + 1 if 0 < value < 0.01 else digits}f}%"


def number(value: float) -> str:
    """Format a number with four significant digits, NaN as a dash."""
    return f"{value:.4g}" if math.isfinite(value) else "–"
