"""Quality of uncertainty on unseen designers, for docs/studies/new_designers.md.

    python scripts/studies/uncertainty/new_data.py train --out runs/new-data  # 15 runs of the demo, 8 minutes each
    python scripts/studies/uncertainty/new_data.py fit --out runs/new-data [--old runs/old]   # a minute each
    python scripts/studies/uncertainty/new_data.py tables --out runs/new-data --write docs/studies/new_designers.md

train: the demo's recipe, with all of its designers, without one of them, and without a fifth of its keywords and
subgroups (hold_out_texts.py), three seeds each. --models icons: scripts/recipes/icons.yaml, an hour each, with shards
from scripts/corpora/build_icons.py. fit: fits the variances again and evaluates each model on drawings. --old: a folder
of the same runs by an earlier commit, whose own fit is evaluated too. tables: cells are means over seeds with 95%
intervals, by bootstrap over concepts (a drawing and its texts), the same draws for all.
The table of labels: fits that know a part of the labels, against the true counts.
All choices were made on the bundled designers except EmojiOne; EmojiOne and the icons confirm them.
ECE: expected calibration error in 15 bins of equal mass.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import numpy as np
import torch
import yaml
from safetensors.torch import load_file
from scipy.stats import spearmanr

from prolip.cli.main import main as prolip
from prolip.corpora.emoji.corpus import LEVELS, Corpus
from prolip.corpora.emoji.evaluate import evaluate_corpus, gallery
from prolip.corpora.emoji.result import CorpusResult
from prolip.embedder import Embedder
from prolip.embeddings import Pairs
from prolip.evaluation.metrics.selective import auroc
from prolip.uncertainty import targets
from prolip.uncertainty.doubt import Evidence
from studies.tables import markdown, write
from studies.uncertainty import hold_out_texts

Arrays = dict[str, np.ndarray]
SEEDS, BINS, DRAWS = (0, 1, 2), 15, 1000
RECIPES = ROOT / "scripts/recipes"
DESIGNERS = ("noto", "noto-v1", "twemoji", "fluent-emoji-flat", "fluent-emoji")
#: Model -> files of designers excluded from training, and of those tested in addition to EmojiOne.
MODELS: dict[str, tuple[str, ...]] = {
    "demo": (),
    "notwemoji": ("twemoji",),
    "nonoto": ("noto", "noto-v1"),
    "nofluent": ("fluent-emoji-flat", "fluent-emoji"),
}
#: Model without some texts; its shards are in the folder HELD of the seed.
HELD, NEW = "held", "emojione"
#: Tests of the demo only: a designer it has seen, and a style unlike its training data.
SEEN, STYLE = "twemoji", "fluent-emoji-high-contrast"
#: Model of icons, and its tests: two styles of an unseen designer, and one of a seen designer.
ICONS, ICON_STYLES = "icons", ("remixicon-line", "remixicon-fill", "phosphor-regular")
#: Labels known to the fit; columns of their table.
KNOWN = ("all", "70%", "40%", "one an image")
LABELS = ("model", "labels known", "seeds", "count of known ones", "as if most were missing", "R", "target")
WAYS = ("own", "alone", "gallery")
#: Words in the names of columns that an earlier fit lacks.
LATER = ("doubt", "gallery", "inside")


def shards(without: Sequence[str] = ()) -> str:
    """Return the training shards."""
    return f"data/emoji/{{{','.join(name for name in DESIGNERS if name not in without)}}}.tar"


def recipe(model: str) -> Path:
    """Return the recipe of a model."""
    return RECIPES / ("icons.yaml" if model == ICONS else "emoji-demo.yaml")


def trained_on(model: str) -> dict[str, str]:
    """Return the part `data` of a model's recipe."""
    return yaml.safe_load(recipe(model).read_text(encoding="utf-8"))["data"]


def data_of(model: str, out: Path, seed: int) -> str:
    """Return the training shards of a run."""
    if model == ICONS:
        return trained_on(model)["train_data"]
    return shards(MODELS[model]) if model != HELD else shards().replace("data/emoji", str(out / f"{HELD}{seed}"))


def asked(model: str) -> list[str]:
    """Return the designers that a model is tested on."""
    if model == ICONS:
        return list(ICON_STYLES)
    return [NEW, *MODELS.get(model, ()), *((SEEN, STYLE) if model == "demo" else ())]


def drawings_of(model: str, designer: str) -> Corpus:
    """Return the test drawings of a model. Emoji are compared with all names of training, icons with their own."""
    if model == ICONS:
        return gallery([f"data/icons/{designer}.tar"])
    return gallery([f"data/emoji/{designer}.tar"], trained_on(model)["select"], ["data/emoji/noto.tar"])


def train(out: Path, seeds: Sequence[int], models: Sequence[str]) -> None:
    """Train the missing runs."""
    from training.checkpoint.run_dir import is_finished
    from training.main import main as run_training

    for seed in seeds:
        if HELD in models and not (out / f"{HELD}{seed}" / hold_out_texts.HELD).is_file():
            every, rule = [f"data/emoji/{name}.tar" for name in DESIGNERS], trained_on(HELD)["select"]
            hold_out_texts.main([*every, "--select", rule, "--seed", str(seed), "--output", str(out / f"{HELD}{seed}")])
        for model in models:
            name = f"{model}-s{seed}"
            words = [
                "--config",
                str(recipe(model)),
                "--train-data",
                data_of(model, out, seed),
                "--name",
                name,
                "--output",
                str(out),
                "--seed",
                str(seed),
                "--resume",
                "auto",
            ]
            if not is_finished(out / name) and (code := run_training(words)):
                sys.exit(code)


def fit(out: Path, seeds: Sequence[int], models: Sequence[str], old: Path | None) -> None:
    """Fit each run's model again, and save its evaluation on each designer in `asked`."""
    for seed in seeds:
        for model in models:
            run, kept = (old or out) / f"{model}-s{seed}/model", out / "asked"
            fitted = out / f"fitted/{model}-s{seed}"
            if not (fitted / "config.json").is_file():
                data = trained_on(model)
                words = ["--model", f"local-dir:{run}", "--data", data_of(model, old or out, seed)]
                words += ["--select", data["select"], "--caption-sampling", data["caption_sampling"]]
                words += ["--output", str(fitted), "--save-pairs", str(out / f"pairs/{model}-s{seed}.safetensors")]
                (out / "pairs").mkdir(exist_ok=True, parents=True)
                if code := prolip(["uncertainty", *words]):
                    sys.exit(code)
            kept.mkdir(exist_ok=True, parents=True)
            for kind, folder in (("new", fitted), *((("old", run),) if old else ())):
                for designer in asked(model):
                    path = kept / f"{kind}-{model}-{designer}-s{seed}.npz"
                    if not path.exists():
                        embedder = Embedder.load(f"local-dir:{folder}")
                        drawings = drawings_of(model, designer)
                        found: dict[str, Any] = dict(ask(embedder, evaluate_corpus(embedder, drawings)))
                        if model == HELD:
                            names = (old or out) / f"{HELD}{seed}" / hold_out_texts.HELD
                            held = json.loads(names.read_text(encoding="utf-8"))
                            found["text_held"] = np.isin(drawings.caption_table().texts, held)
                        np.savez(path, **found)
                        print(path.name, flush=True)


def ask(embedder: Embedder, result: CorpusResult) -> Arrays:
    """Return a model's predictions and the truth: arrays over drawings, or, with `text_`, over texts."""
    score, reader, texts = result.model_score, embedder.reader, result.text
    own = None if reader is None else reader.evidence(result.image.mean)
    clusters, units = result.clusters, score.units
    assert units is not None
    out: Arrays = {
        "concept": clusters["images"].of,
        "text_concept": clusters["captions"].of,
        "size": np.array(clusters["images"].size),
    }
    names, named = result.galleries["names"]
    scores, answers = score.pairwise(result.image, texts), -units.code_length(result.image.mean @ names.mean.T)
    rows, first, answer = torch.arange(len(scores)), scores.argmax(1), answers.argmax(1)
    out |= {"caption_true": result.text_relation.T[rows, first], "answer_true": named.T[rows, answer]}
    for way in WAYS:
        doubt = None if way == "own" or own is None else score.doubts(own, own if way == "gallery" else None)
        p = score.match_probability(scores[rows, first], doubt, units.share(texts.trace)[first])
        q = -units.code_length(result.image.mean @ names.mean.T, doubt)
        assert p is not None
        out |= {f"caption_{way}": p.double().numpy(), f"answer_{way}": q.double().exp()[rows, answer].numpy()}
    out |= neighbours(result, embedder, own)
    level = np.full(len(result.table.texts), -1)
    for number, name in enumerate(LEVELS):
        level[result.table.text[result.table.rows(name)]] = number
    expected, true = result.expected_matches, result.text_relation.sum(1)
    assert expected is not None
    out |= {
        "text_expected": expected,
        "text_true": true,
        "text_level": level,
        "text_in_all": result.table.true_matches,
        "text_trace": texts.trace.numpy(),
    }
    if reader is not None:
        low, high = (x.numpy() * len(rows) for x in reader.shares(texts.trace, texts.mean))
        out["text_inside"] = (low <= true) & (true <= high)
    for way, ranking in zip(("i2t", "t2i"), result.rankings["captions"]):
        out[("text_" if way == "t2i" else "") + f"ap_{way}"] = ranking.ap_at_r.double().numpy()
    return out


def neighbours(result: CorpusResult, embedder: Embedder, own: Evidence | None) -> Arrays:
    """Return whether the nearest other drawing has another subgroup, and the signs that predict it."""
    cosine = result.image.mean @ result.image.mean.T
    cosine.fill_diagonal_(-2)
    near = cosine.max(1)
    kinds = np.array([result.corpus.concepts[row].subgroup for row in result.corpus.drawing_concepts])
    found = {
        "wrong": kinds[near.indices] != kinds,
        "by_trace": result.uncertainty(result.image),
        "by_neighbour": -near.values.numpy(),
    }
    if embedder.reader is not None:
        found["by_ambiguity"] = embedder.reader.ambiguity(result.image.mean).numpy()
    return found


# --- labels that are missing ------------------------------------------------------------------------------------------
def with_labels(pairs: Pairs, known: str, seed: int) -> tuple[Pairs, torch.Tensor]:
    """Return pairs with a known part, "all", "70%" or "one an image", and the rows of their texts."""
    random = torch.Generator().manual_seed(seed)
    rank = torch.rand(len(pairs.image_of), generator=random)
    if known.endswith("%"):
        kept = rank < float(known.removesuffix("%")) / 100
    else:
        least = torch.ones(len(pairs.image)).scatter_reduce(0, pairs.image_of, rank, "amin")
        kept = (rank == least[pairs.image_of]) | torch.tensor(known == "all")
    images, image_of = pairs.image_of[kept].unique(return_inverse=True)
    texts, text_of = pairs.text_of[kept].unique(return_inverse=True)
    image, text = pairs.image[images], pairs.text[texts]
    return Pairs(image=image, text=text, image_of=image_of, text_of=text_of, scale=pairs.scale), texts


def by_labels(out: Path) -> list[list[str]]:
    """Return the rows of the table `labels`: shares of texts whose target is within a factor of two of all labels."""
    rows = []
    for model in ("demo", ICONS):
        paths = sorted((out / "pairs").glob(f"{model}-s*.safetensors"))
        every = [Pairs.from_tensors(load_file(path)) for path in paths]
        for known in KNOWN if every else ():
            found: dict[str, list[float]] = {"known": [], "all missing": [], "R": [], "target": []}
            for seed, pairs in enumerate(every):
                true = pairs.text_of.bincount(minlength=len(pairs.text))
                some, texts = with_labels(pairs, known, seed)
                with patch.object(targets, "missing_labels", wraps=targets.missing_labels) as asked:
                    target, count = targets.text_target(some)
                found["R"].append(targets.missing_labels(*asked.call_args.args))
                with patch.object(targets, "missing_labels", return_value=1.0):
                    most = targets.text_target(some)[0]
                wanted = true[texts] * len(some.image) / len(pairs.image)
                for name, n in (("known", count), ("all missing", most.exp()), ("target", target.exp())):
                    found[name].append(float(((n / wanted).log().abs() <= np.log(2)).double().mean()))
            rows.append([model, known, str(len(every)), *(f"{np.mean(x):.2f}" for x in found.values())])
    return rows


# --- figures ----------------------------------------------------------------------------------------------------------
def ece(probability: np.ndarray, true: np.ndarray) -> float:
    """Compute the expected calibration error in bins of equal mass."""
    parts = np.array_split(probability.argsort(kind="stable"), BINS)
    return float(sum(len(rows) * abs(probability[rows].mean() - true[rows].mean()) for rows in parts) / len(true))


def within(x: Arrays, level: int | None = None) -> float:
    """Return the share of texts, among those with a match, whose expected matches are within a factor of two."""
    kept = (x["text_true"] > 0) & ((x["text_level"] == level) if level is not None else True)
    right = np.abs(np.log(x["text_expected"][kept] / x["text_true"][kept])) <= np.log(2)
    return float(right.mean()) if len(right) else np.nan


def by_level(name: str) -> Callable[[Arrays], float]:
    """Return `within` for the texts of a level."""
    return lambda x: within(x, LEVELS.index(name))


def error(what: str, way: str) -> Callable[[Arrays], float]:
    """Return `ece` of first captions, or of answers among the names."""
    return lambda x: ece(x[f"{what}_{way}"], x[f"{what}_true"])


def finds(sign: str) -> Callable[[Arrays], float]:
    """Return the R-AUROC of a sign."""
    return lambda x: auroc(x[f"by_{sign}"], x["wrong"])


def held(x: Arrays) -> Arrays:
    """Select the texts held out of training that match any drawing."""
    kept = x["text_held"] & (x["text_true"] > 0)
    return {name: value[kept] for name, value in x.items() if name.startswith("text_")}


def rank(x: Arrays) -> float:
    """Compute Spearman's correlation of the traces of texts with the logarithm of their number of matching concepts."""
    return float(spearmanr(x["text_trace"], np.log(x["text_in_all"])).statistic)


#: Table -> column -> metric.
FIGURES: dict[str, dict[str, Callable[[Arrays], float]]] = {
    "probability": {
        f"{what}, {said}": error(kind, way)
        for what, kind in (("first captions", "caption"), ("answers", "answer"))
        for said, way in (("model's own", "own"), ("`doubt`", "alone"), ("with a gallery", "gallery"))
    },
    "counts": {
        "all": within,
        **{f"{name}s": by_level(name) for name in LEVELS},
        "Spearman": rank,
        "inside the interval": lambda x: float(x["text_inside"][x["text_true"] > 0].mean()),
    },
    "unseen": {
        "texts": lambda x: float((x["text_held"] & (x["text_true"] > 0)).sum()),
        "within a factor of 2": lambda x: within(held(x)),
        "Spearman": lambda x: rank(held(x)),
        "inside the interval": lambda x: float(held(x)["text_inside"].mean()),
    },
    "ambiguity": {"ambiguity": finds("ambiguity"), "trace": finds("trace"), "neighbour's cosine": finds("neighbour")},
    "retrieval": {
        "i2t": lambda x: float(np.nanmean(x["ap_i2t"])),
        "t2i": lambda x: float(np.nanmean(x["text_ap_t2i"])),
    },
}


#: Column of the table of gains -> table, current column, and column of the earlier fit.
GAINS = {
    "first captions": ("probability", "first captions, with a gallery", "first captions, model's own"),
    "answers": ("probability", "answers, with a gallery", "answers, model's own"),
    "within a factor of 2": ("counts", "all", "all"),
    "Spearman": ("counts", "Spearman", "Spearman"),
    "captions i2t": ("retrieval", "i2t", "i2t"),
}


def draws_of(x: Arrays, concepts: np.ndarray) -> Arrays:
    """Return the drawings and texts of sampled concepts, as often as they were sampled."""
    often, rows = np.bincount(concepts, minlength=int(x["size"])), {}
    for side, of in (("", x["concept"]), ("text_", x["text_concept"])):
        rows[side] = np.repeat(np.arange(len(of)), often[of])
    return {
        name: value if name == "size" else value[rows["text_" if name.startswith("text_") else ""]]
        for name, value in x.items()
    }


def over_seeds(runs: Sequence[Arrays], draws: int, later: bool) -> dict[str, dict[str, np.ndarray]]:
    """Return metrics by table and column, means over seeds: of all drawings, then of each bootstrap draw, (1 + draws,).

    later: whether the fit has doubt and intervals.
    """
    random, size = np.random.default_rng(0), int(runs[0]["size"])
    wanted = {
        table: {name: figure for name, figure in figures.items() if later or not any(x in name for x in LATER)}
        for table, figures in FIGURES.items()
        if (table == "unseen") <= ("text_held" in runs[0]) and (later or table not in ("unseen", "ambiguity"))
    }
    found: dict[str, dict[str, list[float]]] = {table: {name: [] for name in wanted[table]} for table in wanted}
    for draw in range(1 + draws):
        drawn = random.integers(size, size=size) if draw else np.arange(size)
        some = [draws_of(x, drawn) for x in runs]
        for table, figures in wanted.items():
            for name, figure in figures.items():
                found[table][name].append(float(np.mean([figure(x) for x in some])))
    return {table: {name: np.array(x) for name, x in columns.items()} for table, columns in found.items()}


def shown(values: np.ndarray | None, digits: int = 3) -> str:
    """Format a metric and its interval; empty for None."""
    if values is None:
        return ""
    low, high = np.nanquantile(values[1:], (0.025, 0.975)) if len(values) > 1 else (np.nan, np.nan)
    return re.sub(r"\b0\.", ".", f"{values[0]:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]")


def tables(out: Path, draws: int) -> dict[str, list[str]]:
    """Return the tables of the page by name."""
    rows: dict[str, list[list[str]]] = {table: [] for table in (*FIGURES, "gains")}
    for model in (*MODELS, ICONS, HELD):
        name = {"demo": "demo", ICONS: ICONS, HELD: "without these texts"}.get(model)
        name = name or f"without {' and '.join(MODELS[model])}"
        for designer in asked(model):
            kinds = {}
            for kind, said in (("old", ", fitted as before"), ("new", "")):
                paths = sorted((out / "asked").glob(f"{kind}-{model}-{designer}-s*.npz"))
                runs = [dict(np.load(path)) for path in paths]
                found = kinds[kind] = over_seeds(runs, draws, kind == "new") if runs else {}
                for table in ("unseen",) if model == HELD else [one for one in found if one != "unseen"]:
                    cells = [
                        shown(found.get(table, {}).get(column), 0 if column == "texts" else 3)
                        for column in FIGURES[table]
                    ]
                    rows[table] += [[f"{name}{said}", designer, str(len(runs)), *cells]] if table in found else []
            if all(kinds.values()) and model != HELD:
                cells = [
                    shown(kinds["new"][table][now] - kinds["old"][table][then]) for table, now, then in GAINS.values()
                ]
                rows["gains"].append([name, designer, *cells])
    written = {table: markdown(["model", "drawings of", "seeds", *FIGURES[table]], rows[table]) for table in FIGURES}
    written["gains"] = markdown(["model", "drawings of", *GAINS], rows["gains"])
    return written | {"labels": markdown(LABELS, by_labels(out))}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("step", choices=("train", "fit", "tables"))
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the runs")
    add("--old", type=Path, metavar="DIR", help="folder of the runs of an earlier commit, to fit again")
    add("--seeds", nargs="+", type=int, default=list(SEEDS), metavar="SEED")
    every = [*MODELS, HELD]
    add("--models", nargs="+", choices=(*every, ICONS), default=every, metavar="MODEL", help="default: all but icons")
    add("--draws", type=int, default=DRAWS, help="bootstrap draws (default: %(default)s)")
    add("--write", type=Path, metavar="PAGE", help="page whose tables to replace")
    options = parser.parse_args(arguments)
    if options.step == "train":
        train(options.out, options.seeds, options.models)
    elif options.step == "fit":
        fit(options.out, options.seeds, options.models, options.old)
    else:
        found = tables(options.out, options.draws)
        if options.write:
            write(options.write, found, "studies/uncertainty/new_data")
        print(*("\n".join([f"{name}:", *lines, ""]) for name, lines in found.items()), sep="\n")


if __name__ == "__main__":
    main()
