"""Random images and token ids, for measuring the training step without reading anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from prolip.data.faults import FaultCounter
from prolip.data.order.cursor import Cursor
from prolip.data.order.streams import Place
from prolip.data.samples import Example, Row

#: Images are shifted copies of this many, because noise of its own for each costs more than a decode.
POOL = 32
#: Small enough to be a token of any vocabulary.
VOCABULARY = 1000


@dataclass(frozen=True)
class SyntheticSource:
    """Sample i of `length` goes to stream i % S, in every pass the same."""

    length: int

    def stream(self, place: Place, faults: FaultCounter, cursor: Cursor | None = None) -> Iterator[Row]:
        """Numbered rows without content."""
        cursor = cursor or Cursor()
        while True:
            for index in range(place.stream, self.length, place.streams)[cursor.drawn :]:
                cursor.drawn += 1
                yield Row({"__key__": f"synthetic-{index}", "index": index}, cursor.turn)
            cursor.next_turn()


@dataclass
class SyntheticDecoder:
    """Sample i -> image (3, H, W) of standard normal pixels and (L,) token ids, functions of (seed, i) only.

    Texts are ids from 1 to 999 of a random length, padded with 0: no tokenizer is needed. captions: of an image; other
    than 1, ids are (captions, L).
    """

    image_size: int | tuple[int, int]
    context_length: int
    seed: int = 0
    captions: int = 1

    @cached_property
    def pool(self) -> Tensor:
        size = (self.image_size, self.image_size) if isinstance(self.image_size, int) else tuple(self.image_size)
        return torch.randn(POOL, 3, *size, generator=torch.Generator().manual_seed(self.seed))

    def __call__(self, row: Row, epoch: int) -> Example:
        """The example of a row; the epoch does not matter."""
        index = row.raw["index"]
        image = self.pool[index % POOL].roll((index // POOL, index), dims=(1, 2))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        texts = [self._text(generator) for _ in range(self.captions)]
        text = texts[0] if self.captions == 1 else torch.stack(texts) if texts else ()
        return Example(row.raw["__key__"], image, text, index, (index,))

    def _text(self, generator: torch.Generator) -> Tensor:
        text = torch.randint(1, VOCABULARY, (self.context_length,), generator=generator)
        text[int(torch.randint(1, self.context_length + 1, (), generator=generator)) :] = 0
        return text
