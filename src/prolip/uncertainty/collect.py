"""Pairs of embeddings from samples and their captions, on one rank or on many."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prolip.data.captioned import Captioned
from prolip.gaussian import Gaussian
from prolip.uncertainty.pairs import Pairs

Encode = Callable[[Tensor], Gaussian]
Tokenize = Callable[[list[str]], Tensor]


class Part(NamedTuple):
    """What one rank has embedded. image: (n, D); texts of pair p: `texts[text_of[p]]`, of image `image_of[p]`."""

    image: Tensor
    texts: list[str]
    image_of: Tensor
    text_of: Tensor
    weight: Tensor


def embed_images(samples: Iterable[Captioned], encode: Encode, batch_size: int = 128) -> Part:
    """This rank's images, and what their captions are."""
    means, row_of, image_of, text_of, weight = [], {}, [], [], []  # type: ignore[var-annotated]
    iterator, count = iter(samples), 0
    while group := list(islice(iterator, batch_size)):
        means.append(encode(torch.stack([sample.pixels for sample in group])).mean.float().cpu())
        for sample in group:
            for caption, chance in sample.chances.items():
                image_of.append(count)
                text_of.append(row_of.setdefault(caption, len(row_of)))
                weight.append(chance)
            count += 1
    image = torch.cat(means) if means else torch.empty(0, 0)
    return Part(image, list(row_of), torch.tensor(image_of), torch.tensor(text_of), torch.tensor(weight))


def join(parts: Sequence[Part]) -> Part:
    """The parts of all ranks as one, a text that several of them have once."""
    parts = [part for part in parts if len(part.image)]
    if not parts:
        raise ValueError("no sample with an image and a caption was found: nothing can be fitted")
    row_of: dict[str, int] = {}
    rows = [torch.tensor([row_of.setdefault(text, len(row_of)) for text in part.texts]) for part in parts]
    starts = torch.tensor([0, *(len(part.image) for part in parts)]).cumsum(0)
    return Part(
        torch.cat([part.image for part in parts]),
        list(row_of),
        torch.cat([start + part.image_of for start, part in zip(starts, parts)]),
        torch.cat([row[part.text_of] for row, part in zip(rows, parts)]),
        torch.cat([part.weight for part in parts]),
    )


def embed_texts(part: Part, encode: Encode, tokenize: Tokenize, scale: float, batch_size: int = 512) -> Pairs:
    """The texts of a part embedded: the whole pairs, with the token ids of the texts."""
    means, ids = [], []
    for start in range(0, len(part.texts), batch_size):
        ids.append(tokenize(part.texts[start : start + batch_size]))
        means.append(encode(ids[-1]).mean.float().cpu())
    longest = max(x.shape[1] for x in ids)
    ids = [torch.nn.functional.pad(x, (0, longest - x.shape[1]), value=int(x[0, -1])) for x in ids]
    return Pairs(
        image=part.image, text=torch.cat(means), image_of=part.image_of, text_of=part.text_of, weight=part.weight,
        text_ids=torch.cat(ids).long(), scale=scale,
    )  # fmt: skip


def encoders(model: Any, device: torch.device) -> tuple[Encode, Encode]:
    """`encode_image` and `encode_text` of a model in evaluation mode, of one batch on its device."""

    def of(kind: str) -> Encode:
        encode = getattr(model, f"encode_{kind}")

        def run(batch: Tensor) -> Gaussian:
            with torch.no_grad():
                return encode(batch.to(device, non_blocking=True))

        return run

    return of("image"), of("text")
