"""Embed samples and their captions, on one rank or on many: as matched pairs, or without known matches."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torchvision.transforms import Normalize
from tqdm import tqdm

from prolip.data.augment.shifts import changed
from prolip.data.config import DataConfig
from prolip.data.faults import FaultCounter
from prolip.data.sources import Captioned, captioned_samples
from prolip.embeddings import LEAST, Pairs, UnpairedEmbeddings, check_enough
from prolip.gaussian import Gaussian
from prolip.ranks import numbered, shares
from prolip.scores import Side
from prolip.uncertainty.novelty import SAMPLE, fitted_novelty
from prolip.uncertainty.token_stats import Encoded, encode_with_stats

if TYPE_CHECKING:
    from prolip.embedder import Embedder

#: CPU tensors by name, a row for each input: mean (B, D); first (B, 2 W), token statistics; or log_var (B, D) and nats
#: of novelty (B,); changed (B, E, D), means of E strong changes.
Rows = dict[str, Tensor]
Encode = Callable[[Tensor], Rows]
Tokenize = Callable[[list[str]], Tensor]
NOVELTY = "novelty "


class RankPart(NamedTuple):
    """Embeddings of one rank. Pair p: image `image_of[p]` with the text `texts[text_of[p]]`."""

    keys: list[str]  # of n images
    image: Rows  # their rows; `first` and `changed`, if any, are of some images only
    texts: list[str]
    image_of: Tensor
    text_of: Tensor
    weight: Tensor
    first_of: Tensor  # (f,), images
    changed_of: Tensor = torch.empty(0, dtype=torch.int64)  # (c,), images

    def rows_of(self, name: str) -> int:
        """Return the number of rows of these tensors."""
        return len({"first": self.first_of, "changed": self.changed_of}.get(name, self.keys))


class Least:
    """The `most` images whose keys have the smallest checksums, up to the `limit` of all ranks, in half precision."""

    def __init__(self, most: int):
        self.most, self.limit, self._held = most, (1 << 32, ""), list[tuple[int, str, int, Tensor]]()

    def add(self, key: str, row: int, pixels: Tensor) -> None:
        """Keep an image, `row` of the part, while its checksum is among the smallest."""
        name = -checksum(key), key
        if len(self._held) < self.most:
            heapq.heappush(self._held, (*name, row, pixels.half()))
        elif self.most and name > self._held[0][:2]:
            heapq.heapreplace(self._held, (*name, row, pixels.half()))

    @property
    def names(self) -> list[tuple[int, str]]:
        """Checksum and key of each image."""
        return [(-number, key) for number, key, _, _ in self._held]

    def pictures(self) -> list[tuple[str, int, Tensor]]:
        """Return key, row and pixels of the images within the limit, by row."""
        own = [(key, row, pixels) for number, key, row, pixels in self._held if (-number, key) <= self.limit]
        return sorted(own, key=lambda x: x[1])


def checksum(key: str) -> int:
    return crc32(key.encode("utf-8", "replace"))


def embed_pairs(  # noqa: PLR0913, PLR0917
    embedder: Embedder, model: str, data: DataConfig, samples: int, faults: FaultCounter, batch_size=256, changes=0
) -> Pairs:
    """Embed at most `samples` samples of `data` with all captions, and also `changes` images changed."""
    if embedder.logit_scale is None:
        raise ValueError(f"{embedder.name} has no logit_scale: use a contrastive model")
    found = captioned_samples(data, embedder.preprocess, samples, faults=faults)
    first = list(islice(found, LEAST))  # each has at least one caption
    check_enough(sum(len(sample.chances) for sample in first))
    held = Least(changes)
    with tqdm(desc="images and texts", unit="", disable=not sys.stderr.isatty()) as bar:

        def encode(batch: Tensor, side: Side = "image") -> Rows:
            rows = means(embedder.encode_hidden(batch, side))
            bar.update(len(batch))
            return rows

        part = embed_images(chain(first, found), encode, batch_size, held)
        part = join([embed_changed(part, held, encode, embedder.preprocess, batch_size)])
        texts = partial(encode, side="text")
        return embed_texts(part, texts, embedder.tokenizer, embedder.logit_scale, batch_size, model=model)


def embed_images(samples: Iterable[Captioned], encode: Encode, batch_size=128, held: Least | None = None) -> RankPart:
    """Embed this rank's images, with their captions. held: collects images to change."""
    found, keys, row_of, iterator = list[Rows](), list[str](), dict[str, int](), iter(samples)
    image_of, text_of, weight = [], [], []
    while group := list(islice(iterator, batch_size)):
        found.append(encode(torch.stack([sample.pixels for sample in group])))
        for sample in group:
            for caption, chance in sample.chances.items():
                image_of.append(len(keys))
                text_of.append(row_of.setdefault(caption, len(row_of)))
                weight.append(chance)
            if held is not None:
                held.add(sample.key, len(keys), sample.pixels)
            keys.append(sample.key)
    image, some = join_rows(found), torch.empty(0, dtype=torch.int64)
    if "first" in image:  # of some images: all would dominate the traffic between ranks
        some = chosen(keys)
        image["first"] = image["first"][some]
    images, texts = (torch.tensor(x, dtype=torch.int64) for x in (image_of, text_of))
    return RankPart(keys, image, list(row_of), images, texts, torch.tensor(weight), some)


def embed_changed(part: RankPart, held: Least, encode: Encode, preprocess: Any, batch_size: int = 128) -> RankPart:
    """Add the means of the held images in every strong change, where the preprocessing ends in a `Normalize`."""
    step = ([*getattr(preprocess, "transforms", [])] or [None])[-1]
    own = held.pictures() if isinstance(step, Normalize) else []
    if not own:
        return part
    mean, std = (torch.tensor(x).view(-1, 1, 1) for x in (step.mean, step.std))
    kinds = (x for key, _, pixels in own for x in changed((pixels.float() * std + mean).clamp(0, 1), checksum(key)))
    found = list[Tensor]()
    while group := list(islice(kinds, batch_size)):
        found.append(encode((torch.stack(group) - mean) / std)["mean"])
    image = {**part.image, "changed": torch.cat(found).unflatten(0, (len(own), -1))}
    return part._replace(image=image, changed_of=torch.tensor([row for _, row, _ in own]))


def chosen(names: Sequence[str]) -> Tensor:
    """Return the rows of the SAMPLE names with the smallest checksums, or of all names, in order, (f,) int64."""
    order = sorted(range(len(names)), key=lambda row: (checksum(names[row]), names[row]))
    return torch.tensor(sorted(order[:SAMPLE]), dtype=torch.int64)


def join(parts: Sequence[RankPart], image: Rows | None = None) -> RankPart:
    """Join the parts of all ranks in an order that does not depend on the ranks: images by key, texts by letters.

    image: the rows of all parts in order, if the parts have none themselves.
    """
    parts = [part for part in parts if len(part.keys)]
    if not parts:
        raise ValueError("the data has no image: give images to fit to")
    keys = [key for part in parts for key in part.keys]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    place = torch.tensor(order).argsort()
    texts = sorted({text for part in parts for text in part.texts})
    row_of = {text: row for row, text in enumerate(texts)}
    starts = torch.tensor([0, *(len(part.keys) for part in parts)]).cumsum(0)
    image_of = torch.cat([place[start + part.image_of] for start, part in zip(starts, parts)])
    own = [torch.tensor([row_of[text] for text in part.texts], dtype=torch.int64) for part in parts]
    text_of = torch.cat([rows[part.text_of] for rows, part in zip(own, parts)])
    pairs = (image_of * len(texts) + text_of).argsort()
    rows = torch.cat([place[start + part.first_of] for start, part in zip(starts, parts)])
    some = chosen([keys[order[row]] for row in rows.tolist()])
    some = some[rows[some].argsort()]
    changes = torch.cat([place[start + part.changed_of] for start, part in zip(starts, parts)])
    image = join_rows([part.image for part in parts]) if image is None else image
    by = {"first": some, "changed": changes.argsort()}
    image = {name: x[by.get(name, torch.tensor(order))] for name, x in image.items()}
    weight, named = torch.cat([part.weight for part in parts])[pairs], [keys[row] for row in order]
    return RankPart(named, image, texts, image_of[pairs], text_of[pairs], weight, rows[some], changes.sort().values)


def join_rows(found: Sequence[Rows]) -> Rows:
    """Concatenate batches."""
    names = dict.fromkeys(name for rows in found for name in rows)
    return {name: torch.cat([rows[name] for rows in found if name in rows]) for name in names}


def embed_texts(  # noqa: PLR0913, PLR0917
    part: RankPart,
    encode: Encode,
    tokenize: Tokenize,
    scale: float,
    batch_size=512,
    empty: Tensor | None = None,
    model="",
) -> Pairs:
    """Embed the texts of a part and return the pairs, with token ids. empty: mean of the text ""; model: as `Pairs`."""
    some = chosen(part.texts)
    text, ids = encode_texts(part.texts, encode, tokenize, batch_size, some)
    further: dict[str, Any] = {}
    for side, rows, of in (("image", part.image, part.first_of), ("text", text, some)):
        if "first" in rows:
            further |= {f"{side}_first": rows["first"], f"{side}_first_of": of}
    if "changed" in part.image:
        further |= {"changed": part.image["changed"].transpose(0, 1), "changed_of": part.changed_of}
    return Pairs(
        image=part.image["mean"],
        text=text["mean"],
        image_of=part.image_of,
        text_of=part.text_of,
        weight=part.weight,
        text_ids=ids,
        scale=scale,
        empty=empty,
        image_keys=part.keys,
        text_keys=part.texts,
        model=model,
        **further,
    )


def embed_pool(part: RankPart, encode: Encode, tokenize: Tokenize, device: torch.device) -> UnpairedEmbeddings:
    """Embed this rank's share of a pool: its images, and texts that no earlier rank has; all ranks must call it."""
    (image_rows, _), (text_rows, mine) = (numbered(names, device) for names in (part.keys, part.texts))
    images, texts = image_rows.argsort(), text_rows.argsort()
    texts = texts[mine[texts]]
    for name, count in (("images", len(image_rows)), ("texts", len(texts))):
        if (count := sum(shares(torch.empty(count, device=device)))) < 2:
            raise ValueError(f"{count} {name}: give two or more")
    # A rank without texts takes their shapes from the empty text, and a rank without images from texts.
    text, ids = encode_texts([part.texts[row] for row in texts.tolist()] or [""], encode, tokenize, 512)
    text, ids = {name: x[: len(texts)] for name, x in text.items()}, ids[: len(texts)]
    image = {name: x[images] for name, x in (part.image or {name: x[:0] for name, x in text.items()}).items()}
    found: dict[str, Any] = {"image_rows": image_rows[images], "text_rows": text_rows[texts]}
    for side, rows in (("image", image), ("text", text)):
        found[side] = Gaussian(rows["mean"].to(device), rows["log_var"].to(device))
        found[f"{side}_novelty"] = {name[len(NOVELTY) :]: x for name, x in rows.items() if name.startswith(NOVELTY)}
    return UnpairedEmbeddings(keys=[part.keys[row] for row in images.tolist()], text_ids=ids, **found)


def encode_texts(
    texts: list[str], encode: Encode, tokenize: Tokenize, batch_size: int, some: Tensor | None = None
) -> tuple[Rows, Tensor]:
    """Encode texts as rows and ids (M, L), padded like the empty text; some: texts whose token statistics are kept."""
    found, ids = [], []
    for start in range(0, len(texts), batch_size):
        ids.append(tokenize(texts[start : start + batch_size]))
        rows = encode(ids[-1])
        if some is not None and "first" in rows:
            rows["first"] = rows["first"][some[(start <= some) & (some < start + batch_size)] - start]
        found.append(rows)
    longest, padding = max(x.shape[1] for x in ids), int(tokenize([""])[0, -1])
    padded = [torch.nn.functional.pad(x, (0, longest - x.shape[1]), value=padding) for x in ids]
    return join_rows(found), torch.cat(padded).long()


def means(hidden: Encoded) -> Rows:
    """Convert a batch for pairs: means in float32, token statistics, if any, in half precision."""
    first = {} if hidden.token_stats is None else {"first": hidden.token_stats.half().cpu()}
    return {"mean": hidden.z.mean.float().cpu(), **first}


def hidden_encoder(
    model: Any, side: Side, device: torch.device, autocast: Callable = nullcontext, kept: Callable = means
) -> Encode:
    """Return an encoder: `kept` of `encode_with_stats` of a model in evaluation mode, on its device, under autocast."""

    def run(batch: Tensor) -> Rows:
        with autocast():
            hidden = encode_with_stats(model, batch.to(device, non_blocking=True), side)
        return kept(hidden)

    return run


def pool_encoder(
    model: Any, side: Side, device: torch.device, autocast: Callable = nullcontext, points: bool = False
) -> Encode:
    """Return an encoder for a pool: Gaussians, and the model's novelty, if any; points: without variances."""
    novelty = fitted_novelty(model, side)

    @torch.no_grad()
    def kept(hidden: Encoded) -> Rows:
        mean, log_var = (x.float().cpu() for x in hidden.z)
        nats = {} if novelty is None else novelty(hidden)
        log_var = torch.full_like(log_var, -torch.inf) if points else log_var
        return {"mean": mean, "log_var": log_var, **{NOVELTY + name: x.cpu() for name, x in nats.items()}}

    return hidden_encoder(model, side, device, autocast, kept)
