"""The figures of the ProLIP paper, by its numbers; this module does not import the drawing code."""

from __future__ import annotations

from typing import NamedTuple

#: Vector formats.
VECTORS = ("svg", "pdf")


class Entry(NamedTuple):
    """A figure: its file name, its content in words, and flags for needing variances and weights of prompts."""

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
    "8": Entry("image_levels", "inclusion of images in parts of themselves"),
    "9": Entry("traversals", "captions met from drawings to their roots", False),
    "C.1": Entry("pairs", "pairs of certain and uncertain drawings and texts"),
    "C.2": Entry("image_traces", "uncertainty of images by level, and against their originals'"),
    "C.3": Entry("failures", "images that their own level 0 does not include"),
    "C.4": Entry("prompts", "distribution of the weights of prompts", False, needs_weights=True),
    "C.5": Entry(
        "prompts_of_classes", "the prompts of most weight, next to drawings of their classes", False, needs_weights=True
    ),
}


def file_of(key: str) -> str:
    """Return the file name of a figure without its suffix, such as figure_C1_pairs."""
    return f"figure_{key.replace('.', '')}_{FIGURES[key].name}"
