"""Models that docs/studies/uncertainty.md compares: trained ones, and frozen ones with fitted variances."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import Tensor

from prolip.corpora.emoji.corpus import Corpus
from prolip.corpora.emoji.evaluate import evaluate_corpus, gallery
from prolip.corpora.emoji.result import CorpusResult
from prolip.data.config import DataConfig
from prolip.data.sources import captioned_samples
from prolip.embedder import Embedder
from prolip.embeddings import Pairs
from prolip.fitting.attach import attach
from prolip.fitting.collect import embed_images, embed_texts, join, means
from prolip.gaussian import Gaussian
from prolip.methods.likelihood import LikelihoodConfig
from studies.uncertainty.baselines import BASELINES

#: Uncertainty of Gaussians of a side ("image", "text"), (N,); None if a method has none.
Ask = Callable[[str, Gaussian], "np.ndarray | None"]


class Trained:
    """A run of `training.main`: its model, its training pairs, and its test corpus."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.config: dict[str, Any] = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        self.model = f"local-dir:{self.folder / 'model'}"

    @cached_property
    def embedder(self) -> Embedder:
        return Embedder.load(self.model)

    @cached_property
    def corpus(self) -> Corpus:
        """Return the drawings of an unseen designer."""
        asked = self.config["val"]
        drawings = [source.removeprefix("emoji:") for source in asked["val_data"]]
        return gallery(drawings, asked["val_select"], [asked["val_names"]] if asked["val_names"] else None)

    @cached_property
    def pairs(self) -> Pairs:
        """Return all training drawings with all their captions, and the empty text."""
        data = self.config["data"]
        config = DataConfig(**{key: data[key] for key in ("train_data", "caption_sampling", "select")})
        embedder = self.embedder
        samples = captioned_samples(config, embedder.preprocess, 10**9)
        part = join([embed_images(samples, lambda batch: means(embedder.encode_hidden(batch)))])
        assert embedder.logit_scale is not None
        empty = embedder.embed_texts([""]).mean[0]
        encode = lambda ids: means(embedder.encode_hidden(ids, "text"))  # noqa: E731
        return embed_texts(part, encode, embedder.tokenizer, embedder.logit_scale, empty=empty)

    @property
    def kept_out(self) -> list[str]:
        """Return the texts that `scripts/studies/uncertainty/hold_out_texts.py` removed from its shards."""
        folder = Path(self.config["data"]["train_data"]).parent
        return json.loads((folder / "held.json").read_text(encoding="utf-8"))

    @property
    def seconds(self) -> float:
        """Return the seconds of training, from the last line of the log."""
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [line["seconds"] for line in map(json.loads, lines) if "seconds" in line][-1]


class Subject:
    """An uncertainty of a model on the corpus. ask: the uncertainty of Gaussians; fit: seconds of fitting."""

    def __init__(self, name: str, embedder: Embedder, result: CorpusResult, ask: Ask, fit: float = float("nan")):
        self.name, self.embedder, self.result, self.ask, self.fit = name, embedder, result, ask, fit
        self.text, self.image = ask("text", result.text), ask("image", result.image)


def trained(name: str, run: Trained) -> Subject:
    """Return a model with its own uncertainty and score."""
    result = evaluate_corpus(run.embedder, run.corpus)
    ask: Ask = lambda _, z: result.uncertainty(z) if result.probabilistic else None  # noqa: E731
    return Subject(name, run.embedder, result, ask, run.seconds)


def fitted(name: str, run: Trained, seed: int) -> Subject:
    """Return a frozen model with variances by `prolip.uncertainty`."""
    with TemporaryDirectory() as folder:
        pairs, start = run.pairs, time.perf_counter()
        attach(run.model, None, None, pairs, LikelihoodConfig(), folder, seed)
        seconds = time.perf_counter() - start
        embedder = Embedder.load(f"local-dir:{folder}")
        result = evaluate_corpus(embedder, run.corpus)
    return Subject(name, embedder, result, lambda side, z: result.uncertainty(z), seconds)


def baselines(run: Trained, seed: int, names: list[str]) -> Iterator[Subject]:
    """Yield a frozen model with each baseline's uncertainty, ranked by the cosine."""
    pairs, result = run.pairs, evaluate_corpus(run.embedder, run.corpus, similarity="mean")
    for name in names:
        start = time.perf_counter()
        found = BASELINES[name].fit(pairs, seed)
        seconds = time.perf_counter() - start

        def ask(side: str, z: Gaussian, found: Any = found) -> np.ndarray | None:
            sides: dict[str, Callable[[Tensor], Tensor]] = {"image": found.image, "text": found.text}
            return sides[side](z.mean).double().numpy() if side in found.sides else None

        yield Subject(name, run.embedder, result, ask, seconds)
