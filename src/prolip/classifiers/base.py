"""The base of both classifiers: probabilities, uncertainty, and answers with a bound on their share of errors."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from numbers import Number
from typing import Any

import numpy as np
import open_clip
import torch
from PIL import Image
from scipy.special import log_softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d
from torch import Tensor

from prolip.classifiers.sharpness import Sharpness
from prolip.embedder import Embedded, Embedder, ModelCard
from prolip.gaussian import Gaussian, check_embeddings, kind_of
from prolip.measures.chance import OwnFirst, warn_once
from prolip.prompts import DRAWINGS
from prolip.prompts.templates import class_prompts, mix_groups
from prolip.scores import Score
from prolip.search.risk_control import Threshold, find_threshold
from prolip.uncertainty.doubt import hedge
from prolip.uncertainty.novelty import refusal
from prolip.utils.documents import shown as shortened
from prolip.utils.flags import did_you_mean

#: Templates by name: OpenAI's 80 for ImageNet, its seven best, and ours for small drawings.
NAMED = {
    "openai": open_clip.OPENAI_IMAGENET_TEMPLATES,
    "simple": open_clip.SIMPLE_IMAGENET_TEMPLATES,
    "drawings": DRAWINGS,
}
Names = Sequence[str] | Mapping[Any, str | Sequence[str]] | None
#: Ends of a tower, in the order of the columns of their novelty.
ENDS = ("mean", "first")
WANTED = "images (paths, URLs, bytes or Pillow images), a Gaussian, or a result of `embed`"
#: Rows whose scores are computed at a time.
ROWS = 4096


class ImageClassifier(ClassifierMixin, BaseEstimator):
    """Classes of images X: a list of images (paths, URLs, bytes, Pillow images), a Gaussian, or a result of `embed`."""

    model: str | Embedder | None
    pretrained: str | None
    similarity: str | None
    device: str
    batch_size: int
    classes_: np.ndarray
    sharpness_: Sharpness
    dimension_: int
    card_: ModelCard | None
    score_: Score
    #: True if probabilities come from the model alone, which has doubt about images unlike its training.
    doubts_: bool = False

    @abstractmethod
    def _parts(self, found: Embedded) -> list[np.ndarray]:
        """Return the kinds of logits (N, C) that `sharpness_` weighs."""

    def embed(self, X: Any) -> np.ndarray:
        """Embed images as rows (N, W): means, log variances, novelties. Every method takes rows in place of images."""
        z, novelty = self._embedder().embed(X, "image", self.batch_size)
        if z.log_var.isneginf().all():
            return z.mean.numpy()
        return torch.cat([*z, *(novelty[end].unsqueeze(1) for end in ENDS if end in novelty)], 1).numpy()

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return probabilities (N, C) in the order of `classes_`; each row sums to one."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Return the logarithms of `predict_proba`."""
        return self._answers(X)[0]

    def predict(self, X: Any, risk: float | None = None, delta: float = 0.1) -> np.ndarray:
        """Return the most probable class of each image, (N,).

        risk: refuse answers so that at most this share of the others is wrong, with probability 1 - delta over the
        images of `calibrate_risk`. The result is then a masked array, masked where an answer is refused.
        """
        log_p, confidence, by = self._answers(X)
        labels = self.classes_[log_p.argmax(1)]
        if risk is None:
            return labels
        threshold = self.risk_threshold(risk, delta)
        if self.risk_by_ != by:
            both = "give both images (or results of embed), or both Gaussians"
            known = self.risk_by_ or "no"
            raise ValueError(f"calibrate_risk had {known} novelties and predict has {by or 'none'}: {both}")
        free = labels.astype(object) if labels.dtype.kind == "U" else labels  # `filled` may insert a longer text
        return np.ma.MaskedArray(free, mask=~threshold.answers({"confidence": confidence}))

    def refuse(self, X: Any, risk: float, delta: float = 0.1) -> np.ndarray:
        """Return True for images that `predict` refuses at this risk, (N,) bool."""
        return np.ma.getmaskarray(self.predict(X, risk, delta))

    def confidence(self, X: Any) -> np.ndarray:
        """Return the probability that the answer is right and, with a novelty, the image familiar, (N,)."""
        return self._answers(X)[1]

    def calibrate_risk(self, X: Any, y: Any) -> ImageClassifier:
        """Record the confidence and the errors of labelled images for `predict` with a risk; `fit` deletes them.

        The images must be drawn like the later queries, and must not be those of `fit`. A label that is no class counts
        as a wrong answer. ValueError for labels of another type than the classes, and for NaN.
        """
        log_p, confidence, by = self._answers(X)
        y = column_or_1d(y)
        known = {label_kind(one) for one in self.classes_.tolist()}
        for label in y.tolist():
            if label_kind(label) not in known or label != label:
                own = shortened(self.classes_.tolist())
                what = f"label {label!r} is {kind_of(label)}, and the classes are {own}"
                raise ValueError(f"{what}: give labels of their type")
        if len(y) != len(log_p):
            raise ValueError(f"{len(log_p)} images and {len(y)} labels: give one label per image")
        self.risk_confidence_, self.risk_by_ = confidence, by
        self.risk_wrong_ = self.classes_[log_p.argmax(1)] != y
        return self

    def risk_threshold(self, risk: float, delta: float = 0.1) -> Threshold:
        """Return the least confidence that is answered (`search.risk_control`). ValueError before `calibrate_risk`."""
        check_is_fitted(self)
        if not hasattr(self, "risk_wrong_"):
            first = "call calibrate_risk(images, labels) with labelled images that fit did not use"
            raise ValueError(f"the risk is not calibrated for this fit: first {first}")
        return find_threshold({"confidence": self.risk_confidence_}, self.risk_wrong_, risk, delta)

    def _answers(self, X: Any) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
        """Return log probabilities (N, C), the largest one's confidence (N,), and the tower ends with a novelty."""
        check_is_fitted(self)
        found = self._embedded(X)
        log_p = log_softmax(self.sharpness_.logits(self._parts(found), self._uncertainty(found.z)), axis=1)
        reader = self._embedder().reader if self.doubts_ else None
        doubt = None if reader is None else self.score_.doubts(reader.evidence(found.z.mean))
        if doubt is not None:
            log_p = hedge(torch.from_numpy(log_p), doubt).numpy()
        nats = -log_p.max(1)
        if found.novelty:
            nats = refusal(found.z.mean.new_tensor(nats), found.novelty).double().numpy()
        return log_p, np.exp(-nats), tuple(found.novelty)

    def _uncertainty(self, z: Gaussian) -> np.ndarray:
        """Return the uncertainty by the model's own score, (N,)."""
        return self.score_.uncertainty(z).double().numpy()

    def _begin(self, embedder: Embedder | None) -> None:
        """Delete the former fit with its calibration of risk, and record the model of this one."""
        for name in [name for name in vars(self) if name.endswith("_") and name[0] != "_"]:
            delattr(self, name)
        self.card_ = None if embedder is None else embedder.card
        if self.card_ is not None:
            self.score_ = self.card_.scored_by(self.similarity)

    def _judge(self, logits: np.ndarray, labels: np.ndarray) -> None:
        """Warn if the class names classify labelled images at chance, (N, C), (N,)."""
        if (first := OwnFirst.of(torch.from_numpy(logits), torch.from_numpy(labels))).at_chance:
            warn_once(f"{first} (captions: the class names)")

    def _embedded(self, X: Any) -> Embedded:
        """Embed inputs for a fitted classifier. ValueError, with the differences, for another model than in `fit`."""
        if self.card_ is None:
            raise ValueError("fit had no model: call it with the model first")
        fitted, given = self.card_, self._embedder().card
        then, now = ({**asdict(card), **card.score, "score": card.score.get("name")} for card in (fitted, given))
        differ = [name for name in now if name not in ("name", "precision") and then.get(name) != now[name]]
        if differ:
            pairs = ((name, shortened(then.get(name)), shortened(now[name])) for name in differ)
            told = ", ".join(f"{name} {old} then and {new} now" for name, old, new in pairs)
            again = "Call fit again, or use the model of fit"
            raise ValueError(f"{given.name} is not the model of fit, {fitted.name}: {told}. {again}")
        return self._look(X)

    def _look(self, X: Any) -> Embedded:
        """Embed images, Gaussians or rows of `embed`. ValueError and TypeError for other and for non-finite inputs."""
        embedder, width = self._embedder(), self.dimension_
        if isinstance(X, Gaussian):
            check_embeddings(X, "X")
            check_columns(X.mean.shape[-1], width)
            return Embedded(Gaussian(*(x.detach().float().cpu() for x in X)), {})
        kinds = (str, os.PathLike, bytes, Image.Image)
        if isinstance(X, kinds):
            raise TypeError(f"X is one {type(X).__name__}: give a list of images")
        given = np.asarray(X) if hasattr(X, "iloc") else X
        listed = given.ndim == 1 if isinstance(given, np.ndarray) else isinstance(given, Sequence)
        if listed and len(given) > 0 and (isinstance(given[0], kinds) or hasattr(given[0], "read")):
            found = embedder.embed(X, "image", self.batch_size)
            check_embeddings(found.z, "the embeddings of X")
            return found
        rows = torch.from_numpy(check_array(X, dtype=np.float32, copy=True))
        if not embedder.probabilistic:
            check_columns(rows.shape[1], width)
            return Embedded(points(rows), {})
        check_columns(rows.shape[1], 2 * width, 2 * width + len(ENDS))
        mean, log_var, more = rows.split([width, width, rows.shape[1] - 2 * width], 1)
        return Embedded(Gaussian(mean, log_var), dict(zip(ENDS, more.T)))

    def _embedder(self) -> Embedder:
        """Return the model, loaded at its first use and again if its name changes."""
        if isinstance(self.model, Embedder):
            return self.model
        if not isinstance(self.model, str):
            wanted = "give a name such as 'local-dir:runs/demo/model', or a result of prolip.Embedder.load"
            raise ValueError(f"model={self.model!r}: {wanted}")
        named = (self.model, self.pretrained, self.device)
        if self.__dict__.get("_loaded", (None,))[0] != named:
            self._loaded = named, Embedder.load(self.model, self.pretrained, device=self.device)
        return self._loaded[1]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the loaded model; a copy loads it again by its name."""
        return {name: value for name, value in super().__getstate__().items() if name != "_loaded"}

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "sharpness_") and hasattr(self, "card_")


def label_kind(label: Any) -> str:
    """Return `text`, `number`, or the name of another type."""
    if isinstance(label, (str, bytes)):
        return "text"
    return "number" if isinstance(label, Number) else type(label).__name__


def text_classes(embedder: Embedder, classes: Sequence[Sequence[str]], templates: str | Sequence[Any]) -> Gaussian:
    """Embed each class as the mixture of its names in all templates, (C, D)."""
    if isinstance(templates, str) or callable(templates):
        templates = (templates,) if callable(templates) else NAMED.get(templates, (templates,))
    texts, counts = class_prompts(classes, templates)
    found = mix_groups(embedder.embed_texts(texts), counts)
    check_embeddings(found, "the embeddings of the classes")
    return found


def class_logits(score: Score, image: Gaussian, classes: Gaussian) -> np.ndarray:
    """Return logits of classes, (N, D), (C, D) -> (N, C): a * score, the log of a match probability, or the score."""
    parts = []
    for rows in torch.arange(len(image.mean)).split(ROWS):
        scores = score.pairwise(image.select(rows), classes)
        logits = score.scaled(scores)
        if logits is None:
            matches = score.match_probability(scores)
            logits = scores if matches is None else matches.clamp(min=torch.finfo(matches.dtype).tiny).log()
        parts.append(logits.double())
    return torch.cat(parts).numpy()


def named_classes(classes: Names) -> dict[Any, list[str]]:
    """Return label -> names, in the labels' order. ValueError for fewer than two classes, and for invalid names."""
    if isinstance(classes, str) or not isinstance(classes, (Sequence, Mapping, np.ndarray)) or len(classes) < 2:
        raise ValueError(f"classes={classes!r}: give two names or more, and each once, or {{label: names}}")
    given = dict(classes.items() if isinstance(classes, Mapping) else ((name, name) for name in classes))
    if len(given) < len(classes):
        raise ValueError(f"classes={classes!r}: a class is named twice, give each once")
    if len({label_kind(x) for x in given}) > 1 or not all(
        isinstance(x, (str, bytes, Number)) and x == x for x in given
    ):
        raise ValueError(f"classes={classes!r}: give labels that are all texts or all numbers")
    named = {label: [names] if isinstance(names, str) else names for label, names in given.items()}
    for label, names in named.items():
        if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"class {label!r} is called {names!r}: give a name, or a list of them")
    return {label: list(named[label]) for label in sorted(named)}


def unknown_label(label: Any, known: Sequence) -> str:
    """Return the error message for a label that no class has."""
    return f"label {label!r} is not a class: {did_you_mean(str(label), [str(one) for one in known])}"


def points(mean: Tensor) -> Gaussian:
    """Return means (N, D) as Gaussians without variance."""
    return Gaussian(mean, torch.full_like(mean, -torch.inf))


def check_columns(found: int, *wanted: int) -> None:
    """Raise ValueError for rows of another width."""
    if found not in wanted:
        own = " or ".join(map(str, wanted))
        parts = "(mean, log_var and, if it has them, two novelties; only the mean of a deterministic model)"
        raise ValueError(f"X has {found} features, but this model has {own} {parts}: give {WANTED}")
