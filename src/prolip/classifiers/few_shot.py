"""Classification by a few images of each class and, with a model, by the class names."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.covariance import ledoit_wolf
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data

from prolip.classifiers import base
from prolip.classifiers.base import ImageClassifier, Names
from prolip.classifiers.sharpness import Sharpness, fit_sharpness
from prolip.embedder import Embedded, Embedder
from prolip.gaussian import Gaussian

#: Folds of the labelled images, each held out once, to weigh names against shots.
FOLDS = 5
#: Prior deviations of the log weights of names and shots: larger for shots, as the scale of densities is a guess.
LOOSE_TEXTS, LOOSE_SHOTS = 1.0, 2.0
#: Share of the mean variance that is added to a covariance, so that it can be inverted.
RIDGE = 1e-3


class FewShotClassifier(ImageClassifier):
    """Classes from a few labelled images: `FewShotClassifier(model).fit(images, names).predict(others)`.

    Gaussian discriminant analysis of the means (Wang et al., ICLR 2024) and the model's own score with the classes'
    names, weighed by cross-validation over the shots. model: as for `ZeroShotClassifier`; None: X is an array of any
    features. classes: {label: name or list of names}; None: labels that are texts are the names. text: use the names.
    After `fit`: `classes_`, `discriminant_`, `texts_` (None without names), `sharpness_`.
    """

    def __init__(  # noqa: PLR0913 (as above)
        self,
        model: str | Embedder | None = None,
        classes: Names = None,
        text: bool = True,
        templates: Any = "{}",
        similarity: str | None = None,
        pretrained: str | None = None,
        device: str = "cpu",
        batch_size: int = 64,
        seed: int = 0,
    ):
        self.model, self.classes, self.text, self.templates = model, classes, text, templates
        self.similarity, self.pretrained, self.device = similarity, pretrained, device
        self.batch_size, self.seed = batch_size, seed

    def fit(self, X: Any, y: Any) -> FewShotClassifier:
        """Learn two or more classes from labelled images, at least one image each."""
        self._begin(None if self.model is None else self._embedder())
        if self.model is None:
            x, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
            found = Embedded(base.points(torch.tensor(x)), {})
        else:
            self.dimension_ = self._embedder().embed_texts([""]).mean.shape[1]
            found, y = self._look(X), column_or_1d(y)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class, {self.classes_[0]!r}: give images of two or more classes")
        x = found.z.mean.double().numpy()
        if len(x) != len(y):
            raise ValueError(f"{len(x)} images and {len(y)} labels: give one label per image")
        self.texts_, known = None, self.classes_.tolist()
        if self.model is not None and self.text:
            given = base.named_classes(known if self.classes is None else self.classes)
            for label in known:
                if label not in given:
                    raise ValueError(f"{base.unknown_label(label, list(given))}; or set text=False to use images only")
            if missing := ", ".join(repr(label) for label in given if label not in known):
                remedy = "remove those classes, or use ZeroShotClassifier, which needs no images"
                raise ValueError(f"there is no image of {missing}: {remedy}")
            self.texts_ = base.text_classes(self._embedder(), list(given.values()), self.templates)
        self.discriminant_ = fit_discriminant(x, labels, len(self.classes_))
        self.sharpness_ = self._weigh(found.z, x, labels)
        return self

    def _weigh(self, z: Gaussian, x: np.ndarray, labels: np.ndarray) -> Sharpness:
        """Weigh names and shots by cross-validation over the shots; if no shot can be held out, use the names only."""
        count, random = len(self.classes_), np.random.default_rng(self.seed)
        fold = np.full(len(labels), -1)  # the fold that holds an image out; -1: the only image of its class
        for label in range(count):
            rows = random.permutation(np.flatnonzero(labels == label))
            if len(rows) > 1:
                fold[rows] = np.arange(len(rows)) % min(FOLDS, len(rows))
        turns, held = range(fold.max() + 1), fold >= 0
        texts = [] if self.texts_ is None else [base.class_logits(self.score_, z, self.texts_)]
        for logits in texts:
            self._judge(logits, labels)
        if not held.any() or min((fold != turn).sum() for turn in turns) <= count:
            return Sharpness(np.array([1.0, 0.0] if texts else [1.0]))
        shots = np.zeros((len(x), count))
        for turn in turns:
            out = fold == turn
            shots[out] = fit_discriminant(x[~out], labels[~out], count).logits(x[out])
        parts = [part[held] for part in (*texts, shots)]
        loose = [*([LOOSE_TEXTS] if texts else []), LOOSE_SHOTS]
        return fit_sharpness(parts, labels[held], self._uncertainty(z)[held], loose)

    def _parts(self, found: Embedded) -> list[np.ndarray]:
        shots = self.discriminant_.logits(found.z.mean.double().numpy())
        return [shots] if self.texts_ is None else [base.class_logits(self.score_, found.z, self.texts_), shots]

    def _uncertainty(self, z: Gaussian) -> np.ndarray:
        return np.zeros(len(z.mean)) if self.card_ is None else super()._uncertainty(z)

    def _embedded(self, X: Any) -> Embedded:
        if self.model is None and self.card_ is None:
            return Embedded(base.points(torch.tensor(validate_data(self, X, dtype=np.float64, reset=False))), {})
        return super()._embedded(X)


class Discriminant(NamedTuple):
    """log N(x; mean_c, S) of classes without their common part: weight x + offset, (C, D) and (C,)."""

    weight: np.ndarray
    offset: np.ndarray

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Return log densities divided by the dimension, (N, D) -> (N, C): undivided, they would be overconfident."""
        return (x @ self.weight.T + self.offset) / x.shape[1]


def fit_discriminant(x: np.ndarray, labels: np.ndarray, classes: int) -> Discriminant:
    """Fit features (N, D), labels (N,) of equally frequent classes; S: within classes (Ledoit and Wolf, 2004)."""
    x = np.asarray(x, np.float64)
    mean = np.stack([x[labels == c].mean(0) for c in range(classes)])
    apart, freedom = x - mean[labels], len(x) - classes
    if freedom < 1 or not apart.any():
        apart, freedom = x - x.mean(0), max(1, len(x) - 1)
    covariance = ledoit_wolf(apart, assume_centered=True)[0] * (len(x) / freedom)
    level = np.trace(covariance) / len(covariance)
    covariance[np.diag_indices_from(covariance)] += RIDGE * level if level > 0 else 1.0
    weight = np.linalg.solve(covariance, mean.T).T
    return Discriminant(weight, -0.5 * (weight * mean).sum(1))
