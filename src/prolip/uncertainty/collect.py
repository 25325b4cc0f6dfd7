"""Pairs of embeddings from samples and their captions, on one rank or on many."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from tqdm import tqdm

from prolip.data.captioned import Captioned, captioned_samples
from prolip.data.config import DataConfig
from prolip.data.faults import FaultCounter
from prolip.scores import Side
from prolip.uncertainty.hidden import Hidden, encode_hidden
from prolip.uncertainty.novelty import SAMPLE
from prolip.uncertainty.pairs import LEAST, Pairs, check_enough

if TYPE_CHECKING:
    from prolip.evaluation.model import Embedder

Encode = Callable[[Tensor], Hidden]
Tokenize = Callable[[list[str]], Tensor]


class Part(NamedTuple):
    """What one rank has embedded. image: (n, D), with keys; texts of pair p: `texts[text_of[p]]`, of image
    `image_of[p]`; first: (f, 2 W) half precision, what `Hidden` has of the first tokens of the images first_of (f,),
    where there is a transformer.
    """

    keys: list[str]
    image: Tensor
    texts: list[str]
    image_of: Tensor
    text_of: Tensor
    weight: Tensor
    first: Tensor | None
    first_of: Tensor


def embed_pairs(
    embedder: Embedder, fingerprint: str, data: DataConfig, samples: int, faults: FaultCounter, batch_size: int = 256
) -> Pairs:
    """Embed at most `samples` samples of `data` with all their captions.

    fingerprint: of the model's means; faults: counts what is left out. ValueError for a model without a logit scale.
    """
    if embedder.logit_scale is None:
        raise ValueError(f"{embedder.name} has no logit_scale, which says how sure a cosine is: it was not contrastive")
    found = enough(captioned_samples(data, embedder.preprocess, samples, faults=faults))
    counted = tqdm(found, desc="images", unit="", disable=not sys.stderr.isatty())
    part = join([embed_images(counted, embedder.encode_hidden, batch_size)])
    texts = embedder.encode_hidden_text, embedder.tokenizer, embedder.logit_scale
    return embed_texts(part, *texts, batch_size, model=fingerprint)


def enough(samples: Iterator[Captioned]) -> Iterator[Captioned]:
    """The same samples. ValueError, before the first is used, where they have fewer than LEAST pairs in all."""
    first = list(islice(samples, LEAST))  # each has a caption or more
    check_enough(sum(len(sample.chances) for sample in first))
    return chain(first, samples)


def embed_images(samples: Iterable[Captioned], encode: Encode, batch_size: int = 128) -> Part:
    """This rank's images, and what their captions are."""
    means: list[Tensor] = []
    firsts: list[Tensor] = []
    row_of: dict[str, int] = {}
    keys: list[str] = []
    image_of, text_of, weight = [], [], []
    iterator = iter(samples)
    while group := list(islice(iterator, batch_size)):
        hidden = encode(torch.stack([sample.pixels for sample in group]))
        means.append(hidden.z.mean.float().cpu())
        if hidden.first is not None:
            firsts.append(hidden.first.half().cpu())
        for sample in group:
            for caption, chance in sample.chances.items():
                image_of.append(len(keys))
                text_of.append(row_of.setdefault(caption, len(row_of)))
                weight.append(chance)
            keys.append(sample.key)
    image = torch.cat(means) if means else torch.empty(0, 0)
    pairs = torch.tensor(image_of), torch.tensor(text_of), torch.tensor(weight)
    some = chosen(keys)  # of first tokens, which else were the largest part of what travels between ranks
    return Part(keys, image, list(row_of), *pairs, torch.cat(firsts)[some] if firsts else None, some)


def chosen(names: Sequence[str]) -> Tensor:
    """Rows of the SAMPLE names (all, where there are fewer) whose checksums are the least, in order, (f,) int64: the
    same ones, however the names are shared out to ranks.
    """
    order = sorted(range(len(names)), key=lambda row: (crc32(names[row].encode("utf-8", "replace")), names[row]))
    return torch.tensor(sorted(order[:SAMPLE]), dtype=torch.int64)


def join(parts: Sequence[Part]) -> Part:
    """The parts of all ranks as one: images by key and texts by letters, in an order that does not depend on the ranks.

    ValueError where there is no sample at all.
    """
    parts = [part for part in parts if len(part.keys)]
    if not parts:
        raise ValueError("no sample with an image and a caption was found: nothing can be fitted")
    keys = [key for part in parts for key in part.keys]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    place = torch.empty(len(keys), dtype=torch.int64)
    place[order] = torch.arange(len(keys))
    texts = sorted({text for part in parts for text in part.texts})
    row_of = {text: row for row, text in enumerate(texts)}
    starts = torch.tensor([0, *(len(part.keys) for part in parts)]).cumsum(0)
    image_of = torch.cat([place[start + part.image_of] for start, part in zip(starts, parts)])
    text_of = torch.cat([torch.tensor([row_of[text] for text in part.texts])[part.text_of] for part in parts])
    pairs = (image_of * len(texts) + text_of).argsort()
    rows = torch.cat([place[start + part.first_of] for start, part in zip(starts, parts)])
    some = chosen([keys[order[row]] for row in rows.tolist()])
    some = some[rows[some].argsort()]
    firsts = [part.first for part in parts if part.first is not None]
    return Part(
        [keys[row] for row in order], torch.cat([part.image for part in parts])[order], texts, image_of[pairs],
        text_of[pairs], torch.cat([part.weight for part in parts])[pairs],
        torch.cat(firsts)[some] if firsts else None, rows[some],
    )  # fmt: skip


def embed_texts(
    part: Part, encode: Encode, tokenize: Tokenize, scale: float, batch_size: int = 512, empty: Tensor | None = None,
    model: str = "",
) -> Pairs:  # fmt: skip
    """The texts of a part embedded: the whole pairs, with the texts' token ids. empty: the mean of the text ""; model:
    its fingerprint, as in `Pairs`.
    """
    means, ids, firsts, some = [], [], [], chosen(part.texts)
    for start in range(0, len(part.texts), batch_size):
        ids.append(tokenize(part.texts[start : start + batch_size]))
        hidden = encode(ids[-1])
        means.append(hidden.z.mean.float().cpu())
        if hidden.first is not None:
            own = some[(start <= some) & (some < start + batch_size)]
            firsts.append(hidden.first[own - start].half().cpu())
    return Pairs(
        image=part.image, text=torch.cat(means), image_of=part.image_of, text_of=part.text_of, weight=part.weight,
        text_ids=join_ids(ids, tokenize), image_first=part.first, text_first=torch.cat(firsts) if firsts else None,
        image_first_of=None if part.first is None else part.first_of, text_first_of=some if firsts else None,
        scale=scale, empty=empty, image_keys=part.keys, text_keys=part.texts, model=model,
    )  # fmt: skip


def join_ids(ids: Sequence[Tensor], tokenize: Tokenize) -> Tensor:
    """Batches of token ids (N, L), filled to the longest L with the padding that ends the empty text's ids."""
    longest, padding = max(x.shape[1] for x in ids), int(tokenize([""])[0, -1])
    return torch.cat([torch.nn.functional.pad(x, (0, longest - x.shape[1]), value=padding) for x in ids]).long()


def hidden_encoder(
    model: Any, side: Side, device: torch.device, autocast: Callable[[], AbstractContextManager] = nullcontext
) -> Encode:
    """`encode_hidden` of a model in evaluation mode, of one batch on its device, under autocast."""

    def run(batch: Tensor) -> Hidden:
        with autocast():
            return encode_hidden(model, batch.to(device, non_blocking=True), side)

    return run
