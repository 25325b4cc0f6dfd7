"""Which figures of the ProLIP paper there are, by its numbers; imports nothing of what draws them."""

from __future__ import annotations

from typing import NamedTuple

#: How vectors are written.
VECTORS = ("svg", "pdf")


class Entry(NamedTuple):
    """A figure: its file's name, what it shows in words, whether it needs variances, and weights of prompts."""

    name: str
    words: str
    needs_variances: bool = True
    needs_weights: bool = False


FIGURES: dict[str, Entry] = {
    "1": Entry("plane", "Gaussians of drawings and of their captions in a plane", False),
    "4": Entry("samples", "the least and most uncertain drawings and texts"),
    "5": Entry("modalities", "uncertainty of drawings against that of texts"),
    "6": Entry("lengths", "uncertainty of texts against their length"),
    "7": Entry("text_levels", "uncertainty of texts by level, general to specific"),
    "8": Entry("image_levels", "whether images are included in parts of themselves"),
    "9": Entry("traversals", "captions met from drawings to their roots", False),
    "C.1": Entry("pairs", "pairs of certain and uncertain drawings and texts"),
    "C.2": Entry("image_traces", "uncertainty of images by level, and against their originals'"),
    "C.3": Entry("failures", "images that their own level 0 does not include"),
    "C.4": Entry("prompts", "how uneven the weights of prompts are", False, needs_weights=True),
    "C.5": Entry(
        "prompts_of_classes", "the prompts that count most, beside drawings of their classes", False, needs_weights=True
    ),
}


def file_of(key: str) -> str:
    """How the files of a figure are called, without their kind: figure_C1_pairs."""
    return f"figure_{key.replace('.', '')}_{FIGURES[key].name}"
