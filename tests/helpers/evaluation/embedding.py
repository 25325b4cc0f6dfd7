"""A model, its tokenizer and its preprocessing as an evaluation uses them, for the tests of evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prolip import embedder as evaluated
from prolip.embedder import Embedder, encode
from prolip.gaussian import Gaussian, concatenate
from prolip.methods import find_score


def changed(embedder: Embedder, **parts: Any) -> Embedder:
    """A copy with other attributes."""
    made = copy(embedder)
    vars(made).update(parts)
    return made


def as_embedder(model: nn.Module, tokenizer: Callable, preprocess: Callable) -> Embedder:
    return Embedder("a model", model, preprocess, tokenizer)


def embed_images(
    model: nn.Module, images: Iterable, preprocess: Callable, batch_size: int = 256, precision: str = "fp32"
) -> Gaussian:
    batches = (torch.stack([preprocess(x) for x in batch]) for batch in evaluated.groups(images, batch_size))
    return concatenate([encode(model, "image", "cpu", precision, batch) for batch in batches])


def embed_texts(
    model: nn.Module, tokenizer: Callable, texts: Iterable[str], batch_size: int = 512, precision: str = "fp32"
) -> Gaussian:
    return evaluated.embed_texts(partial(encode, model, "text", "cpu", precision), tokenizer, texts, batch_size)


def similarity_scores(queries: Gaussian, gallery: Gaussian, similarity: str = "csd") -> Tensor:
    """All scores at once, (Q, D), (G, D) -> (Q, G)."""
    return find_score(similarity)().pairwise(queries, gallery)
