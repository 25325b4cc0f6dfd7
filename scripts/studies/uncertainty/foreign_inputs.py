"""Inputs unlike the training data of a model of drawings, which novelty should detect.

Photographs and sentences come with scikit-image and scikit-learn; a seed generates the rest.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
from PIL import Image

#: Inputs of each kind, and pixels along a side.
COUNT, SIZE = 150, 64
PHOTOGRAPHS = (
    "skimage/data/astronaut.png",
    "skimage/data/chelsea.png",
    "skimage/data/coffee.png",
    "skimage/data/rocket.jpg",
    "skimage/data/motorcycle_left.png",
    "skimage/data/hubble_deep_field.jpg",
    "skimage/data/ihc.png",
    "skimage/data/retina.jpg",
    "skimage/data/camera.png",
    "skimage/data/coins.png",
    "skimage/data/moon.png",
    "skimage/data/brick.png",
    "skimage/data/grass.png",
    "skimage/data/gravel.png",
    "sklearn/datasets/images/china.jpg",
    "sklearn/datasets/images/flower.jpg",
)
Numbers = np.random.Generator


def pictures(seed: int = 0) -> dict[str, list[Image.Image]]:
    """Return COUNT images of each kind, by its name."""
    return {
        name: list(make(np.random.default_rng([seed, number]))) for number, (name, make) in enumerate(KINDS.items())
    }


def photographs(numbers: Numbers) -> Iterator[Image.Image]:
    """Yield square crops of photographs, a quarter of the shorter side or more."""
    for place in np.resize(PHOTOGRAPHS, COUNT):
        package, _, path = place.partition("/")
        with Image.open(Path(import_module(package).__file__ or "").parent / path) as file:
            picture = file.convert("RGB")
        side = int(numbers.uniform(0.25, 1) * min(picture.size))
        left, top = (int(numbers.integers(0, length - side + 1)) for length in picture.size)
        yield picture.crop((left, top, left + side, top + side)).resize((SIZE, SIZE), Image.Resampling.BICUBIC)


def noise(numbers: Numbers) -> Iterator[Image.Image]:
    """Yield normal, uniform and coarse noise in turn."""
    for number in range(COUNT):
        if number % 3 == 2:  # eight by eight colours, smoothed
            small = from_shares(numbers.random((8, 8, 3)))
            yield small.resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        else:
            normal = 0.5 + 0.25 * numbers.standard_normal((SIZE, SIZE, 3))
            yield from_shares(normal if number % 3 else numbers.random((SIZE, SIZE, 3)))


def blank(numbers: Numbers) -> Iterator[Image.Image]:
    """Yield single colours or gradients; the first are white, grey and black."""
    y, x = np.mgrid[-0.5 : 0.5 : SIZE * 1j, -0.5 : 0.5 : SIZE * 1j]
    for number in range(COUNT):
        first, second, angle = numbers.random(3), numbers.random(3), numbers.uniform(0, 2 * np.pi)
        run = (np.cos(angle) * x + np.sin(angle) * y) / 1.5 + 0.5 if number % 2 else np.zeros((SIZE, SIZE))
        first = np.full(3, 1 - number / 4) if number in (0, 2, 4) else first
        yield from_shares(first + (second - first) * run[..., None])


KINDS: dict[str, Callable[[Numbers], Iterator[Image.Image]]] = {
    "photographs": photographs,
    "noise": noise,
    "blank": blank,
}


def texts(own: Sequence[str], seed: int = 0) -> dict[str, list[str]]:
    """Return texts of each kind, by name. own: known texts, whose words `shuffled` mixes."""
    numbers = random.Random(seed)
    words = [word for text in own for word in text.split()]
    lengths = [len(text.split()) for text in own]
    return {
        "gibberish": [
            " ".join("".join(numbers.choices(string.ascii_lowercase, k=numbers.randint(3, 9))) for _ in range(count))
            for count in numbers.choices(lengths, k=2 * COUNT)
        ],
        "sentences": numbers.sample(sentences(), COUNT),
        "shuffled": [" ".join(numbers.sample(words, max(2, count))) for count in numbers.choices(lengths, k=2 * COUNT)],
    }


def sentences() -> list[str]:
    """Return scikit-learn's descriptions of its data sets, six words at a time."""
    folder = Path(import_module("sklearn").__file__ or "").parent / "datasets/descr"
    found = []
    for file in sorted(folder.glob("*.rst")):
        prose = file.read_text(encoding="utf-8").partition("References")[0].lower()
        words = re.findall(r"[a-z]{2,}", prose)
        found += [" ".join(words[start : start + 6]) for start in range(0, len(words) - 6, 6)]
    return found


def from_shares(shares: np.ndarray) -> Image.Image:
    """Return an image from colours in [0, 1], (H, W, 3)."""
    return Image.fromarray((shares.clip(0, 1) * 255).round().astype(np.uint8))
