"""Data set x model -> `Features`: Gaussians of the images, and of the classes, captions or cues."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from prolip.data.faults import SampleFault
from prolip.embedder import Embedder, ModelCard
from prolip.evaluation.cache import FORMAT, FeatureStore, Record, pack, unpack
from prolip.evaluation.datasets.base import WHOLE, Association, DamagedData, Dataset, Sample, Share, note_fault
from prolip.gaussian import Gaussian, concatenate
from prolip.prompts.templates import ALL, PromptRule, Prompts, mix_prompts
from prolip.uncertainty.readings import Evidence, FittedReader
from prolip.utils.documents import fingerprint

log = logging.getLogger(__name__)

EVERY = PromptRule()
#: Lists of a data set's info with an entry per image or caption: useless once some are left out.
PER_SAMPLE = ("image_ids", "caption_ids")
#: Fields of the data set in a saved task, next to associations and relevance.
DESCRIBED = ("name", "kind", "fingerprint", "source", "classnames", "templates", "size", "info")


@dataclass(frozen=True)
class Features:
    """A data set of N images embedded by a model; after loading from disk, its data set has no images."""

    dataset: Dataset
    model: ModelCard
    keys: tuple[str, ...]
    image: Gaussian  # (N, D)
    labels: Tensor | None = None  # (N,) or multi-hot (N, C), int64
    groups: np.ndarray | None = None  # (N, G)
    captions: tuple[str, ...] = ()
    owners: Tensor | None = None  # (T,) int64, the image of each caption
    text: Gaussian | None = None  # of classes (C, D), captions (T, D) or cues (A, D); None: only images were embedded
    text_key: str = ""  # of the saved texts
    prompts: Gaussian | None = None  # (C, T, D) of the classes, if images choose among them by `rule`
    rule: PromptRule = EVERY
    evidence: Evidence | None = None  # input of the model's doubt, if it has one
    damaged: dict[str, Any] = field(default_factory=dict)  # samples left out: counts by kind, examples


def image_features(dataset: Dataset, embedder: Embedder, store: FeatureStore | None = None, **options: Any) -> Features:
    """Embed only the images, with all fields of the samples; see `evaluate.compute_features`."""
    store = store or FeatureStore()
    key = image_key(dataset, embedder.card)
    record = store.read("images", key, dataset.name)
    before, now = record.values.get("state") if record else None, dataset.state
    if before and now is not None and before[0] == now[0] and before[1] != now[1]:
        log.warning("%s has changed since its images were embedded: embedding them again", dataset.source)
        record = None
    if record is None:
        record = to_record(dataset, *embed_share(dataset, embedder, **options), embedder.reader)
        if not record.values["damaged"]:  # damaged samples may be readable next time
            store.write("images", key, record, dataset.name)
    return from_record(dataset, embedder.card, record)


def stored_texts(
    texts: Sequence[str], counts: Sequence[int] | None, embedder: Embedder, store: FeatureStore, rule: Prompts = EVERY
) -> Gaussian:
    """Embed texts (T, D), or read them; with counts, mix consecutive runs to classes (C, D), see `mix_groups`."""
    key = text_key(texts, counts, embedder.card, rule)
    record = store.read("texts", key)
    if record is None:
        uncertainty, embed = embedder.scored_by().uncertainty, embedder.embed_texts

        def weigh(z: Gaussian, first: int) -> Tensor:
            return rule.weights(uncertainty(z), first)

        z = embed(texts) if counts is None else mix_prompts(texts, counts, embed, None if rule.way == ALL else weigh)
        record = Record(pack("text", z), {"texts": len(texts), "model": embedder.name})
        store.write("texts", key, record)
    return unpack("text", record.tensors)


def load_features(store: FeatureStore) -> Iterator[Features]:
    """Yield all tasks of a store, without models. FileNotFoundError for none; DamagedData for lost parts."""
    for task in store.tasks():
        model, values = ModelCard(**task["model"]), task["dataset"]
        cues = (Association(cue, tuple(keys), frozenset(true)) for cue, keys, true in values["associations"])
        pairs = None if values["relevance"] is None else frozenset((key, index) for key, index in values["relevance"])
        given = values | {name: tuple(values[name]) for name in ("classnames", "templates")}
        given |= {"associations": tuple(cues), "relevance": pairs}
        dataset = Dataset(**given, samples=partial(no_samples, values["name"], values["source"]))
        images = store.read("images", task["images"], dataset.name)
        texts = store.read("texts", task["texts"])
        if images is None or texts is None:
            what = f"the {'images' if images is None else 'texts'} of {dataset.name} by {model.name} in {store.folder}"
            raise DamagedData(f"{what} are damaged or missing: compute them again with --model ... --save-features")
        yield replace(from_record(dataset, model, images), text=unpack("text", texts.tensors), text_key=task["texts"])


def embed_share(
    dataset: Dataset,
    embedder: Embedder,
    batch_size: int = 256,
    workers: int | None = None,
    progress: bool = False,
    share: Share = WHOLE,
) -> tuple[list[Sample], list[Gaussian]]:
    """Return the samples of a share without their bytes, and their Gaussians by batch."""
    if dataset.damage is not None:
        dataset.damage.drain()

    def lost(sample: Sample, error: Exception) -> None:
        if not isinstance(error, SampleFault):
            error = SampleFault("bad image", f"{type(error).__name__}: {error}")
        note_fault(dataset.damage, error, sample.key, dataset.source)

    parts, samples = [], list[Sample]()
    given = dataset.samples(share), Sample.open, embedder.encode_image, batch_size, workers, lost
    with tqdm(desc=dataset.name, total=dataset.size, unit="", disable=not progress) as bar:
        for batch, z in embedder.stream(*given):
            parts.append(z)
            samples += [sample._replace(image=b"") for sample in batch]
            bar.update(len(batch))
    return samples, parts


def to_record(
    dataset: Dataset, samples: Sequence[Sample], parts: Sequence[Gaussian], reader: FittedReader | None
) -> Record:
    """Return the embedded samples as tensors and JSON values; reader: the model's. DamagedData for a mismatch."""
    damaged, counter, source = {}, dataset.damage, dataset.source
    if counter is not None and counter.kinds:
        damaged = {"kinds": dict(counter.kinds), "examples": list(counter.examples)}
    if damaged and dataset.relevance is not None:
        why = "has relevant pairs by caption number, which are wrong if samples are left out"
        raise DamagedData(f"{source} {why}: {damaged}. Fetch these files again")
    if not samples:
        raise DamagedData(f"no image in {source}: {damaged or dataset.why_empty}")
    if dataset.size is not None and len(samples) != dataset.size and not damaged:
        raise DamagedData(f"{source} gave {len(samples)} images, expected {dataset.size}: fetch it again")
    tensors = pack("image", concatenate(parts))
    if reader is not None and (evidence := reader.evidence(tensors["image_mean"])) is not None:
        tensors["evidence"] = torch.stack(evidence, 1)
    for name in ("label", "groups"):
        given = [getattr(sample, name) for sample in samples]
        without = [sample.key for sample, value in zip(samples, given) if value is None]
        if len(without) == len(samples):
            continue
        shapes = {np.shape(value) for value in given if value is not None}
        if without or len(shapes) > 1:
            what = f"{len(without)} of {len(samples)} have none ({', '.join(without[:3])})" if without else shapes
            raise DamagedData(f"the {name} of the samples of {source} differ: {what}: fetch it again")
        column = np.stack([np.asarray(value) for value in given])
        tensors[name] = torch.from_numpy(column.astype(np.float64 if column.dtype.kind == "f" else np.int64))
    values: dict[str, Any] = {"keys": [sample.key for sample in samples], "damaged": damaged, "state": dataset.state}
    if len(set(values["keys"])) < len(samples):
        raise DamagedData(f"{source} has several samples with one key: make the keys unique")
    if dataset.kind == "retrieval":
        counts = torch.tensor([len(sample.captions or ()) for sample in samples])
        tensors["owners"] = torch.arange(len(samples)).repeat_interleave(counts)
        values["captions"] = [caption for sample in samples for caption in sample.captions or ()]
        if not values["captions"]:
            raise DamagedData(f"{source} has no caption: give a retrieval set")
    return Record(tensors, values)


def from_record(dataset: Dataset, model: ModelCard, record: Record) -> Features:
    """Return features without texts."""
    tensors, values = record
    if values["damaged"]:
        dataset = replace(dataset, info={k: v for k, v in dataset.info.items() if k not in PER_SAMPLE})
    labels, groups, evidence = (tensors.get(name) for name in ("label", "groups", "evidence"))
    return Features(
        dataset=dataset,
        model=model,
        keys=tuple(values["keys"]),
        image=unpack("image", tensors),
        labels=None if labels is None else labels.long(),
        groups=None if groups is None else groups.numpy(),
        captions=tuple(values.get("captions", ())),
        owners=tensors.get("owners"),
        evidence=None if evidence is None else Evidence(*evidence.unbind(1)),
        damaged=values["damaged"],
    )


def image_key(dataset: Dataset, model: ModelCard) -> str:
    """Return the key of a data set's images by a model."""
    return fingerprint(FORMAT, dataset.kind, dataset.fingerprint, model.fingerprint, model.precision)


def text_key(texts: Sequence[str], counts: Sequence[int] | None, model: ModelCard, rule: Prompts = EVERY) -> str:
    """Return the key of texts by a model."""
    further = [] if rule.way == ALL else [str(rule)]
    return fingerprint(FORMAT, list(texts), counts, model.fingerprint, model.precision, *further)


def task_key(features: Features) -> str:
    """Return the key of a task, from its images, texts, labels and matches."""
    task = task_description(features)
    return fingerprint(task["images"], task["texts"], task["dataset"])


def task_description(features: Features) -> dict[str, Any]:
    """Return a task as JSON values: the data set without images, the model, and the keys of their embeddings."""
    dataset = features.dataset
    described = {name: getattr(dataset, name) for name in DESCRIBED}
    described["associations"] = [[a.cue, list(a.images), sorted(a.associated)] for a in dataset.associations]
    described["relevance"] = None if dataset.relevance is None else sorted([list(pair) for pair in dataset.relevance])
    images = image_key(dataset, features.model)
    return {"dataset": described, "model": asdict(features.model), "images": images, "texts": features.text_key}


def no_samples(name: str, source: str, share: Share = WHOLE) -> Iterator[Sample]:
    """Raise FileNotFoundError: a data set from saved features has no samples."""
    raise FileNotFoundError(f"the saved features of {name} have no images: read them from {source}")
