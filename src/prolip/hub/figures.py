"""What a card says of a run: its figures in words, its data and their licences, and what its traces mean."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from prolip.data.reading.named import without_word
from prolip.data.reading.shards import expand_source
from prolip.uncertainty.units import Units, in_words
from prolip.utils.documents import shown

#: Figures of the corpus in the order of the card: key, what it is, whether it is a share.
KNOWN = (
    ("names/i2t/R@1", "pictures that find their name first", True),
    ("names/i2t/R@5", "pictures that find their name among the first five", True),
    ("names/t2i/R@1", "names that find their picture first", True),
    ("captions/i2t/mAP@R", "mAP@R, pictures to all captions", True),
    ("captions/t2i/mAP@R", "mAP@R, captions to pictures", True),
    ("zero_shot/subgroup/top1", "zero-shot, {zero_shot/subgroup/classes} classes", True),
    ("zero_shot/group/top1", "zero-shot, {zero_shot/group/classes} classes", True),
    ("refusal/names_i2t/score/auroc", "AUROC of wrong names, by the score", False),
    ("refusal/names_i2t/all/auroc", "AUROC of wrong names, by answer and novelty", False),
    ("refusal/names_i2t/answer/ece", "ECE of the answer's probability", False),
    ("matches/within_factor_2", "captions whose number of matches is predicted within a factor of 2", True),
    ("spearman/trace_true_matches", "Spearman's correlation of traces with true matches", False),
)
CHANCE = {"names/i2t/R@1": "names/i2t/chance_R@1", "names/i2t/R@5": "names/i2t/chance_R@5",
          "names/t2i/R@1": "names/t2i/chance_R@1",
          "matches/within_factor_2": "matches/chance_within_factor_2"}  # fmt: skip
#: What other test sets are measured by.
TASKS = ("acc1", "mean_per_class_recall", "mean_recall@1", "i2t/R@1", "t2i/R@1", "mAP")
#: The bundled pictures by the beginning of their shard's name, the longest first. Texts: Unicode's, or the sets' own.
LICENCES = {
    "emoji": {"noto": "Apache-2.0", "twemoji": "CC-BY-4.0", "emojione": "CC-BY-4.0", "fluent-emoji": "MIT"},
    "icons": {"tabler": "MIT", "phosphor": "MIT", "lucide": "ISC", "unicons": "Apache-2.0", "mdi": "Apache-2.0",
              "remixicon": "Apache-2.0"},
}  # fmt: skip
#: Traces that are explained: of captions at a level, as the evaluation found them.
LEVELS = (("trace/group", "a group's name"), ("trace/subgroup", "a subgroup's name"), ("trace/keyword", "a keyword"),
          ("trace/name", "a name"))  # fmt: skip
#: Figures that lie in these bounds by what they are.
BOUNDS: Mapping[str, tuple[float, float]] = (
    dict.fromkeys([*(key for key, _, _ in KNOWN), *CHANCE.values()], (0, 1))
    | dict.fromkeys([key for key, _ in LEVELS], (0, 10**6))
    | dict.fromkeys(["zero_shot/group/classes", "zero_shot/subgroup/classes"], (1, 10**9))
    | {"spearman/trace_true_matches": (-1, 1), "step": (0, 2**63)}
)


def check_metrics(metrics: Any, path: object) -> dict[str, Any]:
    """The figures of an eval.json, those that are not finite as None; ValueError for what the figures cannot be."""
    if not isinstance(metrics, dict):
        raise ValueError(f"{path} is {shown(metrics)}: want the figures of an evaluation, name -> number")
    found = {key: None if isinstance(value, float) and not math.isfinite(value) else value
             for key, value in metrics.items()}  # fmt: skip
    for key, value in found.items():
        bounds = BOUNDS.get(key, (0, 1) if key.partition("/")[2] in TASKS else None)
        kinds, noun = ((int,), "whole number") if key == "step" else ((int, float), "number")
        if value is not None and bounds and not (type(value) in kinds and bounds[0] <= value <= bounds[1]):
            raise ValueError(f"{path}: {shown(key)} is {shown(value)}: want a {noun} from {bounds[0]} to {bounds[1]:,}")
    return found


class Figure(NamedTuple):
    """One line of the table. key: as eval.json has it; value: as it is written; chance: of no model at all, or ""."""

    key: str
    words: str
    value: str
    chance: str
    number: float


def figures(metrics: Mapping[str, Any]) -> list[Figure]:
    """The figures of an evaluation that a card shows, those of the corpus first."""
    found = []
    for key, words, share in KNOWN:
        if isinstance(value := metrics.get(key), (int, float)) and math.isfinite(value):
            for part in [part for part in metrics if f"{{{part}}}" in words]:
                words = words.replace(f"{{{part}}}", f"{metrics[part]:.0f}")
            chance = metrics.get(CHANCE.get(key, ""))
            found.append(Figure(key, words, text(value, share), "" if chance is None else text(chance, share), value))
    known = {key.partition("/")[0] for key, _, _ in KNOWN} | {"recall_by_trace", "trace", "inclusion"}
    for key, value in metrics.items():
        task, _, rest = key.partition("/")
        if rest in TASKS and task not in known and isinstance(value, (int, float)) and math.isfinite(value):
            found.append(Figure(key, f"{task}: {rest}", text(value, True), "", value))
    return found


def text(value: float, share: bool) -> str:
    return f"{value:.1%}" if share else f"{value:.3f}"


def licences(sources: Sequence[str | None]) -> list[tuple[str, str]]:
    """(shard, licence of its pictures) of the bundled data among these; "" where it is not known."""
    found = {}
    for source in sources:
        for part in without_word(source or "").split("::"):
            for url in shards_of(part):
                path = Path(url)
                known = LICENCES.get(path.parent.name, {}) if path.suffix == ".tar" else {}
                names = sorted((name for name in known if path.stem.startswith(name)), key=len)
                found["/".join(path.parts[-2:])] = known[names[-1]] if names else ""
    return list(found.items())


def shards_of(source: str) -> list[str]:
    """The shards of a source; itself where they are not known here, as they may lie on another machine."""
    try:
        return expand_source(source) if source else []
    except (OSError, ValueError, ImportError):
        return [source]


def readings(units: Units, metrics: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """(what, trace, pictures that it fits, bits) of captions by level; of round shares where nothing was measured."""
    given = [(words, float(metrics[key])) for key, words in LEVELS if isinstance(metrics.get(key), (int, float))]
    if not given:
        shares = [torch.tensor(1 / n) for n in (2, 10, 100) if units.images >= n]
        given = [("a text", float(units.trace(share))) for share in shares]
    rows = []
    for words, trace in given:
        x = torch.tensor(trace)
        bits = float(units.information(x, bits=True))
        rows.append((words, f"{trace:.3f}", in_words(float(units.share(x))), f"{bits:.1f}"))
    return rows


def place(path: str | None) -> str:
    """Paths as others may read them: the end of those that are of this machine alone."""
    text = path or ""
    word, parts = text.removesuffix(without_word(text)), without_word(text).split("::")
    return word + "::".join("/".join(Path(part).parts[-2:]) if Path(part).is_absolute() else part for part in parts)
