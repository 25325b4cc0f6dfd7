"""All images and all texts of the training data, embedded, without which belongs to which: what adaptation looks at."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prolip.data.captioned import Captioned
from prolip.gaussian import Gaussian
from prolip.scores import Side
from prolip.uncertainty.collect import join_ids
from prolip.uncertainty.hidden import encode_hidden
from prolip.uncertainty.novelty import fitted_novelty

#: Of one batch on any device: its Gaussian in float32 on the CPU, and the nats of its novelty where the model has one.
Encode = Callable[[Tensor], tuple[Gaussian, dict[str, Tensor]]]


class PoolPart(NamedTuple):
    """What one rank has seen: keys and Gaussians (n, D) of its images, their novelty by depth (n,), and all texts."""

    keys: list[str]
    image: Gaussian
    novelty: dict[str, Tensor]
    texts: set[str]


@dataclass(frozen=True, kw_only=True)
class Pool:
    """N images and M texts by one model; nothing in it says which texts an image came with.

    keys: of the images, in order; image: (N, D), text: (M, D), unit means, float32, on the CPU, the texts in the order
    of their letters; log_var is -inf where the model's variances mean nothing; text_ids: (M, L) int64; image_novelty,
    text_novelty: depth -> nats (N,), (M,), empty where the model knows of none.
    """

    keys: Sequence[str]
    image: Gaussian
    text: Gaussian
    text_ids: Tensor
    image_novelty: dict[str, Tensor]
    text_novelty: dict[str, Tensor]

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.image.mean) or len(self.text_ids) != len(self.text.mean):
            raise ValueError(f"{len(self.keys)} keys of {len(self.image.mean)} images, {len(self.text_ids)} rows of ids"
                             f" of {len(self.text.mean)} texts: give one of each")  # fmt: skip
        if len(self.keys) < 2 or len(self.text_ids) < 2:
            raise ValueError(f"{len(self.keys)} images and {len(self.text_ids)} texts: give two of each or more")
        if len(set(self.keys)) < len(self.keys):
            twice = next(key for key, after in zip(sorted(self.keys), sorted(self.keys)[1:]) if key == after)
            raise ValueError(f"two images have the key {twice!r}: give every sample of the training data its own")


def pool_encoder(
    model: Any, side: Side, device: torch.device, autocast: Callable[[], AbstractContextManager] = nullcontext,
    points: bool = False,
) -> Encode:  # fmt: skip
    """What a model in evaluation mode makes of a batch of one side, under autocast; points: without its variances."""
    novelty = fitted_novelty(model, side)

    def run(batch: Tensor) -> tuple[Gaussian, dict[str, Tensor]]:
        with torch.no_grad():
            with autocast():
                hidden = encode_hidden(model, batch.to(device, non_blocking=True), side)
            found = {} if novelty is None else novelty(hidden)
        mean, log_var = (x.float().cpu() for x in hidden.z)
        log_var = torch.full_like(log_var, -torch.inf) if points else log_var
        return Gaussian(mean, log_var), {name: nats.cpu() for name, nats in found.items()}

    return run


def embed_pool(samples: Iterable[Captioned], encode: Encode, batch_size: int = 128) -> PoolPart:
    """This rank's images, and the texts that came with any of them."""
    iterator, keys, texts, found = iter(samples), list[str](), set[str](), []
    while group := list(islice(iterator, batch_size)):
        found.append(encode(torch.stack([sample.pixels for sample in group])))
        keys += [sample.key for sample in group]
        texts.update(*(sample.chances for sample in group))
    empty = torch.empty(0, 0)
    return PoolPart(keys, *(join_rows(found) if found else (Gaussian(empty, empty), {})), texts)


def join_pool(
    parts: Sequence[PoolPart], texts: Iterable[str], tokenize: Callable[[list[str]], Tensor], encode: Encode,
    batch_size: int = 512,
) -> Pool:  # fmt: skip
    """The images of all ranks by key, with texts, which are embedded here; their order depends on no rank."""
    parts = [part for part in parts if part.keys]
    if not parts:
        raise ValueError("no image of the training data can be used: there is nothing to look at")
    keys = [key for part in parts for key in part.keys]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    image, novelty = join_rows([(part.image, part.novelty) for part in parts])
    listed, ids, found = sorted(set(texts)), [], []
    for start in range(0, len(listed), batch_size):
        ids.append(tokenize(listed[start : start + batch_size]))
        found.append(encode(ids[-1]))
    if not found:
        raise ValueError("there is no text among the training data: give a file of texts, a line each")
    text, text_novelty = join_rows(found)
    return Pool(
        keys=[keys[row] for row in order], image=Gaussian(*(x[order] for x in image)), text=text,
        text_ids=join_ids(ids, tokenize),
        image_novelty={name: nats[order] for name, nats in novelty.items()}, text_novelty=text_novelty,
    )  # fmt: skip


def join_rows(found: Sequence[tuple[Gaussian, dict[str, Tensor]]]) -> tuple[Gaussian, dict[str, Tensor]]:
    """Batches one behind the other."""
    mean, log_var = (torch.cat(rows) for rows in zip(*(z for z, _ in found)))
    return Gaussian(mean, log_var), {name: torch.cat([nats[name] for _, nats in found]) for name in found[0][1]}
