"""A model of four numbers whose images have changes, so that all that a fit gives is there."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from ambiguous_pairs import points

from prolip.uncertainty.fit import Fitted, fit_variances
from prolip.uncertainty.pairs import Pairs


def likely_pairs(images: int = 120, dim: int = 16, kinds: int = 3, ids: bool = False) -> Pairs:
    """Images in twelve topics, each with a text of its own and that of its topic; changes move them more and more, to
    where the pairs are forgotten.
    """
    g = torch.Generator().manual_seed(5)
    topic = torch.arange(images) % 12
    image = F.normalize(0.7 * points(12, dim, seed=6)[topic] + points(images, dim, seed=7), dim=1)
    middle = F.normalize(torch.stack([image[topic == k].mean(0) for k in range(12)]), dim=1)
    text = torch.cat([F.normalize(image + 0.2 * points(images, dim, seed=8), dim=1), middle])
    of = torch.arange(images)
    changed_of = torch.arange(0, images, 2)
    noise = torch.randn(kinds, len(changed_of), dim, generator=g) / dim**0.5
    changed = F.normalize(image[changed_of] + torch.linspace(1, 4, kinds).view(-1, 1, 1) * noise, dim=2)
    first = torch.randn(images, 10, generator=g)
    words = {"text_ids": torch.stack([torch.arange(len(text)), torch.full((len(text),), 499)], 1)} if ids else {}
    return Pairs(
        image=image, text=text, image_of=torch.cat([of, of]), text_of=torch.cat([of, images + topic]), scale=12.0,
        image_first=first, text_first=torch.randn(len(text), 10, generator=g), changed=changed, changed_of=changed_of,
        **words,
    )  # fmt: skip


def likely_model(**sizes) -> tuple[Pairs, Fitted]:
    """The pairs and what was fitted to them."""
    pairs = likely_pairs()
    return pairs, fit_variances(pairs, **{"bank": 64, "centres": 200, "novelty_centres": 32, "readings": 64} | sizes)
