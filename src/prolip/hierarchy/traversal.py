"""Image traversal, ProLIP 4.4: from the caption nearest to an image to a [ROOT], and the captions on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from prolip.gaussian import Gaussian, without_autocast
from prolip.hierarchy import INCLUSIONS, ROOTS, STEPS
from prolip.measures import pairwise_inclusion_test, pairwise_log_inclusion

Pairwise = Callable[[Gaussian, Gaussian], Tensor]
#: H grows with the distance of the means if the caption is wider.
MEASURES: dict[str, Pairwise] = dict(zip(INCLUSIONS, (pairwise_log_inclusion, pairwise_inclusion_test)))
#: Elements of one block of similarities.
ELEMENTS = 1 << 24


class Traversal(NamedTuple):
    """N traversals over T captions."""

    nearest: Tensor  # (N,), the caption nearest to the image
    root_caption: Tensor  # (N,), the caption that includes the image most, -1 if the root is ""
    root: Tensor  # (N, D), unit vectors
    met: Tensor  # (N, steps), the caption nearest at each step, the last nearest to the root

    def path(self, row: int) -> list[int]:
        """Return the captions met by one traversal, each run of equal ones once."""
        return torch.unique_consecutive(self.met[row]).tolist()


def traverse(  # noqa: PLR0913 (what the paper leaves to choose)
    image: Gaussian,
    text: Gaussian,
    empty: Gaussian,
    root: str = "included",
    steps: int = STEPS,
    inclusion: str | Pairwise = "log_inclusion",
) -> Traversal:
    """Traverse from every image to its root, image (N, D), text (T, D) the captions, empty (1, D) the text "".

    The path is (1 - s) m_caption + s m_root, s in `steps` equal steps; nearest is by the cosine of the means.
    Similarities are mixed from those of the ends, so a step costs N T. root="included": the mean of the caption that
    includes the image most by `inclusion` at eps = 0 (one-sided by default; ProLIP (3)) or by any scores of all pairs,
    averaged with the mean of "" and renormalised; root="empty": that of "" (Desai et al. 2023). ValueError for unknown
    names, fewer than 2 steps, and points with a measure.
    """
    for name, given, known in ("root", root, ROOTS), ("inclusion", inclusion, INCLUSIONS):
        if isinstance(given, str) and given not in known:
            raise ValueError(f"{name} {given!r} is unknown: use one of {', '.join(known)}")
    includes = MEASURES[inclusion] if isinstance(inclusion, str) else inclusion
    if steps < 2 or not len(text.mean):
        raise ValueError(f"{steps} steps, {len(text.mean)} captions: give at least 2 steps and a caption")
    measured = root == "included" and isinstance(inclusion, str)
    if measured and any(bool(z.log_var.isneginf().any()) for z in (image, text)):
        raise ValueError("these embeddings are points, which cannot include anything: use root='empty'")
    captions, end = F.normalize(text.mean, dim=-1), F.normalize(empty.mean[0], dim=-1)
    share = torch.linspace(0, 1, steps).tolist()
    parts: list[Traversal] = []
    for rows in torch.arange(len(image.mean)).split(max(1, ELEMENTS // max(1, 2 * len(captions)))):
        z = image.select(rows)
        with without_autocast(captions.device):
            nearest = (z.mean @ captions.mT).argmax(1)
            if root == "included":
                chosen = includes(z, text).argmax(1)
                ends = F.normalize(captions[chosen] + end, dim=-1)
            else:
                chosen = torch.full_like(nearest, -1)
                ends = end.expand(len(rows), -1)
            start, last = captions[nearest] @ captions.mT, ends @ captions.mT
        met = torch.stack([torch.lerp(start, last, s).argmax(1) for s in share], 1)
        parts.append(Traversal(nearest, chosen, ends, met))
    return Traversal(*(torch.cat(found) for found in zip(*parts)))
