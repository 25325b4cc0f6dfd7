"""What a classifier is given: pictures, Gaussians, or arrays of features that were embedded before."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from sklearn.utils.validation import check_array
from torch import Tensor

from prolip.embedder import Embedder
from prolip.gaussian import Gaussian, check_embeddings

#: Ends of a tower that a novelty is of, in the order of their columns.
ENDS = ("mean", "first")
WANTED = "pictures (paths, URLs, bytes or Pillow images), a Gaussian, or what `embed` gave"


class Shown(NamedTuple):
    """Images as a classifier takes them: Gaussians (N, D), and by name how new they are, in nats (N,), or nothing."""

    z: Gaussian
    novelty: dict[str, Tensor]

    @property
    def mean(self) -> np.ndarray:
        """(N, D) float64."""
        return self.z.mean.double().numpy()


def is_pictures(given: Any) -> bool:
    """Whether these are pictures, in files or as Pillow images."""
    if isinstance(given, (str, os.PathLike, bytes, Image.Image)):
        raise TypeError(f"one {type(given).__name__}: give a list of pictures")
    if isinstance(given, np.ndarray) or hasattr(given, "iloc"):
        given = np.asarray(given)
        return given.ndim == 1 and len(given) > 0 and is_picture(given[0])
    return isinstance(given, Sequence) and not isinstance(given, Gaussian) and len(given) > 0 and is_picture(given[0])


def is_picture(given: Any) -> bool:
    return isinstance(given, (str, os.PathLike, bytes, Image.Image)) or hasattr(given, "read")


def embed(pictures: Iterable[Any], embedder: Embedder, batch_size: int) -> Shown:
    """Pictures through the image tower, some at a time."""
    return Shown(*embedder.embed(pictures, "image", batch_size))


def to_array(shown: Shown) -> np.ndarray:
    """One row of each image, (N, W) float32: mean, log_var, novelties; of a model of points the mean alone."""
    z = shown.z
    if torch.isneginf(z.log_var).all():
        return z.mean.numpy()
    return torch.cat([*z, *(shown.novelty[end].unsqueeze(1) for end in ENDS if end in shown.novelty)], 1).numpy()


def from_array(rows: Any, dimension: int, probabilistic: bool) -> Shown:
    """`to_array` undone, for a model of `dimension`. ValueError for another width, and for what is not finite."""
    x = torch.from_numpy(check_array(rows, dtype=np.float32, copy=True))
    if not probabilistic:
        check_columns(x.shape[1], (dimension,))
        return Shown(Gaussian(x, torch.full_like(x, -torch.inf)), {})
    check_columns(x.shape[1], (2 * dimension, 2 * dimension + len(ENDS)))
    mean, log_var, more = x.split([dimension, dimension, x.shape[1] - 2 * dimension], 1)
    return Shown(Gaussian(mean, log_var), dict(zip(ENDS, more.T)))


def check_columns(found: int, wanted: tuple[int, ...]) -> None:
    if found not in wanted:
        raise ValueError(
            f"X has {found} features, but this model has {' or '.join(map(str, wanted))} (mean, log_var,"
            f" and two novelties where it has them; a model of points the mean alone): give {WANTED}"
        )


def as_shown(given: Any, embedder: Embedder, dimension: int, batch_size: int) -> Shown:
    """Whatever was given. ValueError and TypeError for what is none of it, and for numbers that are not finite."""
    if isinstance(given, Gaussian):
        check_embeddings(given, "X")
        check_columns(given.mean.shape[-1], (dimension,))
        return Shown(Gaussian(*(x.detach().float().cpu() for x in given)), {})
    if not is_pictures(given):
        return from_array(given, dimension, embedder.probabilistic)
    found = embed(given, embedder, batch_size)
    check_embeddings(found.z, "the embeddings of X")
    return found
