"""A model, its tokenizer and its preprocessing as an evaluation embeds by them, for the tests of what stands above."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from prolip import embedder as evaluated
from prolip.embedder import Embedder, Loaded, embedder_of, encoder
from prolip.gaussian import Gaussian, concatenate
from prolip.methods import find_score

CPU = torch.device("cpu")


def as_embedder(model: nn.Module, tokenizer: Callable, preprocess: Callable) -> Embedder:
    return embedder_of("a model", Loaded(model, preprocess, tokenizer), CPU)


def embed_images(
    model: nn.Module, images: Iterable, preprocess: Callable, batch_size: int = 256, precision: str = "fp32"
) -> Gaussian:
    encode = encoder(model, "image", CPU, precision)
    batches = evaluated.groups(images, batch_size)
    return concatenate([encode(torch.stack([preprocess(image) for image in batch])) for batch in batches])


def embed_texts(
    model: nn.Module, tokenizer: Callable, texts: Iterable[str], batch_size: int = 512, precision: str = "fp32"
) -> Gaussian:
    return evaluated.embed_texts(encoder(model, "text", CPU, precision), tokenizer, texts, batch_size)


def similarity_scores(queries: Gaussian, gallery: Gaussian, similarity: str = "csd") -> Tensor:
    """All scores at once, (Q, D), (G, D) -> (Q, G)."""
    return find_score(similarity)().pairwise(queries, gallery)
