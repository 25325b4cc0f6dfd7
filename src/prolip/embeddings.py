"""Embedded images and texts: matched pairs, which uncertainty is fitted to, and pools without matches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from prolip.gaussian import Gaussian, kind_of
from prolip.measures.chance import OwnFirst, evenly
from prolip.scores import Side
from prolip.utils.messages import first_few
from prolip.utils.outputs import replacing

#: Fewest pairs that variances are fitted to; of fewer than SOUND pairs, or LEAST images or texts, they are rough.
LEAST, SOUND = 30, 300
#: Weights of pairs, and the scale of a logit, that float32 sums and exponents take.
WEIGHTS, SCALES = (1e-9, 1e9), (1e-3, 1e4)
#: Rows that are checked at once; names in a message.
BLOCK, NAMED = 4096, 5


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """P matched pairs of N images and M texts, frozen.

    image: (N, D), text: (M, D), unit means, float; image_of, text_of: (P,) int64, the rows of each pair; scale: a of
    the model's logit a * cosine + b. A text that several images have is one row, and so is an image with several texts.
    weight: (P,), how often each pair occurs, equally often without; text_ids: (M, L) int64, the token ids of the texts;
    image_hidden, text_hidden: (N, W), (M, W'), what the last projections take; image_first, text_first: (F, 2 W),
    (F', 2 W'), what `Hidden` has of the first tokens of the rows image_first_of (F,), text_first_of (F',) int64, of all
    rows in their order without these; empty: (D,), the mean of the text "": where they were kept.
    image_keys, text_keys: names of the rows for messages, not saved; model: the fingerprint of the model's means, 16
    bytes in hexadecimal, "" where it is unknown.
    Raises TypeError and ValueError for what is no such thing, and for numbers that are not finite.
    """

    image: Tensor
    text: Tensor
    image_of: Tensor
    text_of: Tensor
    scale: float
    weight: Tensor | None = None
    text_ids: Tensor | None = None
    image_hidden: Tensor | None = None
    text_hidden: Tensor | None = None
    image_first: Tensor | None = None
    text_first: Tensor | None = None
    image_first_of: Tensor | None = None
    text_first_of: Tensor | None = None
    empty: Tensor | None = None
    changed: Tensor | None = None
    changed_of: Tensor | None = None
    image_keys: Sequence[str] | None = None
    text_keys: Sequence[str] | None = None
    model: str = ""

    def __post_init__(self) -> None:
        for side in ("image", "text"):
            keys = getattr(self, f"{side}_keys")
            _check_side(side, getattr(self, side), getattr(self, f"{side}_of"), keys)
            for part in ("hidden", "first"):
                self._check_part(side, f"{side}_{part}", keys)
        if self.image.shape[1] != self.text.shape[1]:
            raise ValueError(
                f"images have {self.image.shape[1]} dimensions and texts {self.text.shape[1]}: embed both by one model"
            )
        if len(self.image_of) != len(self.text_of):
            raise ValueError(
                f"{len(self.image_of)} rows of images and {len(self.text_of)} rows of texts make no pairs: give one of"
                " each for every pair"
            )
        if not SCALES[0] <= self.scale <= SCALES[1]:
            raise ValueError(
                f"scale={self.scale} is no factor of a logit: give exp(logit_scale) of the model, from"
                f" {SCALES[0]:g} to {SCALES[1]:g}"
            )
        low, high = WEIGHTS
        if (w := self.weight) is not None and (w.shape != self.image_of.shape or not ((low <= w) & (w <= high)).all()):
            raise ValueError(f"weight is {tuple(w.shape)}, want numbers from {low:g} to {high:g} for {len(self)} pairs")
        ids, want = self.text_ids, (len(self.text), torch.int64)
        if ids is not None and (ids.ndim != 2 or (len(ids), ids.dtype) != want or not ids.shape[1]):
            raise ValueError(f"text_ids is {ids.dtype} {tuple(ids.shape)}, want (M, L) int64 ids, M = {want[0]} texts")
        if self.empty is not None:
            _check_finite("empty", self.empty.unsqueeze(0))
        if self.changed is not None:
            _check_changed(self.changed, self.changed_of, self.image)

    @property
    def caution(self) -> str:
        """Why variances fitted to these pairs are rough or mean nothing; nothing where they are sound."""
        found = []
        images, texts = len(self.image_of.unique()), len(self.text_of.unique())
        if len(self) < SOUND or min(images, texts) < LEAST:
            found = [
                f"{len(self):,} pairs of {images:,} images and {texts:,} texts are few: their variances are rough;"
                f" give {SOUND} pairs or more, of {LEAST} images and texts or more"
            ]
        if (first := self.own_first).at_chance:
            found.append(f"{first}, and variances and similarities that are fitted to it mean nothing")
        return "; ".join(found)

    @property
    def own_first(self) -> OwnFirst:
        """By the cosine, of images and the text that each has most often."""
        rows = (self.likeliest_text >= 0).nonzero().squeeze(1)
        rows = rows[evenly(len(rows))]
        texts, own = self.likeliest_text[rows].unique(return_inverse=True)
        return OwnFirst.of(self.image[rows].float() @ self.text[texts].float().T, own)

    def _check_part(self, side: str, name: str, keys: Sequence[str] | None) -> None:
        x, some, rows = getattr(self, name), getattr(self, f"{name}_of", None), len(getattr(self, side))
        of = f"each of the {rows} {side}s"
        if some is not None:
            if x is None or some.ndim != 1 or some.dtype != torch.int64 or not ((some >= 0) & (some < rows)).all():
                raise ValueError(
                    f"{name}_of is {some.dtype} {tuple(some.shape)}, want (F,) int64 below {rows}, rows of"
                    f" the {side}s that {name} is of"
                )
            of, rows = f"each of {len(some)} {side}s", len(some)
        if x is None:
            return
        if x.ndim != 2 or len(x) != rows or not x.is_floating_point():
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, want a row for {of}, float")
        _check_finite(name, x, keys if some is None or keys is None else [keys[row] for row in some])

    @classmethod
    def in_rows(cls, image: Tensor, text: Tensor, scale: float, **further: Any) -> Pairs:
        """Row i of the images beside row i of the texts, (P, D) each."""
        return cls(
            image=image,
            text=text,
            image_of=torch.arange(len(image)),
            text_of=torch.arange(len(text)),
            scale=scale,
            **further,
        )

    def __len__(self) -> int:
        return len(self.image_of)

    @property
    def weights(self) -> Tensor:
        """How often each pair occurs, (P,) float32."""
        return torch.ones(len(self)) if self.weight is None else self.weight.float()

    @property
    def likeliest_text(self) -> Tensor:
        """The text that occurs most often with each image, the first of several; -1: it has none. (N,) int64."""
        most = torch.zeros(len(self.image)).scatter_reduce(0, self.image_of, self.weights, "amax")
        own = self.weights == most[self.image_of]
        none = torch.full((len(self.image),), -1)
        return none.scatter_reduce(0, self.image_of[own], self.text_of[own], "amin", include_self=False)

    @property
    def swapped(self) -> Pairs:
        """The same with the sides exchanged: what is written for texts against images does for images against texts."""
        parts: dict[str, Any] = {
            f"{side}{part}": getattr(self, f"{other}{part}")
            for side, other in (("image", "text"), ("text", "image"))
            for part in ("", "_of", "_hidden", "_first", "_first_of")
        }
        return Pairs(**parts, scale=self.scale, weight=self.weight)

    def tensors(self) -> dict[str, Tensor]:
        """All of it but the keys by name, as safetensors takes it; `from_tensors` undoes it."""
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        kept = {name: x.contiguous() for name, x in named.items() if isinstance(x, Tensor)}
        kept |= {"model": torch.tensor([*bytes.fromhex(self.model)], dtype=torch.uint8)} if self.model else {}
        return kept | {"scale": torch.tensor(self.scale, dtype=torch.float64)}

    def save(self, path: Path) -> None:
        """Write `tensors` into a file of safetensors, whole or not at all."""
        with replacing(path) as temporary:
            save_file(self.tensors(), temporary)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Pairs:
        """What `tensors` gave. ValueError for names that are missing or unknown."""
        wanted = {"image", "text", "image_of", "text_of", "scale"}
        known = set(cls.__dataclass_fields__) - {"image_keys", "text_keys"}
        if not wanted <= tensors.keys() <= known:
            raise ValueError(
                f"pairs have the tensors {', '.join(sorted(wanted))} and may have"
                f" {', '.join(sorted(known - wanted))}; got {', '.join(sorted(tensors))}"
            )
        given: dict[str, Any] = {**tensors, "scale": float(tensors["scale"])}
        return cls(**given | {"model": bytes(tensors["model"].tolist()).hex() if "model" in tensors else ""})


@dataclass(frozen=True, kw_only=True)
class Pool:
    """N images and M texts by one model, of which this rank has a share; nothing says which texts an image came with.

    keys: of the rank's n images; image: (n, D), text: (m, D), unit means, float32; log_var is -inf where the model's
    variances mean nothing; text_ids: (m, L) int64; image_novelty, text_novelty: depth -> nats (n,), (m,), empty where
    the model knows of none; image_rows: (n,), text_rows: (m,) int64, their rows among the N and M, rising, None where
    this rank has all.
    """

    keys: Sequence[str]
    image: Gaussian
    text: Gaussian
    text_ids: Tensor
    image_novelty: dict[str, Tensor]
    text_novelty: dict[str, Tensor]
    image_rows: Tensor | None = None
    text_rows: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.image.mean) or len(self.text_ids) != len(self.text.mean):
            raise ValueError(
                f"{len(self.keys)} keys of {len(self.image.mean)} images, {len(self.text_ids)} rows of ids"
                f" of {len(self.text.mean)} texts: give one of each"
            )

    def side(self, side: Side) -> tuple[Gaussian, Tensor]:
        """The images or texts, and their rows, on the same device."""
        z, rows = (self.image, self.image_rows) if side == "image" else (self.text, self.text_rows)
        return z, (torch.arange(len(z.mean)) if rows is None else rows).to(z.mean.device)


def missing_labels(image: Tensor, hits: Tensor, again: Tensor) -> float:
    """Return R of `fit.text_target`: 0 where images seem to have all texts that are true of them, 1 where few do.

    If a neighbour lacks a text at random, it shares as many other texts with the image as one that has the text: R is
    the ratio of these two shares, at most 1. Texts of one image say nothing of this, and count as a ratio of 1.
    image, hits: as in `fit.neighbours_have`; again: (P,) bool, whether the text is given to two images or more.
    """
    row, hits = image[again].unique(return_inverse=True)[1], hits[again]
    others = row.bincount()[row].unsqueeze(1) - 1
    shared = hits.new_zeros(len(row), hits.shape[1]).index_add(0, row, hits)[row] - hits
    known, share = (others > 0).expand_as(hits), shared / others.clamp(min=1)
    having, lacking = (share[known & (hits == x)].mean() for x in (1, 0))
    ratio = float((lacking / having).nan_to_num(1.0).clamp(max=1))
    return 1 - (1 - ratio) * float(known[:, 0].sum()) / len(image)


def check_enough(pairs: int) -> None:
    """ValueError for fewer than LEAST pairs."""
    if pairs < LEAST:
        raise ValueError(
            f"{pairs} pairs of an image and a caption: variances are fitted to {LEAST} or more, give more"
            f" data ({SOUND} pairs for more than a rough fit)"
        )


def _check_finite(name: str, x: Tensor, keys: Sequence[str] | None = None) -> None:
    """ValueError naming the rows (N, W) that are not finite, by their keys where there are any."""
    lost = torch.cat(
        [(~part.isfinite().all(1)).nonzero().squeeze(1) + BLOCK * i for i, part in enumerate(x.split(BLOCK))]
    )
    if len(lost):
        named = first_few([f"row {row}" if keys is None else repr(keys[row]) for row in lost.tolist()], NAMED)
        raise ValueError(
            f"{name} holds NaN or infinite values in {len(lost)} of {len(x)} rows ({named}): leave"
            " these samples out, or take a model that has not diverged"
        )


def _check_changed(changed: Tensor, rows: Tensor | None, image: Tensor) -> None:
    if rows is None or rows.ndim != 1 or rows.dtype != torch.int64 or not ((rows >= 0) & (rows < len(image))).all():
        raise ValueError(f"changed_of is no (C,) int64 below {len(image)}, rows of the images that changed is of")
    if changed.ndim != 3 or changed.shape[1:] != (len(rows), image.shape[1]):
        raise ValueError(f"changed is {tuple(changed.shape)}, want (E, {len(rows)}, {image.shape[1]})")
    _check_finite("changed", changed.flatten(0, 1))


def _check_side(side: str, mean: Any, rows: Any, keys: Sequence[str] | None) -> None:
    for name, x in ((side, mean), (f"{side}_of", rows)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {kind_of(x)}, want a tensor")
    if mean.ndim != 2 or not mean.is_floating_point() or not len(mean):
        raise ValueError(f"{side} is {mean.dtype} {tuple(mean.shape)}, want unit means (rows, D), float, rows > 0")
    if rows.ndim != 1 or rows.dtype != torch.int64:
        raise ValueError(f"{side}_of is {rows.dtype} {tuple(rows.shape)}, want the rows of the pairs, (P,) int64")
    if not len(rows):
        raise ValueError("no pair: nothing can be fitted")
    if rows.amin() < 0 or rows.amax() >= len(mean):
        raise ValueError(f"{side}_of has rows from {rows.amin()} to {rows.amax()} and there are {len(mean)} {side}s")
    _check_finite(side, mean, keys)
    lengths = torch.cat([part.float().norm(dim=1) for part in mean.split(BLOCK)])
    if not torch.allclose(lengths, torch.ones_like(lengths), atol=1e-2):  # bfloat16 keeps a length to 4e-3
        raise ValueError(
            f"{side}s have lengths from {lengths.amin():.3g} to {lengths.amax():.3g}, want unit means:"
            " torch.nn.functional.normalize(x, dim=-1)"
        )
