"""Compare all methods on the same towers, data, budget and seeds, and write docs/studies/methods.md.

    python scripts/studies/methods/study.py --out runs/study --jobs 2 --write docs/studies/methods.md
    python scripts/studies/methods/study.py --out runs/study --tables-only --write docs/studies/methods.md
    python scripts/studies/methods/study.py --out runs/icons --corpus icons --methods pcmepp clip --noise 0 --jobs 2

The script trains the missing runs, `--jobs` at a time. Finished runs are kept, so the same command resumes an
interrupted study. First comes the backbone, trained by SigLIP's loss on some designers' drawings. All methods fine-tune
it on other designers' drawings, as the papers do with CLIP. Then the emoji models are adapted to line drawings without
paired texts, and fine-tuned on a few drawings of some subgroups. Last come the tables, which are printed, or with
--write replace those between the marks of the page.
Cells: the mean over seeds, and each seed in brackets. Intervals: 95%, by bootstrap over concepts (a drawing and its
texts), the seeds averaged in every draw.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]


import sweep
from prolip.cli.main import main as prolip
from prolip.corpora.emoji.evaluate import recall_by_trace
from prolip.corpora.emoji.result import CorpusResult, load
from prolip.methods import find_method
from studies.methods import few_shot
from studies.tables import cell, gain, markdown, statistics, value_of, write

#: Method -> its flags; the recipe has the rest. As in the papers, an image's own caption is its one known match, with
#: two exceptions. infonce is clip with all matches known. Triplets use no match as a negative, because a matching
#: hardest negative, rare in COCO, makes VSE collapse. VSE-infinity's first passes use all negatives.
METHODS = {
    "prolip": "",
    "likelihood": "--pair-loss softmax",
    "pcme": "--no-known-matches",
    "pcmepp": "--no-known-matches",
    "vacsr": "--no-known-matches",
    "siglip": "",
    "clip": "",
    "infonce": "",
    "vse": "--sum-steps 75",
    "triplet-sum": "",
}
#: Flags that a method's paper changes if a share of the captions is wrong: percent -> flags.
UNDER_NOISE = {"pcmepp": {20: "--pseudo-weight 0.01", 50: "--pseudo-weight 0"}}
RECIPES = {"emoji": "scripts/recipes/emoji-paper.yaml", "icons": "scripts/recipes/icons.yaml"}
BACKBONE, BACKBONE_STEPS = "backbone", 1200
#: Corpus -> shards of its backbone, and shards of all methods.
DESIGNERS = {
    "emoji": ("data/emoji/{noto-v1,twemoji,fluent-emoji-flat}.tar", "data/emoji/{noto,fluent-emoji}.tar"),
    "icons": (
        "data/icons/{tabler,tabler-filled,mdi,mdi-outline}.tar",
        "data/icons/{lucide,unicons-line,phosphor-{regular,bold,fill,duotone}}.tar",
    ),
}
#: Trained towers learn more slowly than new heads, as in the papers (0.01 and 0.1 of the rate, from CLIP).
FINE_TUNING = "--image-lr-mult 0.25 --text-lr-mult 0.25 --train-num-samples 9600"
#: Adapted model -> weights of its pseudo-pairs.
SOURCES = {
    "siglip": ("none", "spread", "probability"),
    "likelihood": ("none", "spread", "probability", "trace", "novelty"),
}
ADAPT = "scripts/recipes/emoji-adapt.yaml"
#: Column -> key of the metrics, and its display factor.
FIGURES = {
    "names RSUM": ("names/rsum", 1),
    "names R@1 i2t": ("names/i2t/R@1", 100),
    "t2i": ("names/t2i/R@1", 100),
    "captions mAP@R i2t": ("captions/i2t/mAP@R", 100),
    "t2i ": ("captions/t2i/mAP@R", 100),
    "R-Precision i2t": ("captions/i2t/R-Precision", 100),
    "t2i  ": ("captions/t2i/R-Precision", 100),
    "zero-shot": ("zero_shot/subgroup_plain/top1", 100),
}


class Runs:
    """The runs of a study. options: from `parse`."""

    def __init__(self, options: argparse.Namespace):
        self.folder, self.corpus = options.out.resolve(), options.corpus
        self.methods, self.percents, self.seeds = options.methods, options.noise, options.seeds
        self.steps, self.jobs = options.steps, options.jobs
        self.flags, self.adapt_flags, self.backbone_flags = options.flags, options.adapt_flags, options.backbone_flags
        self.loaded: dict[str, CorpusResult] = {}

    def name(self, method: str, percent: int = 0) -> str:
        """Return the name of a method's runs under noise, without their seed."""
        return f"{method}-{percent}" if percent else method

    @property
    def trainings(self) -> dict[str, Any]:
        """Return the runs as a sweep, as scripts/sweep.py reads it from a file."""
        variants = {}
        for percent in self.percents:
            for method in self.methods:
                noise = f"--noise-ratio {percent / 100} {UNDER_NOISE.get(method, {}).get(percent, '')}"
                variants[self.name(method, percent)] = f"--method {method} {METHODS[method]} {noise if percent else ''}"
        start = f"--pretrained {self.folder / f'{BACKBONE}-s0' / 'model'} --warmup {max(1, self.steps // 8)}"
        data = f"--train-data {DESIGNERS[self.corpus][1]} {FINE_TUNING}"
        flags = f"--max-steps {self.steps} --save-frequency 0 {start} {data} {self.flags}"
        return {"recipe": RECIPES[self.corpus], "seeds": self.seeds, "flags": flags, "variants": variants}

    @property
    def backbone(self) -> dict[str, Any]:
        """Return the common initial model as a sweep."""
        data = f"--train-data {DESIGNERS[self.corpus][0]} --train-num-samples 13056"
        flags = f"--method siglip --save-frequency 0 --max-steps {BACKBONE_STEPS} {data} {self.backbone_flags}"
        return {"recipe": RECIPES[self.corpus], "seeds": [0], "flags": flags, "variants": {BACKBONE: ""}}

    def adaptations(self, seed: int) -> dict[str, Any]:
        """Return the adaptations of one seed's models as a sweep."""
        variants = {}
        for source in self.sources:
            model = self.folder / f"{source}-s{seed}" / "model"
            for weight in SOURCES[source]:
                variants[f"{source}-by-{weight}"] = f"--model local-dir:{model} --pair-weight {weight}"
        return {"recipe": ADAPT, "seeds": [seed], "flags": self.adapt_flags, "variants": variants}

    @property
    def sources(self) -> list[str]:
        """Return the methods whose models are adapted."""
        there = self.corpus == "emoji" and 0 in self.percents
        return [method for method in SOURCES if there and method in self.methods]

    @property
    def few_shot(self) -> bool:
        """Return whether the models for few-shot fine-tuning exist."""
        return self.corpus == "emoji" and 0 in self.percents and few_shot.START in self.methods

    def train(self) -> None:
        """Train all missing runs. Finished runs keep their model and embeddings, but no checkpoints."""
        sweep.train_all(self.backbone, [BACKBONE], self.folder, 1)
        sweep.train_all(self.trainings, list(self.trainings["variants"]), self.folder, self.jobs)
        for seed in self.seeds if self.sources else ():
            wanted = self.adaptations(seed)
            sweep.train_all(wanted, list(wanted["variants"]), self.folder, self.jobs)
            self.evaluate_sources(seed)
        for seed in self.seeds if self.few_shot else ():
            wanted = few_shot.trainings(self.folder, seed, self.steps)
            sweep.train_all(wanted, list(wanted["variants"]), self.folder, self.jobs)
            few_shot.evaluate(self.folder, seed)
        for ended in self.folder.glob("*/eval.json"):
            shutil.rmtree(ended.parent / "checkpoints", ignore_errors=True)

    def evaluate_sources(self, seed: int) -> None:
        """Evaluate the models before adaptation on the data they are adapted to."""
        for source in self.sources:
            run = self.folder / f"{source}-s{seed}"
            adapted = self.folder / f"{source}-by-{SOURCES[source][0]}-s{seed}" / "config.json"
            if adapted.exists() and not (run / "eval_lines" / "metrics.json").exists():
                target = json.loads(adapted.read_text(encoding="utf-8"))["val"]
                drawings = ROOT / target["val_data"][0].removeprefix("emoji:")
                words = ["--model", f"local-dir:{run / 'model'}", "--data", str(drawings)]
                words += ["--select", target["val_select"], "--output", str(run / "eval_lines")]
                if code := prolip(["eval", "emoji", *words]):
                    raise SystemExit(code)

    def results(self, name: str, evaluation: str = "eval") -> list[CorpusResult]:
        """Return the results of every finished seed, in order."""
        folders = [self.folder / f"{name}-s{seed}" / evaluation for seed in self.seeds]
        for folder in folders:
            if str(folder) not in self.loaded and (folder / "metrics.json").exists():
                self.loaded[str(folder)] = load(folder)
        return [self.loaded[str(folder)] for folder in folders if str(folder) in self.loaded]

    @cached_property
    def seconds(self) -> dict[str, list[float]]:
        """Return the seconds of training, by run."""
        found: dict[str, list[float]] = {}
        for name in self.trainings["variants"]:
            runs = [self.folder / f"{name}-s{seed}" for seed in self.seeds]
            found[name] = [sweep.figures_of(run)["train_seconds"] for run in runs if (run / "eval.json").exists()]
        return found


# --- tables ----------------------------------------------------------------------------------------------------------
def retrieval(runs: Runs, percent: int) -> list[str]:
    """Return the table of all methods at one level of noise."""
    rows = []
    for method in runs.methods:
        name = runs.name(method, percent)
        found = runs.results(name)
        if found:
            cells = [cell([scale * result.metrics[key] for result in found]) for key, scale in FIGURES.values()]
            rows.append([method, *cells, cell(runs.seconds[name], 0)])
    return markdown(["", *FIGURES, "seconds"], rows)


def compared(runs: Runs, pairs: Sequence[tuple[str, str]], keys: Sequence[str]) -> list[str]:
    """Return the differences of two methods at every level of noise."""
    rows = []
    for second, first in pairs:
        for percent in runs.percents:
            a, b = (list(map(statistics, runs.results(runs.name(method, percent)))) for method in (first, second))
            if a and b:
                rows.append([f"{second} - {first}", f"{percent}%", *gain(a, b, keys).values()])
    titles = {key: title.strip() for title, (key, _) in FIGURES.items()}
    return markdown(["", "noise", *(titles[key] for key in keys)], rows)


def robustness(runs: Runs) -> list[str]:
    """Return the table of RSUM under noise, in percent of the clean RSUM."""
    rows = []
    for method in runs.methods:
        clean = runs.results(method)
        cells = []
        for percent in filter(None, runs.percents):
            noisy = runs.results(runs.name(method, percent))
            shares = [100 * a.metrics["names/rsum"] / b.metrics["names/rsum"] for a, b in zip(noisy, clean)]
            cells.append(cell(shares))
        if clean:
            rows.append([method, cell([x.metrics["names/rsum"] for x in clean]), *cells])
    return markdown(["names RSUM", "clean", *(f"{p}% of it" for p in filter(None, runs.percents))], rows)


def uncertainty(runs: Runs) -> list[str]:
    """Return the table of how uncertainty predicts matches and errors, for probabilistic methods."""
    heads = ["", "group", "subgroup", "keyword", "name", "rho log n", "deciles t2i", "AUROC i2t", "AUROC t2i"]
    rows = []
    for method in runs.methods:
        found = runs.results(method) if find_method(method).probabilistic else []
        if found:
            levels = [cell([x.metrics[f"trace/{level}"] for x in found], 3) for level in heads[1:5]]
            rho = cell([x.metrics["spearman/trace_true_matches"] for x in found], 2)
            deciles = cell([recall_by_trace(x)["captions_t2i"].spearman_bins for x in found], 2)
            refused = [
                cell([x.metrics[f"refusal/names_{way}/{side}/auroc"] for x in found], 2)
                for way, side in (("i2t", "image"), ("t2i", "text"))
            ]
            rows.append([method, *levels, rho, deciles, *refused])
    return markdown(heads, rows)


def adapted(runs: Runs) -> list[str]:
    """Return the table of source-free adaptation: the initial model, each weight, and the differences."""
    rows, keys = [], ("names/rsum", "captions/rsum")
    for source in runs.sources:
        before, plain = runs.results(source, "eval_lines"), runs.results(f"{source}-by-none")
        for weight in ("", *SOURCES[source]):
            found = runs.results(f"{source}-by-{weight}") if weight else before
            cells = [cell([x.metrics[key] for x in found]) for key in keys]
            each, one, other = (list(map(statistics, x)) for x in (found, before, plain))
            changes = [gain(one, each, keys[:1])["names/rsum"] if weight else ""]
            changes.append(gain(other, each, keys[:1])["names/rsum"] if weight not in ("", "none") else "")
            rows.append([f"{source}, {weight or 'as it was'}", *cells, *changes])
    return markdown(["", "names RSUM", "captions RSUM", "names RSUM: gain", "over no weight"], rows)


def few(runs: Runs) -> list[str]:
    """Return the few-shot table: recall by class in percent, and differences to the initial model.

    A method with its own score is also ranked by the cosine, which shows the effect on the embeddings alone.
    """
    keys, rows = ("base", "novel", "H", *few_shot.OTHERS), []
    seen = partial(few_shot.recalls, runs.folder, seeds=runs.seeds)
    before = seen(few_shot.START) if runs.few_shot else []
    ways = [
        (method, similarity)
        for method in few_shot.METHODS
        for similarity in (None, "mean")
        if similarity != find_method(method).score.name
    ]
    for method, similarity in [("", None), *ways] if before else ():
        found = seen(f"few-{method}", similarity=similarity) if method else before
        cells = [cell([100 * value_of(x[key]) for x in found]) for key in keys]
        changes = gain(before, found, keys).values() if method else [""] * len(keys)
        title = f"{method}, by the cosine" if similarity else method
        rows.append([title or f"{few_shot.START}, as it was", *cells, *changes])
    return markdown(["", *keys, *(f"{key}: gain" for key in keys)], rows)


KEYS = ("names/rsum", *(f"captions/{way}/{figure}" for figure in ("mAP@R", "R-Precision") for way in ("i2t", "t2i")))
PCMEPP = [("pcmepp", other) for other in ("pcme", "vse", "clip", "infonce", "triplet-sum", "prolip")]
TABLES: dict[str, Callable[[Runs], list[str]]] = {
    **{f"noise {percent}": partial(retrieval, percent=percent) for percent in (0, 20, 50)},
    "robustness": robustness,
    "pcme": partial(compared, pairs=[("pcme", other) for other in ("vse", "triplet-sum")], keys=KEYS),
    "pcmepp": partial(compared, pairs=PCMEPP, keys=KEYS),
    "vacsr": partial(compared, pairs=[("vacsr", other) for other in ("pcmepp", "pcme", "vse")], keys=KEYS),
    "prolip": partial(compared, pairs=[("prolip", other) for other in ("siglip", "clip")], keys=KEYS),
    "likelihood": partial(compared, pairs=[("likelihood", other) for other in ("clip", "prolip", "pcmepp")], keys=KEYS),
    "uncertainty": uncertainty,
    "source-free": adapted,
    "few-shot": few,
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the runs")
    add("--corpus", choices=list(RECIPES), default="emoji")
    add("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD", help="default: all")
    add("--noise", nargs="+", type=int, default=[0, 20, 50], metavar="PERCENT", help="wrong share (default: 0 20 50)")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    add("--steps", type=int, default=300, help="steps of every fine-tuning (default: %(default)s)")
    add("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    add("--flags", default="", help="additional flags of every training, as one text")
    add("--backbone-flags", default="", help="additional flags of the backbone's training")
    add("--adapt-flags", default="", help="additional flags of every adaptation")
    add("--tables-only", action="store_true", help="train nothing")
    add("--tables", nargs="+", choices=list(TABLES), metavar="TABLE", help=f"some of: {', '.join(TABLES)}")
    add("--write", type=Path, metavar="PAGE", help="page whose tables to replace; default: print them")
    options = parser.parse_args(arguments)
    if options.jobs < 1 or options.steps < 2 or not all(0 <= percent < 100 for percent in options.noise):
        parser.error("give --jobs of 1 or more, --steps of 2 or more, and --noise from 0 to 99")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the missing runs, then write the tables."""
    options = parse(arguments)
    runs = Runs(options)
    if not options.tables_only:
        try:
            runs.train()
        except KeyboardInterrupt:
            sys.exit("interrupted. Rerun the command to train the missing runs")
    tables = {name: TABLES[name](runs) for name in options.tables or TABLES}
    tables = {name: lines for name, lines in tables.items() if options.tables or len(lines) > 2}
    if options.write:
        prefix = "" if options.corpus == "emoji" else f"{options.corpus} "
        write(options.write, {prefix + name: lines for name, lines in tables.items()}, "studies/methods/study")
    else:
        print("\n\n".join("\n".join([name, "", *lines]) for name, lines in tables.items()))


if __name__ == "__main__":
    from prolip.utils import console

    console.command(main)
