"""What is measured during a run, by all ranks together, and the model that is kept for its metrics."""
from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from prolip.data.emoji import Corpus
from prolip.data.faults import FaultCounter
from prolip.evaluation.datasets.base import Dataset
from prolip.evaluation.datasets.specs import has_splits, open_dataset
from prolip.evaluation.distributed import TaskLost, evaluate_over_ranks
from prolip.evaluation.kinds import KINDS
from prolip.evaluation.metrics.ranking import retrieval_names
from prolip.evaluation.model import Loaded, embedder_of
from prolip.evaluation.suites.emoji import evaluate_corpus, gallery
from prolip.models.weights.checkpoint import save_pretrained
from prolip.utils.flags import FlagError, did_you_mean, nearest
from prolip.utils.messages import naming
from prolip.utils.outputs import replacing_folder
from prolip.utils.threads import default_workers
from training.checkpoint.run_folder import write_json
from training.config import ValidationConfig
from training.parallel.distributed import World
from training.state import AVERAGES, Evaluated

#: How the corpus's metrics begin, beside the rankings, whose names are known in full.
CORPUS_METRICS = ("zero_shot/", "trace/", "spearman/", "inclusion/", "recall_by_trace/", "captions/t2i/", "refusal/",
                  "prompts/")


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The test sets of a run, and what a model needs to be evaluated on them.

    corpus: --val-data, which the first rank evaluates; precision: of the arithmetic; batch_size: images of a rank at a
    time.
    """

    tasks: tuple[Dataset, ...]
    corpus: Corpus | None
    tokenizer: Any
    preprocess: Any
    precision: str
    batch_size: int

    def measure(self, model: nn.Module, world: World, between: Callable[[], object] = lambda: None) -> Evaluated:
        """Every metric of a model, which all ranks hold; of them the first one learns the metrics.

        A test set that cannot be read is reported and passed over: a run does not end for it. between: called by all
        ranks before each test set; it may raise.
        """
        found, loaded = Evaluated(), Loaded(model, self.preprocess, self.tokenizer)
        embedder = embedder_of("the model in training", loaded, world.device, self.precision)
        if self.corpus is not None and world.is_first:
            found.corpus = evaluate_corpus(embedder, self.corpus)
            found.metrics |= found.corpus.metrics
        for task in self.tasks:
            between()
            try:
                result = evaluate_over_ranks(task, embedder, None, world.waiting, self.batch_size, decoding_threads())
            except TaskLost as lost:
                found.headlines.append(f"{task.name} was lost: {lost}")
                continue
            if result is None:
                continue
            found.metrics |= {f"{task.name}/{name}": value for name, value in result.metrics.items()}
            damaged = [f"{kind} {count}" for kind, count in result.info.get("damaged", {}).get("kinds", {}).items()]
            without = f" (without {', '.join(damaged)})" if damaged else ""
            found.headlines.append(f"{task.name} {result.main_metric} {100 * result.value:.2f}%{without}")
        return found


def decoding_threads() -> int:
    """Threads of this rank that decode: its part of the machine's cores."""
    return default_workers(processes=int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def open_validation(config: ValidationConfig, tokenizer: Any, preprocess: Any, world: World) -> Validation:
    """All test sets, opened before the first step: what is missing shows now.

    Damaged samples are counted and left out. FlagError, FileNotFoundError and ValueError name what cannot be used.
    """
    corpus = None
    if config.val_data:
        names = [config.val_names] if config.val_names else None
        flags = ("--val-data", "--val-names", "--val-select")
        corpus = gallery([config.val_data], config.val_select, names, flags=flags)
    tasks = []
    for spec, name in config.specs.items():
        with naming(config.flag_of(spec)):
            split = config.val_split if spec in config.val_tasks and has_splits(spec) else None
            dataset = open_dataset(spec, split, FaultCounter())
            tasks.append(dataclasses.replace(dataset, name=name) if name else dataset)
    names_of_tasks = [task.name for task in tasks]
    for name in names_of_tasks:
        if names_of_tasks.count(name) > 1:
            raise FlagError(f"two test sets are called {name!r}, and so would their figures be: rename a folder")
    return Validation(
        tasks=tuple(tasks), corpus=corpus, tokenizer=tokenizer, preprocess=preprocess, precision=config.val_precision,
        batch_size=config.val_batch_size,
    )  # fmt: skip


class Best:
    """The model with the best value of a metric so far, in `folder`: model.safetensors, config.json and best.json.

    A run that goes on begins with what best.json holds. lowest: small values are better. prefix: what begins the
    metrics of the model that it chooses, "", "ema/" or "swa/".
    """

    def __init__(self, folder: Path, metric: str, lowest: bool = False):
        self.folder, self.metric, self.lowest = folder, metric, lowest
        name = averaged_name(metric)
        self.prefix = f"{name}/" if name else ""
        self.value: float | None = None
        if (folder / "best.json").exists():
            kept = json.loads((folder / "best.json").read_text(encoding="utf-8"))
            same = kept["metric"] == metric and kept.get("lowest", lowest) == lowest
            self.value = kept["value"] if same else None

    def offer(self, step: int, metrics: Mapping[str, float], model: Any, tokenizer: Any) -> str:
        """Keep the model of `metrics` if it is better than all before; what there is to say about it, or nothing."""
        value = metrics.get(self.metric)
        if value is None:
            near = nearest(self.metric, metrics)
            hint = f"; near it: {', '.join(near)}" if near else ""
            return f"best: this evaluation has no figure {self.metric!r} to choose by{hint}"
        if not (value == value and (self.value is None or (value < self.value if self.lowest else value > self.value))):
            return ""
        found = {"step": step, "metric": self.metric, "lowest": self.lowest, "value": value}
        with replacing_folder(self.folder) as place:
            save_pretrained(model, place, tokenizer=tokenizer)
            write_json(place / "best.json", found)
        before = "" if self.value is None else f", before {self.value:.4g}"
        self.value = value
        return f"best {self.metric} so far, {value:.4g}{before}: kept in {self.folder}"


def averaged_name(metric: str) -> str:
    """The averaged twin that a metric is of; nothing for the model itself."""
    first = metric.partition("/")[0]
    return first if first in AVERAGES else ""


def check_metric(metric: str, validation: Validation, averaged: Collection[str]) -> None:
    """FlagError where no evaluation of this run will have the figure. averaged: names of the averaged twins."""
    twin = averaged_name(metric)
    if twin and twin not in averaged:
        raise FlagError(f"--best-metric {metric} without {AVERAGES[twin]}: there is no averaged model to measure")
    name = metric.removeprefix(f"{twin}/")
    known = [f"{task.name}/{figure}" for task in validation.tasks for figure in KINDS[task.kind].names(task)]
    families: Iterable[str] = ()
    if validation.corpus is not None:
        known += [f"{where}/{figure}" for where in ("names", "captions") for figure in retrieval_names()]
        families = CORPUS_METRICS
    if name in known or name.startswith(tuple(families)):
        return
    offer = did_you_mean(name, known, f"there are {', '.join(known[:8])}, ...")
    raise FlagError(f"--best-metric {metric} is a figure of none of the test sets: {offer}")
