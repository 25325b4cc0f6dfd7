"""Evaluation on test sets during a run, by all ranks together, and the best model by one metric."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prolip.corpora.emoji.corpus import Corpus
from prolip.corpora.emoji.evaluate import evaluate_corpus, gallery
from prolip.corpora.emoji.report.examples import show_features
from prolip.data.captions import CaptionSampler, Selector
from prolip.data.config import DataConfig
from prolip.data.faults import FaultCounter, SampleFault
from prolip.data.order import Source
from prolip.data.reading.folders import ImageRows
from prolip.data.reading.named import TESTED, parse_source
from prolip.data.reading.rows import base_of, key_of
from prolip.data.reading.shards import expand_shards
from prolip.data.reading.tar import ShardReader
from prolip.data.samples import Raw, caption_parts, image_bytes, is_selected
from prolip.data.sources import Captioned, captioned_samples, source_of
from prolip.data.split import Split, parse_split
from prolip.embedder import Embedder
from prolip.evaluation.datasets.base import WHOLE, Dataset, Sample, Share, fingerprint, read_images
from prolip.evaluation.datasets.registry import has_splits, open_dataset
from prolip.evaluation.embed import Features
from prolip.evaluation.metrics.ranking import retrieval_names
from prolip.evaluation.ranked_pairs import PAIRS, RankedPairs, chance_of_pairs, numbered, pairs_of, recall_of_pairs
from prolip.evaluation.ranks import TaskLost, evaluate_over_ranks
from prolip.evaluation.table import at_chance
from prolip.evaluation.tasks import TASKS
from prolip.gaussian import concatenate
from prolip.models.checkpoint import save_pretrained
from prolip.utils.documents import read_json
from prolip.utils.flags import FlagError, did_you_mean, nearest
from prolip.utils.messages import naming
from prolip.utils.outputs import replacing_folder
from prolip.utils.secrecy import redacted
from prolip.utils.threads import default_workers
from training.checkpoint.run_dir import write_json
from training.config import Config, ValidationConfig
from training.parallel import World, from_first
from training.state import AVERAGES, Evaluated

HELD_OUT = "held-out"  # name of the part of the training data that --split holds out
SHOWN = 3  # test sets with examples
#: Prefixes of the emoji corpus's metrics, except the rankings.
CORPUS_METRICS = ("zero_shot/", "trace/", "spearman/", "inclusion/", "recall_by_trace/", "captions/t2i/")
REFUSALS = ("refusal/", "prompts/")


@dataclass
class Validation:
    """The test sets of a run, with the tokenizer and preprocessing to evaluate a model on them."""

    tasks: tuple[Dataset, ...]
    corpus: Corpus | None  # emoji: of --val-data, on the first rank
    settings: ValidationConfig
    tokenizer: Any
    preprocess: Any
    rows: Callable[[], Sequence[Captioned]] = tuple  # training pairs, to compare with as many of each test set

    def measure(
        self, model: nn.Module, world: World, between: Callable[[], object] = lambda: None, last: bool = False
    ) -> Evaluated:
        """Return all metrics of a model, held by all ranks, on the first rank; unreadable test sets are reported.

        between: called by all ranks before each test set; may raise. last: include examples for the report.
        """
        found, parts = Evaluated(), (model, self.preprocess, self.tokenizer)
        embedder = Embedder("the model in training", *parts, world.device, self.settings.val_precision)
        if self.corpus is not None and world.is_first:
            found.corpus = evaluate_corpus(embedder, self.corpus)
            found.metrics |= found.corpus.metrics
        trained = self.training_pairs(embedder, found) if world.is_first and self.tasks else None
        sizes = self.settings.val_batch_size, default_workers()
        for task in self.tasks:
            between()
            scored: list[Features] = []
            try:
                result = evaluate_over_ranks(task, embedder, None, world.waiting, *sizes, scored.append)
            except TaskLost as lost:
                found.headlines.append(f"{task.name} was skipped: {lost}")
                continue
            if result is None:
                continue
            found.metrics |= {f"{task.name}/{name}": value for name, value in result.metrics.items()}
            damaged = [f"{kind} {count}" for kind, count in result.info.get("damaged", {}).get("kinds", {}).items()]
            without = f" (without {', '.join(damaged)})" if damaged else ""
            found.headlines.append(f"{task.name} {result.main_metric} {100 * result.value:.2f}%{without}")
            if trained and (pairs := pairs_of(scored[0])):
                count = min(len(trained.ids), len(pairs.ids))
                own, other = (float(recall_of_pairs(embedder.score, some, count)) for some in (pairs, trained))
                values = {"pairs": float(count), "pairs_R@1": own, "train_pairs_R@1": other}
                found.metrics |= {f"{task.name}/{name}": value for name, value in values.items()}
                chance = f"(chance {chance_of_pairs(pairs, count):.1%})"
                found.headlines[-1] += f"; R@1 of {count} pairs {own:.1%} {chance}, training pairs {other:.1%}"
            if remark := at_chance(result):
                found.headlines.append(f"{task.name} is {remark}")
            if last and len(found.examples) < SHOWN:
                try:
                    found.examples[task.name] = show_features(scored[0])
                except Exception as error:  # examples must not end a run
                    found.headlines.append(f"warning: no examples of {task.name}: {type(error).__name__}: {error}")
        return found

    def training_pairs(self, embedder: Embedder, found: Evaluated) -> RankedPairs | None:
        """Return the embedded training pairs; None if there are none. Read errors go to `found`."""
        try:
            rows = self.rows()
            if not rows:
                return None
            texts = [max(row.chances, key=lambda text: row.chances[text]) for row in rows]
            size = self.settings.val_batch_size
            pixels = (torch.stack([row.pixels for row in rows[i : i + size]]) for i in range(0, len(rows), size))
            images = concatenate([embedder.encode_image(batch) for batch in pixels])
            return RankedPairs(images, embedder.embed_texts(texts), numbered(texts))
        except Exception as error:  # of files, object stores, decoders
            found.headlines.append(f"warning: training pairs were not measured: {type(error).__name__}: {error}")
            return None


def training_rows(config: DataConfig, preprocess: Any, noise: Any, source: Source | None = None) -> list[Captioned]:
    """Return the first PAIRS training pairs or fewer, without augmentation; none for data without captions."""
    if source_of(config).kind == "synthetic" or not config.captions:
        return []
    return list(captioned_samples(config, preprocess, PAIRS, noise=noise, source=source))


def open_validation(
    whole: Config, tokenizer: Any, preprocess: Any, world: World, loader: Any = None, averages: Collection[str] = ()
) -> Validation:
    """Open all test sets, or the held-out part of the loader's data (--split), on the first rank; the others get a
    pickled copy. FlagError, FileNotFoundError and ValueError name an unusable set.
    """
    config, corpora = whole.val, list[Corpus]()

    def open_sets() -> list[Dataset]:
        if config.emoji:
            names = [config.val_names] if config.val_names else None
            flags = ("--val-data", "--val-names", "--val-select")
            corpora.append(gallery(config.emoji, config.val_select, names, flags=flags))
        tasks = []
        for spec, (name, flag) in config.specs.items():
            with naming(flag):
                source = str(parse_source(spec, "--val-data", TESTED))
                splits = has_splits(source) or isinstance(parse_split(config.val_split), Split)
                split = config.val_split if spec in config.val_data and splits else None
                dataset = open_dataset(source, split, FaultCounter())
                tasks.append(dataclasses.replace(dataset, name=name) if name else dataset)
        return tasks if config.emoji or tasks else [open_held_out(whole.data, getattr(loader, "held_out", None))]

    tasks = from_first(open_sets, world)
    name, count = Counter(task.name for task in tasks).most_common(1)[0] if tasks else ("", 0)
    if count > 1:
        raise FlagError(f"two test sets have the name {name!r}, so their metrics would collide: rename a folder")
    if config.best_metric:
        check_metric(config.best_metric, tasks, bool(config.emoji), averages)
    validation = Validation(tuple(tasks), next(iter(corpora), None), config, tokenizer, preprocess)
    if loader is not None:
        pairs = partial(training_rows, whole.data, preprocess, loader.noise, loader.source)
        validation.rows = functools.cache(pairs)
    return validation


def open_held_out(data: DataConfig, rows: ImageRows | None) -> Dataset:
    """Return the training images that --split holds out, with all captions; for class folders, a classification."""
    source, damage = source_of(data), FaultCounter()
    folders = rows if source.kind == "images" else None
    if folders and all(row.caption and row.caption == row.record.get("class") for row in folders.rows):
        every = open_dataset(str(source), None, damage)  # a share may lack a class
        place = {folder: number for number, folder in enumerate(every.info["folders"])}
        keys = [key_of(row, base_of(source)) for row in folders.rows]
        own = [Sample(key, b"", place[key.partition("/")[0]]) for key in keys]
        samples, mark = partial(read_images, folders, own, damage), f"{every.fingerprint}-{data.split}"
        return dataclasses.replace(every, name=HELD_OUT, samples=samples, size=len(own), fingerprint=mark)
    urls = [shard.url for shard in expand_shards(source.address, pipes=True)] if rows is None else []
    place, size = redacted(str(source)), None if rows is None else len(rows)
    mark = fingerprint(HELD_OUT, place, data.split, data.select, data.caption_sampling)
    samples = partial(held_out_samples, data, rows, urls, damage)
    facts: dict[str, Any] = {"name": HELD_OUT, "kind": "retrieval", "source": place, "info": {"split": data.split}}
    return Dataset(**facts, samples=samples, fingerprint=mark, size=size, damage=damage)


def held_out_samples(
    data: DataConfig, rows: ImageRows | None, urls: Sequence[str], damage: FaultCounter, share: Share = WHOLE
) -> Iterator[Sample]:
    """Yield the held-out samples once; every rank reads all shards."""
    captions, selector = CaptionSampler.parse(data.caption_sampling), Selector.parse(data.select)
    reader = ShardReader(data.read_policy, split=Split(data.split or 0))

    def read() -> Iterator[tuple[Callable[[], Raw], str, str]]:
        if rows is not None:
            yield from ((partial(rows, number), row.key, "") for number, row in enumerate(rows.rows))
        for url in urls:
            try:
                for raw in reader(url, lambda fault: None):
                    if is_selected(raw, selector):
                        yield partial(dict, raw), raw["__key__"], url
            except SampleFault as fault:
                damage.add(fault, url=url)

    for number, (raw_of, key, url) in share.take(read()):
        damage.samples += 1
        try:
            raw = raw_of()
            every = captions.chances(*caption_parts(raw, captions))
            yield Sample(key, image_bytes(raw), captions=tuple(every), place=(0, number))
        except SampleFault as fault:
            damage.add(fault, key, url)


def keep_best(folder: Path, settings: ValidationConfig, step: int, metrics: Any, model: Any, tokenizer: Any) -> str:
    """Save the model to `folder`, with best.json, if its --best-metric improves on the saved one; returns a remark, or
    an empty string.
    """
    metric, value, file = settings.best_metric, metrics.get(settings.best_metric), folder / "best.json"
    if value is None:
        near = ", ".join(nearest(str(metric), metrics))
        hint = f"; similar names: {near}" if near else ""
        return f"best: this evaluation has no metric {metric!r}{hint}"
    kept = read_json(file) if file.exists() else {"metric": ""}
    same = kept["metric"] == metric and kept.get("lowest", settings.best_lowest) == settings.best_lowest
    before, sign = kept["value"] if same else None, -1 if settings.best_lowest else 1
    if not (value == value and (before is None or sign * value > sign * before)):
        return ""
    with replacing_folder(folder) as place:
        save_pretrained(model, place, tokenizer=tokenizer)
        found = {"step": step, "metric": metric, "lowest": settings.best_lowest, "value": value}
        write_json(place / "best.json", found)
    was = "" if before is None else f" (before: {before:.4g})"
    return f"best {metric} so far: {value:.4g}{was}, saved in {folder}"


def check_metric(metric: str, tasks: Sequence[Dataset], emoji: bool, averaged: Collection[str]) -> None:
    """Raise FlagError for a metric that no evaluation of this run has. averaged: names of the averaged models."""
    twin, _, name = metric.partition("/")
    if twin not in AVERAGES:
        name = metric
    elif twin not in averaged:
        raise FlagError(f"--best-metric {metric} needs an averaged model: add {AVERAGES[twin]}")
    known = [f"{task.name}/{one}" for task in tasks for one in TASKS[task.kind].names(task)]
    if emoji:
        known += [f"{where}/{one}" for where in ("names", "captions") for one in retrieval_names()]
    if name in known or (emoji and name.startswith(CORPUS_METRICS + REFUSALS)):
        return
    offer = did_you_mean(name, known, f"use one of {', '.join(known[:8])}, ...")
    raise FlagError(f"--best-metric {metric} is not a metric of any test set: {offer}")
