"""Embedded images and texts: matched pairs, to fit uncertainty, and embeddings without known matches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from prolip.gaussian import Gaussian, kind_of
from prolip.measures.chance import OwnFirst, evenly
from prolip.scores import Side
from prolip.utils.messages import first_few
from prolip.utils.outputs import replacing

#: Fewest pairs to fit variances; with fewer than SOUND pairs, or LEAST images or texts, they are rough.
LEAST, SOUND = 30, 300
INITIAL_SCALE = 1 / 0.07  # exp(logit_scale) of OpenCLIP's untrained models
#: Weights of pairs, and the scale of a logit, that float32 sums and exponents can represent.
WEIGHTS, SCALES = (1e-9, 1e9), (1e-3, 1e4)
BLOCK, NAMED = 4096, 5  # rows checked at once; names in a message
PARTS = ("", "_of", "_hidden", "_first", "_first_of")  # fields of `Pairs` that exist for both sides


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """P matched pairs of N images and M texts, frozen; a text of several images is one row, and vice versa."""

    image: Tensor  # (N, D), unit means, float
    text: Tensor  # (M, D)
    image_of: Tensor  # (P,) int64, the rows of each pair
    text_of: Tensor
    scale: float  # a of the model's logit a * cosine + b
    weight: Tensor | None = None  # (P,), occurrences of each pair, default 1
    text_ids: Tensor | None = None  # (M, L) int64
    image_hidden: Tensor | None = None  # (N, W), inputs of the last projections
    text_hidden: Tensor | None = None
    image_first: Tensor | None = None  # (F, 2 W), `Encoded.token_stats`
    text_first: Tensor | None = None
    image_first_of: Tensor | None = None  # (F,) int64, their rows, by default all in order
    text_first_of: Tensor | None = None
    empty: Tensor | None = None  # (D,), the mean of the text ""
    changed: Tensor | None = None  # (E, C, D), means of images under E strong changes
    changed_of: Tensor | None = None  # (C,) int64, their rows
    image_keys: Sequence[str] | None = None  # names of the rows for messages, not saved
    text_keys: Sequence[str] | None = None
    model: str = ""  # fingerprint of the model's means, 16 bytes in hexadecimal, "" if unknown

    def __post_init__(self) -> None:
        images, texts = (self._check_side(side) for side in get_args(Side))
        if images != texts:
            got = f"{images[0]} rows of images and {texts[0]} rows of texts, of {images[1]} and {texts[1]} dimensions"
            raise ValueError(f"{got}: give one of each per pair, embedded by one model")
        if not SCALES[0] <= self.scale <= SCALES[1]:
            remedy = f"give exp(logit_scale) of the model, from {SCALES[0]:g} to {SCALES[1]:g}"
            raise ValueError(f"scale={self.scale} is not a valid factor of a logit: {remedy}")
        (low, high), w = WEIGHTS, self.weight
        if w is not None and (w.shape != self.image_of.shape or not ((low <= w) & (w <= high)).all()):
            raise ValueError(f"weight is {tuple(w.shape)}, expected {len(self)} numbers from {low:g} to {high:g}")
        ids, size = self.text_ids, (len(self.text), torch.int64)
        if ids is not None and (ids.ndim != 2 or (len(ids), ids.dtype) != size or not ids.shape[1]):
            raise ValueError(f"text_ids is {ids.dtype} {tuple(ids.shape)}, expected ({size[0]}, L) int64 ids of texts")
        if self.empty is not None:
            _check_finite("empty", self.empty.unsqueeze(0))
        if (changed := self.changed) is not None:
            rest = _check_rows("changed_of", self.changed_of, len(self.image)), self.image.shape[1]
            if changed.ndim != 3 or changed.shape[1:] != rest:
                raise ValueError(f"changed is {tuple(changed.shape)}, expected (E, {rest[0]}, {rest[1]})")
            _check_finite("changed", changed.flatten(0, 1))

    def _check_side(self, side: str) -> tuple[int, int]:
        """Return the number of a side's rows in the pairs, and of its dimensions."""
        mean, rows, keys = (getattr(self, f"{side}{part}") for part in ("", "_of", "_keys"))
        for name, x in ((side, mean), (f"{side}_of", rows)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} is {kind_of(x)}, expected a tensor")
        if mean.ndim != 2 or not mean.is_floating_point() or not len(mean):
            raise ValueError(f"{side} is {mean.dtype} {tuple(mean.shape)}, expected unit means (rows, D), float")
        if not _check_rows(f"{side}_of", rows, len(mean)):
            raise ValueError("no pairs to fit. Give at least one")
        _check_finite(side, mean, keys)
        lengths = torch.cat([part.float().norm(dim=1) for part in mean.split(BLOCK)])
        if not torch.allclose(lengths, torch.ones_like(lengths), atol=1e-2):  # bfloat16 keeps a length to 4e-3
            got = f"{side}s have lengths from {lengths.amin():.3g} to {lengths.amax():.3g}"
            raise ValueError(f"{got}, expected unit means: torch.nn.functional.normalize(x, dim=-1)")
        for name in (f"{side}_hidden", f"{side}_first"):
            x, some, count = getattr(self, name), getattr(self, f"{name}_of", None), len(mean)
            if some is not None:
                count = _check_rows(f"{name}_of", some if x is not None else None, count)
            if x is None:
                continue
            if x.ndim != 2 or len(x) != count or not x.is_floating_point():
                raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, expected {count} float rows, one per {side}")
            _check_finite(name, x, keys if some is None or keys is None else [keys[row] for row in some])
        return len(rows), mean.shape[1]

    @property
    def cautions(self) -> list[str]:
        """The reasons why variances fitted to these pairs are rough or have no meaning; empty if they are sound."""
        images, texts = len(self.image_of.unique()), len(self.text_of.unique())
        found = [few] if (few := few_pairs(len(self), images, texts)) else []
        if math.isclose(self.scale, INITIAL_SCALE, rel_tol=1e-6):
            found.append("the logit scale is OpenCLIP's initial value: are these weights trained?")
        if (first := self.own_first).at_chance:
            found.append(f"{first}. Variances and similarities fitted to it have no meaning")
        return found

    @property
    def own_first(self) -> OwnFirst:
        """The number of images that rank first the text that each has most often, by the cosine."""
        rows = (self.likeliest_text >= 0).nonzero().squeeze(1)
        rows = rows[evenly(len(rows))]
        texts, own = self.likeliest_text[rows].unique(return_inverse=True)
        return OwnFirst.of(self.image[rows].float() @ self.text[texts].float().T, own)

    @classmethod
    def in_rows(cls, image: Tensor, text: Tensor, scale: float, **further: Any) -> Pairs:
        """Pair row i of the images with row i of the texts, (P, D) each."""
        rows = torch.arange(len(image)), torch.arange(len(text))
        return cls(image=image, text=text, image_of=rows[0], text_of=rows[1], scale=scale, **further)

    def __len__(self) -> int:
        return len(self.image_of)

    @property
    def weights(self) -> Tensor:
        """Occurrences of each pair, (P,) float32."""
        return torch.ones(len(self)) if self.weight is None else self.weight.float()

    @property
    def likeliest_text(self) -> Tensor:
        """The text that occurs most often with each image, the first of several; -1 without text. (N,) int64."""
        most = torch.zeros(len(self.image)).scatter_reduce(0, self.image_of, self.weights, "amax")
        own = self.weights == most[self.image_of]
        none = torch.full((len(self.image),), -1)
        return none.scatter_reduce(0, self.image_of[own], self.text_of[own], "amin", include_self=False)

    @property
    def swapped(self) -> Pairs:
        """Return the pairs with sides exchanged: functions of texts against images then serve images against texts."""
        sides = ("image", "text"), ("text", "image")
        parts = {f"{side}{part}": getattr(self, f"{other}{part}") for side, other in sides for part in PARTS}
        return Pairs(**parts, scale=self.scale, weight=self.weight)

    def tensors(self) -> dict[str, Tensor]:
        """Return all but the keys by name, for safetensors."""
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        kept = {name: x.contiguous() for name, x in named.items() if isinstance(x, Tensor)}
        kept |= {"model": torch.tensor([*bytes.fromhex(self.model)], dtype=torch.uint8)} if self.model else {}
        return kept | {"scale": torch.tensor(self.scale, dtype=torch.float64)}

    def save(self, path: Path) -> None:
        """Write `tensors` into a safetensors file, completely or not at all."""
        with replacing(path) as temporary:
            save_file(self.tensors(), temporary)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Pairs:
        """Read the output of `tensors`."""
        needed = {"image", "text", "image_of", "text_of", "scale"}
        known = set(cls.__dataclass_fields__) - {"image_keys", "text_keys"}
        if not needed <= tensors.keys() <= known:
            names = f"{', '.join(sorted(needed))} and may have {', '.join(sorted(known - needed))}"
            raise ValueError(f"pairs have the tensors {names}; got {', '.join(sorted(tensors))}")
        given: dict[str, Any] = {**tensors, "scale": float(tensors["scale"])}
        return cls(**given | {"model": bytes(tensors["model"].tolist()).hex() if "model" in tensors else ""})


@dataclass(frozen=True, kw_only=True)
class UnpairedEmbeddings:
    """This rank's share of N images and M texts, embedded by one model, without the matches between them."""

    keys: Sequence[str]  # of the rank's n images
    image: Gaussian  # (n, D), unit means, float32; log_var is -inf if the model's variances have no meaning
    text: Gaussian  # (m, D)
    text_ids: Tensor  # (m, L) int64
    image_novelty: dict[str, Tensor]  # depth -> nats (n,), empty for a model without novelty
    text_novelty: dict[str, Tensor]
    image_rows: Tensor | None = None  # (n,) int64 among the N, ascending, None if this rank has all
    text_rows: Tensor | None = None

    def __post_init__(self) -> None:
        images, texts = len(self.image.mean), len(self.text.mean)
        if (len(self.keys), len(self.text_ids)) != (images, texts):
            got = f"{len(self.keys)} keys of {images} images, {len(self.text_ids)} rows of ids of {texts} texts"
            raise ValueError(f"{got}: give one of each")

    def side(self, side: Side) -> tuple[Gaussian, Tensor]:
        """Return the images or texts, and their rows, on the same device."""
        z, rows = (self.image, self.image_rows) if side == "image" else (self.text, self.text_rows)
        return z, (torch.arange(len(z.mean)) if rows is None else rows).to(z.mean.device)


def few_pairs(pairs: int | None, images: int, texts: int) -> str:
    """Return the caution about a fit to few pairs, "" for enough; None if their number is unknown."""
    if (max(images, texts) if pairs is None else pairs) >= SOUND and min(images, texts) >= LEAST:
        return ""
    counted = f"{'' if pairs is None else f'{pairs:,} pairs of '}{images:,} images and {texts:,} texts"
    least = f"at least {LEAST} different images and {LEAST} different texts"
    return f"{counted} are few: variances and probabilities are rough. Give at least {SOUND} pairs, with {least}"


def check_enough(pairs: int) -> None:
    """Raise ValueError for fewer than LEAST pairs."""
    if pairs < LEAST:
        remedy = f"give more data ({SOUND} pairs for more than a rough fit)"
        raise ValueError(f"{pairs} pairs of an image and a caption, but fitting variances needs {LEAST}: {remedy}")


def _check_finite(name: str, x: Tensor, keys: Sequence[str] | None = None) -> None:
    """Raise ValueError naming the rows (N, W) that are not finite, by their keys if given."""
    lost = torch.cat([~part.isfinite().all(1) for part in x.split(BLOCK)]).nonzero().squeeze(1).tolist()
    if lost:
        named = first_few([f"row {row}" if keys is None else repr(keys[row]) for row in lost], NAMED)
        remedy = "remove these samples, or use a model that has not diverged"
        raise ValueError(f"{name} has NaN or infinite values in {len(lost)} of {len(x)} rows ({named}): {remedy}")


def _check_rows(name: str, rows: Tensor | None, count: int) -> int:
    """Return the number of rows of a part, (F,) int64 from 0 to below `count`; ValueError for anything else."""
    fits = rows is not None and rows.ndim == 1 and rows.dtype == torch.int64
    if rows is None or not fits or not ((rows >= 0) & (rows < count)).all():
        got = "missing, or without its part" if rows is None else f"{rows.dtype} {tuple(rows.shape)}"
        raise ValueError(f"{name} is {got}, expected (F,) int64 from 0 to below {count}, the rows of the part")
    return len(rows)
