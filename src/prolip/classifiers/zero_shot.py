"""Classification by class names alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.validation import column_or_1d

from prolip.classifiers import base
from prolip.classifiers.base import ImageClassifier, Names
from prolip.classifiers.sharpness import Sharpness, fit_sharpness
from prolip.embedder import Embedded, Embedder


class ZeroShotClassifier(ImageClassifier):
    """Classes from their names: `ZeroShotClassifier(model, ["cat", "dog"]).fit().predict(images)`.

    model: a name such as local-dir:runs/demo/model (`pretrained`: its weights, if the name has none), or an
    `Embedder`. classes: names, or {label: name or list of names}. templates: one or a list, with {} for the name;
    "openai", "simple" or "drawings" are lists. similarity: a score other than the model's own. After `fit`:
    `classes_`, the sorted labels, `texts_`, their Gaussians (C, D), `sharpness_`.
    """

    def __init__(  # noqa: PLR0913 (scikit-learn's estimators take all of their settings here)
        self,
        model: str | Embedder,
        classes: Names,
        templates: Any = "{}",
        similarity: str | None = None,
        pretrained: str | None = None,
        device: str = "cpu",
        batch_size: int = 64,
    ):
        self.model, self.classes, self.templates, self.similarity = model, classes, templates, similarity
        self.pretrained, self.device, self.batch_size = pretrained, device, batch_size

    def fit(self, X: Any = None, y: Any = None) -> ZeroShotClassifier:
        """Embed the classes. Labelled images, if any, calibrate the probabilities without changing the answers.

        Without labels, probabilities use the model's own scale and doubt. ValueError for labels that no class has.
        """
        named = base.named_classes(self.classes)
        embedder = self._embedder()
        self._begin(embedder)
        self.texts_ = base.text_classes(embedder, list(named.values()), self.templates)
        self.classes_ = np.array(list(named))
        self.dimension_ = self.texts_.mean.shape[1]
        if (X is None) != (y is None):
            raise ValueError("fit needs both images and labels: give both, or neither")
        if X is None:
            self.sharpness_, self.doubts_ = Sharpness(np.ones(1)), True
            return self
        found, y = self._look(X), column_or_1d(y)
        if len(y) != len(found.z.mean):
            raise ValueError(f"{len(found.z.mean)} images and {len(y)} labels: give one label per image")
        place = {label: row for row, label in enumerate(self.classes_.tolist())}
        if strange := [label for label in y.tolist() if label not in place]:
            raise ValueError(base.unknown_label(strange[0], list(place)))
        labels, parts = np.array([place[label] for label in y.tolist()]), self._parts(found)
        self._judge(parts[0], labels)
        self.sharpness_ = fit_sharpness(parts, labels, self._uncertainty(found.z))
        return self

    def _parts(self, found: Embedded) -> list[np.ndarray]:
        return [base.class_logits(self.score_, found.z, self.texts_)]
