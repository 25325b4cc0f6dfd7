"""The few-shot part of study.py: train on base subgroups of one designer, test novel ones and other designers.

A trained model is fine-tuned on up to 16 drawings of each subgroup in the first half, at most half of its drawings. All
texts are bare names of subgroups. Every model has read them in training, also those of novel subgroups: only the
drawings are new.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prolip.corpora.emoji import corpus as emoji
from prolip.corpora.emoji.export import write_emoji_classes
from prolip.embedder import Embedder
from prolip.evaluation.cache import FeatureStore
from prolip.evaluation.datasets.few_shot import draw, write_few_shot
from prolip.evaluation.datasets.webdataset import open_wds
from prolip.evaluation.embed import load_features
from prolip.evaluation.evaluate import compute_features, evaluate_dataset
from prolip.evaluation.metrics.bootstrap import Statistic, drawn_as, harmonic_mean_of

ROOT = Path(__file__).resolve().parents[3]
RECIPE = "scripts/recipes/emoji-few-shot.yaml"
#: Method of the fine-tuned models, most steps, and the methods of fine-tuning with their flags. (InfoNCE would be CLIP:
#: all matches of an image are one text, so their average equals each of them.)
START, STEPS = "siglip", 60
METHODS = {"vacsr": "--no-pooled-heads", "clip": ""}
#: Designer of the shots, unseen by all models, and two more domains: one unseen by all models, one seen by all.
DESIGNER, OTHERS = "emojione", ("fluent-emoji-high-contrast", "noto")
#: Without the subgroups that have a single drawing.
SELECT = "group=animals nature|food drink|travel places; subgroup!=time|animal amphibian|hotel"
TEMPLATE = "{c}"
FIGURE = "mean_per_class_recall"
SETS = ("base", "novel", *OTHERS)


def drawings_of(designer: str) -> emoji.Corpus:
    """Return all drawings of one designer."""
    return emoji.read([str(ROOT / f"data/emoji/{designer}.tar")])


def data(folder: Path, seed: int) -> Path:
    """Return the folder of a seed's shots and test sets, written if incomplete. Other designers: base classes only."""
    out = folder / "few-shot" / f"s{seed}"
    if not (out / "train.tar").exists():  # written last
        shutil.rmtree(out, ignore_errors=True)
        whole = open_wds(write_emoji_classes(drawings_of(DESIGNER).select(SELECT), out / "whole"))
        found = draw(whole, seed=seed)
        base = "|".join(whole.classnames[label] for label in found.classes["base"])
        for other in OTHERS:
            write_emoji_classes(drawings_of(other).select(f"subgroup={base}"), out / other, templates=[TEMPLATE])
        write_few_shot(found, whole, out, template=TEMPLATE)
    return out


def trainings(folder: Path, seed: int, steps: int) -> dict[str, Any]:
    """Return the runs of one seed, which start from its model, as a sweep."""
    given = f"--model local-dir:{folder / f'{START}-s{seed}' / 'model'} --train-data {data(folder, seed) / 'train.tar'}"
    variants = {f"few-{method}": f"--method {method} {flags} {given}" for method, flags in METHODS.items()}
    steps = min(steps, STEPS)
    flags = f"--max-steps {steps} --warmup {max(1, steps // 12)}"
    return {"recipe": RECIPE, "seeds": [seed], "flags": flags, "variants": variants}


def evaluate(folder: Path, seed: int) -> None:
    """Embed a seed's test sets with its models before and after fine-tuning, into a folder next to each model."""
    sets = [data(folder, seed) / name for name in SETS]
    for name in (START, *(f"few-{method}" for method in METHODS)):
        run = folder / f"{name}-s{seed}"
        if not is_whole(run):
            model, store = Embedder.load(f"local-dir:{run / 'model'}"), FeatureStore(run / "few_shot")
            for one in sets:
                compute_features(open_wds(one), model, store)


def is_whole(run: Path) -> bool:
    """Return whether all test sets of a run are embedded."""
    return len(list(run.glob("few_shot/tasks/*.json"))) == len(SETS)


def recalls(folder: Path, name: str, seeds: Sequence[int], similarity: str | None = None) -> list[dict[str, Statistic]]:
    """Return for every evaluated seed the mean recall of the classes by test set, and H of base and novel.

    Recall is by class because subgroups have 5 to 45 drawings: a quarter of the line drawings is "animal mammal".
    Each seed draws its own base and novel drawings.
    """
    found = []
    for seed in seeds:
        run = folder / f"{name}-s{seed}"
        if is_whole(run):
            stored = {one.dataset.name: one for one in load_features(FeatureStore(run / "few_shot"))}
            own = {
                part: evaluate_dataset(stored[part].dataset, stored[part], similarity).statistics[FIGURE]
                for part in SETS
            }
            own = {part: drawn_as(part if part in OTHERS else f"{part}-s{seed}", x) for part, x in own.items()}
            found.append(own | {"H": harmonic_mean_of(own["base"], own["novel"])})
    return found
