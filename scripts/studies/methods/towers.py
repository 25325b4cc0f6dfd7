"""Two studies of OpenCLIP's towers with readers, on drawings.

    python scripts/studies/methods/towers.py start --out runs/towers --old ../before
    python scripts/studies/methods/towers.py reader --out runs/towers

start: a small tower like SigLIP's learns some designers' drawings by SigLIP's loss. Methods fine-tune its weights on
other designers' drawings. Comparisons are the deterministic model, a model from random weights, and, with --old, the
conversion that readers replaced: a checkout of commit 8437f18b, whose bidirectional towers have a [CLS] of their own.
Models are measured before the first step, after 50 and after 500.
reader: the same towers by the same loss from random weights, with [UNC] among the tower's tokens, with a reader, or
with two other readers (reader_variants.py).
Finished runs are kept, so the same command resumes an interrupted study. Cells: the mean over seeds, each seed in
brackets; differences with their 95% interval, by bootstrap over concepts (a drawing and its texts), the seeds averaged
in every draw. "asked" is the trace of a text at which its PPCL gradient is zero.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import numpy as np
import torch

import sweep
from prolip.cli.main import main as prolip
from prolip.corpora.emoji import uncertainty
from prolip.corpora.emoji.result import CorpusResult, load
from prolip.evaluation.metrics.bootstrap import Statistic, auroc_of, clustered
from prolip.evaluation.metrics.selective import spearman
from prolip.factory import create_model
from prolip.models.checkpoint import save_pretrained
from prolip.utils.outputs import replacing_folder
from studies.methods.study import DESIGNERS, METHODS
from studies.tables import cell, gain, markdown, statistics, value_of, write

RECIPE, BASE = "scripts/recipes/emoji-paper.yaml", "base"
#: Measured steps of the first study, and steps of both models of the second.
MEASURED, READER_STEPS = (0, 50, 500), 1200
VISION = {"image_size": 64, "patch_size": 8, "width": 192, "layers": 3, "head_width": 64}
TEXT = {
    "context_length": 12,
    "vocab_size": 49409,
    "width": 192,
    "heads": 3,
    "layers": 2,
    "no_causal_mask": True,
    "pool_type": "last",
    "proj_bias": True,
    "norm_kwargs": {"eps": 1e-6},
}
TOWERS = {"embed_dim": 192, "vision_cfg": VISION, "text_cfg": TEXT}
#: [MASK] is one token more than in OpenCLIP's encoding; both towers of the second study start equally certain.
TOKENS = {"mask_token_id": 49408, "special_token_ids": [49406, 49407]}
OWN = TOWERS | {"text_cfg": TEXT | {"embed_cls": True}, "prolip_cfg": TOKENS | {"init_unc_bias": -10.0}}
READER = {"prolip_cfg": TOKENS | {"forward": "reader", "init_unc_bias": -10.0}}
#: Folder -> configuration of a model: OpenCLIP's own, the same for readers with a [MASK], and ours.
FOLDERS: dict[str, dict[str, Any]] = {
    "openclip": {"model_cfg": TOWERS, "preprocess_cfg": {}},
    "reader": {"model_cfg": TOWERS, "preprocess_cfg": {}} | READER,
    "in-tower": {"model_cfg": OWN, "preprocess_cfg": {}},
}
#: Row -> method, the folder of its model, and whether it starts from the base.
ROWS = {
    "siglip": ("siglip", "openclip", True),
    "prolip": ("prolip", "openclip", True),
    "likelihood": ("likelihood", "openclip", True),
    "pcmepp": ("pcmepp", "openclip", True),
    "prolip, old conversion": ("prolip", "in-tower", True),
    "prolip, random weights": ("prolip", "openclip", False),
}
OLD = "prolip, old conversion"
NAMES = "names/i2t/R@1"
#: Row of the second study -> its model, and flags of its own.
READERS = {
    "in-tower": ("in-tower", ""),
    "reader": ("reader", ""),
    "reader, no gradient into the tower": ("reader", "--method prolip-apart"),
    "reader, tokens of all blocks": ("reader", "--method prolip-levels"),
}
#: Column of the second study -> its statistic.
COLUMNS = {
    "names R@1 i2t": NAMES,
    "t2i": "names/t2i/R@1",
    "captions mAP@R i2t": "captions/i2t/mAP@R",
    "rho true matches": "rho",
    "AUROC of errors i2t": "errors by image",
    "AUROC t2i": "errors by text",
    "AUROC t2i of asked": "errors by asked",
    "rho asked": "rho asked",
    "spread, 0.01 nat": "spread",
}
#: Pairs of a batch of the recipe.
BATCH = 128


def configure(folder: Path, seeds: Sequence[int]) -> None:
    """Write the configurations of FOLDERS, and next to each a model with random weights for every seed."""
    for name, config in FOLDERS.items():
        bare = folder / "towers" / name
        with replacing_folder(bare) as place:
            file = "config.json" if name == "in-tower" else "open_clip_config.json"
            (place / file).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for seed in seeds:
            torch.manual_seed(seed)
            model = create_model(f"local-dir:{bare}", load_weights=False)
            save_pretrained(model, folder / "towers" / f"{name}-s{seed}")


def base(folder: Path, flags: str) -> dict[str, Any]:
    """Return the common initial model as a sweep."""
    data = f"--train-data {DESIGNERS['emoji'][0]} --train-num-samples 13056"
    words = f"--method siglip --model local-dir:{folder / 'towers/openclip-s0'} --max-steps 1200 --save-frequency 0"
    return {"recipe": RECIPE, "seeds": [0], "flags": f"{words} {data} {flags}", "variants": {BASE: ""}}


def started(folder: Path, seed: int, flags: str) -> dict[str, Any]:
    """Return every row of the first study, and its model before the first step, with one seed, as a sweep.

    The latter is a run of one step with a tiny learning rate, which the old conversion supports as well.
    """
    variants, saving = {}, f"--save-every-steps {MEASURED[1]} --keep-checkpoints 0"
    for row, (method, tower, goes_on) in ROWS.items():
        weights = folder / f"{BASE}-s0" / "model/open_clip_model.safetensors"
        start = f"--pretrained {weights} {'--init-uncertainty' if row == OLD else ''}" if goes_on else ""
        place = folder / "towers" / (tower if goes_on else f"{tower}-s{seed}")
        words = f"--method {method} {METHODS[method]} --model local-dir:{place} {start}"
        variants[slug(row)] = f"{words} --max-steps {MEASURED[-1]} {saving}"
        variants[slug(row, 0)] = f"{words} --max-steps 1 --lr 1e-30 --warmup 0"
    own = f"--train-data {DESIGNERS['emoji'][1]} --train-num-samples 9600 --warmup {MEASURED[1]}"
    words = f"{own} --init-logit-bias auto --save-frequency 0 {flags}"
    return {"recipe": RECIPE, "seeds": [seed], "flags": words, "variants": variants}


def compared(folder: Path, seed: int, flags: str) -> dict[str, Any]:
    """Return the second study with one seed as a sweep."""
    variants = {
        slug(row): f"--model local-dir:{folder / 'towers' / f'{name}-s{seed}'}{' ' * bool(own)}{own}"
        for row, (name, own) in READERS.items()
    }
    words = f"--method prolip --max-steps {READER_STEPS} --save-frequency 0 --init-logit-bias auto {flags}"
    return {"recipe": RECIPE, "seeds": [seed], "flags": words, "variants": variants}


def slug(row: str, step: int | None = None) -> str:
    """Return the name of a row's runs, without their seed."""
    return row.replace(", ", "-").replace(" ", "-") + ("" if step is None else f"-{step}")


def train(wanted: Mapping[str, Any], variants: Sequence[str], folder: Path, options: argparse.Namespace) -> None:
    """Train the missing runs of a sweep; the old conversion runs from its checkout."""
    old = [name for name in variants if name.startswith(slug(OLD))]
    sweep.train_all(dict(wanted), [name for name in variants if name not in old], folder, options.jobs)
    if options.old and old:
        part = {
            "recipe": wanted["recipe"],
            "seeds": wanted["seeds"],
            "flags": wanted["flags"],
            "columns": {},
            "variants": {name: wanted["variants"][name] for name in old},
        }
        file = folder / "old.yaml"
        file.write_text(json.dumps(part), encoding="utf-8")  # JSON is YAML
        command = [sys.executable, "scripts/sweep.py", str(file), "--output", str(folder), "--jobs", str(options.jobs)]
        subprocess.run(command, cwd=options.old, env=environment(options.old), check=True)


def environment(checkout: Path) -> dict[str, str]:
    """Return the environment for a program of a checkout."""
    return os.environ | {"PYTHONPATH": str(checkout / "src")}


def measure_early(run: Path, checkout: Path) -> None:
    """Evaluate a run's model after MEASURED[1] steps, then delete its checkpoints."""
    found, out = run / f"checkpoints/step_{MEASURED[1]}.pt", run / f"eval_{MEASURED[1]}"
    if not found.exists() or out.exists():
        return
    model = run / f"step_{MEASURED[1]}"
    val = json.loads((run / "config.json").read_text(encoding="utf-8"))["val"]
    drawings = checkout / val["val_data"][0].removeprefix("emoji:")
    words = ["--data", str(drawings), "--names", str(checkout / val["val_names"]), "--select", val["val_select"]]
    for command in (
        ["export", "checkpoint", str(found), "--output", str(model)],
        ["eval", "emoji", "--model", f"local-dir:{model}", *words, "--output", str(out)],
    ):
        if checkout != ROOT:
            program = [sys.executable, "-c", "import sys; from prolip.cli.main import main; sys.exit(main())"]
            subprocess.run([*program, *command], env=environment(checkout), check=True)
        elif code := prolip(command):
            raise SystemExit(code)
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(model)


# --- tables ----------------------------------------------------------------------------------------------------------
def all_statistics(result: CorpusResult) -> dict[str, Statistic]:
    """Return the statistics of the second study: retrieval; AUROC of errors; rank correlations of a text's uncertainty
    with its matches and its asked trace; AUROC of errors by the latter; logit spread over the middle 68% of traces.
    """
    doubt, true, wanted = result.uncertainty(result.text), np.log(result.table.true_matches), asked(result)
    known, scale = ~np.isnan(wanted), result.model_score.scale

    assert scale is not None  # every method of this study has one

    def over_texts(of: Callable[[np.ndarray], float]) -> Statistic:
        def estimate(weights: Mapping[str, np.ndarray]) -> np.ndarray:
            return np.array([of(np.repeat(np.arange(len(true)), drawn.astype(int))) for drawn in weights["captions"]])

        return Statistic({"captions": len(true)}, estimate)

    def agreement(rows: np.ndarray) -> float:
        rows = rows[known[rows]]
        return spearman(doubt[rows], wanted[rows])

    own = {
        "rho": over_texts(lambda rows: spearman(doubt[rows], true[rows])),
        "rho asked": over_texts(agreement),
        "spread": over_texts(lambda rows: scale / 4 * float(np.subtract(*np.percentile(doubt[rows], [84, 16])))),
    }
    # drawings among names, and the reverse
    for (_, ranking, signs), side in zip(uncertainty.cases(result), ("image", "text")):
        wrong = (~ranking.hit(1)).double().where(ranking.answerable, torch.nan)
        own[f"errors by {side}"] = auroc_of(signs[side], wrong, "images" if side == "image" else "names")
    own["errors by asked"] = auroc_of(wanted[result.name_texts], wrong, "names")
    return statistics(result) | {name: clustered(one, result.clusters) for name, one in own.items()}


def asked(result: CorpusResult) -> np.ndarray:
    """Return the trace t of each text at which PPCL's gradient is zero, (T,), in batches of B drawings, one its own.

    (B - 1) mean_i p_i + mean_own p_i = 1, p_i = sigmoid(a (m.m_i - (t + t_i) / 2) + b). NaN for a text of no drawing.
    """
    score: Any = result.model_score
    scale, bias = float(score.scale), float(score.bias)
    cosines = (result.text.mean @ result.image.mean.mT).double()
    logits = scale * (cosines - result.image.trace.double() / 2) + bias
    own = torch.from_numpy(result.text_relation).double()
    own = own / own.sum(1, keepdim=True)
    low = torch.full((len(logits), 1), -50.0, dtype=torch.double)
    high = -low
    for _ in range(60):  # falls with t
        middle = (low + high) / 2
        p = torch.sigmoid(logits - scale * middle / 2)
        many = ((BATCH - 1) * p.mean(1) + (own * p).sum(1))[:, None] > 1
        low, high = torch.where(many, middle, low), torch.where(many, high, middle)
    return torch.where(own.isnan().any(1), torch.nan, low[:, 0]).numpy()


def results(folder: Path, name: str, seeds: Sequence[int], evaluation: str = "eval") -> list[CorpusResult]:
    """Return the results of the finished seeds."""
    places = [folder / f"{name}-s{seed}" / evaluation for seed in seeds]
    return [load(place) for place in places if (place / "metrics.json").exists()]


def of_start(folder: Path, seeds: Sequence[int]) -> list[str]:
    """Return the table of the first study.

    R@1 of names by the cosine of means, by steps; the gain over the deterministic model; R@1 by the method's own score;
    the distance of the means at step 0 from the deterministic model's.
    """
    last = MEASURED[-1]
    heads = [
        *(f"step {step}" for step in MEASURED),
        f"gain at step {last}",
        f"step {last} by its own score",
        "means at step 0: difference",
    ]
    return markdown(["", *heads], list(start_rows(folder, seeds)))


def start_rows(folder: Path, seeds: Sequence[int]) -> Iterator[Sequence[str]]:
    """Yield one row for each model with finished runs."""
    first, last = results(folder, slug("siglip", 0), seeds), results(folder, slug("siglip"), seeds)
    for row in ROWS:
        every = [
            results(folder, slug(row, 0), seeds),
            results(folder, slug(row), seeds, f"eval_{MEASURED[1]}"),
            results(folder, slug(row), seeds),
        ]
        if all(every):
            means = [[statistics(by_means(result)) for result in one] for one in every]
            cells = [cell([100 * value_of(one[NAMES]) for one in found]) for found in means]
            better = gain(list(map(statistics, last)), means[-1], [NAMES])[NAMES]
            own = cell([100 * result.metrics[NAMES] for result in every[-1]])
            apart = max(float((a.image.mean - b.image.mean).abs().max()) for a, b in zip(first, every[0]))
            yield row, *cells, "" if row == "siglip" else better, own, f"{apart:.1e}"


def by_means(result: CorpusResult) -> CorpusResult:
    """Return the same result, ranked by the cosine of means."""
    info = {name: value for name, value in result.info.items() if name not in ("score", "model_score")}
    return replace(result, info=info | {"similarity": "mean"})


def of_reader(folder: Path, seeds: Sequence[int]) -> list[str]:
    """Return the table of all models of the second study, and their differences."""
    found = {row: [all_statistics(one) for one in results(folder, slug(row), seeds)] for row in READERS}
    rows = [
        [title, *(cell([100 * value_of(one[key]) for one in own]) for key in COLUMNS.values())]
        for title, own in found.items()
        if own
    ]
    for row in [row for row in READERS if row != "in-tower"]:
        before = "in-tower" if row == "reader" else "reader"
        if len(found[row]) == len(found[before]) > 0:
            rows.append([f"{row} - {before}", *gain(found[before], found[row], list(COLUMNS.values())).values()])
    return markdown(["percent", *COLUMNS], rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("study", choices=["start", "reader"])
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the runs")
    add("--old", type=Path, metavar="CHECKOUT", help="checkout of commit 8437f18b, for the old conversion")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    add("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    add("--flags", default="", help="additional flags of every training, as one text")
    add("--tables-only", action="store_true", help="train nothing")
    add("--write", type=Path, metavar="PAGE", help="page whose table to replace; default: print it")
    options = parser.parse_args(arguments)
    if options.old is not None and not (options.old / "scripts/sweep.py").is_file():
        parser.error(
            f"--old {options.old} is not a checkout of this project. Type: git worktree add {options.old} 8437f18b"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the missing runs of a study, then write its table."""
    options = parse(arguments)
    folder, seeds = options.out.resolve(), options.seeds
    if options.study == "reader":
        os.environ |= {"PROLIP_METHODS": "studies.methods.reader_variants", "PYTHONPATH": str(ROOT / "scripts")}
    if not options.tables_only:
        configure(folder, seeds)
        if options.study == "start":
            train(base(folder, options.flags), [BASE], folder, options)
        for seed in seeds:
            wanted = (started if options.study == "start" else compared)(folder, seed, options.flags)
            train(wanted, list(wanted["variants"]), folder, options)
        for row, seed in product(ROWS, seeds) if options.study == "start" else ():
            checkout = options.old.resolve() if row == OLD and options.old else ROOT
            measure_early(folder / f"{slug(row)}-s{seed}", checkout)
    table = (of_start if options.study == "start" else of_reader)(folder, seeds)
    if options.write:
        write(options.write, {options.study: table}, "studies/methods/towers")
    else:
        print("\n".join(table))


if __name__ == "__main__":
    from prolip.utils import console

    console.command(main)
