"""The base of both classifiers: probabilities, uncertainty, and answers with a bound on how many are wrong."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import open_clip
import torch
from PIL import Image
from scipy.special import log_softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d
from torch import Tensor

from prolip.classifiers.sharpness import Sharpness
from prolip.embedder import Embedder, ModelCard
from prolip.gaussian import Gaussian, check_embeddings, kind_of
from prolip.measures.chance import OwnFirst, warn_once
from prolip.prompts import DRAWINGS
from prolip.prompts.templates import fill_all, mix_groups
from prolip.scores import Score
from prolip.search.risk_control import Threshold, find_threshold
from prolip.uncertainty.doubt import hedge
from prolip.uncertainty.novelty import refusal
from prolip.utils.documents import shown as shortened
from prolip.utils.flags import did_you_mean

#: Templates by name: OpenAI's 80 of ImageNet, the seven best of them, and ours for small drawings.
NAMED = {
    "openai": open_clip.OPENAI_IMAGENET_TEMPLATES,
    "simple": open_clip.SIMPLE_IMAGENET_TEMPLATES,
    "drawings": DRAWINGS,
}
Names = Sequence[str] | Mapping[Any, str | Sequence[str]] | None
#: Ends of a tower, in the order of the columns of their novelty.
ENDS = ("mean", "first")
WANTED = "pictures (paths, URLs, bytes or Pillow images), a Gaussian, or what `embed` gave"
#: Rows whose scores are computed at a time.
ROWS = 4096


class Shown(NamedTuple):
    """Gaussians (N, D), and their novelty in nats (N,) by the end of the tower, or {}."""

    z: Gaussian
    novelty: dict[str, Tensor]

    @property
    def mean(self) -> np.ndarray:
        """(N, D) float64."""
        return self.z.mean.double().numpy()


class ImageClassifier(ClassifierMixin, BaseEstimator):
    """An estimator of classes of images by a model that knows what it does not know.

    X is everywhere a list of pictures (paths, URLs, bytes, Pillow images), a Gaussian, or the array that `embed` gave.
    """

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
    #: Whether probabilities are the model's own, which it doubts where an image is unlike its training.
    doubts_: bool = False

    @abstractmethod
    def _parts(self, shown: Any) -> list[np.ndarray]:
        """The kinds of logits (N, C) that `sharpness_` weighs."""

    def embed(self, X: Any) -> np.ndarray:
        """Embed pictures as rows (N, W) that every method takes in their place: means and log variances, then two
        novelties in a model with them; W = D for points.
        """
        return to_array(Shown(*self._embedder().embed(X, "image", self.batch_size)))

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities (N, C) in the order of `classes_`, each row summing to one."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Their logarithms."""
        return self._log_proba(self._shown(X))

    def predict(self, X: Any, risk: float | None = None, delta: float = 0.1) -> np.ndarray:
        """The most probable class of each image, (N,).

        risk: refuse, so that at most this share of the answers is wrong, with probability 1 - delta over the images of
        `calibrate_risk`. The result is then a masked array, masked where an answer is refused.
        """
        shown = self._shown(X)
        log_p = self._log_proba(shown)
        labels = self.classes_[log_p.argmax(1)]
        if risk is None:
            return labels
        threshold = self.risk_threshold(risk, delta)
        if self.risk_by_ != (by := novelties(shown)):
            both = "give both pictures (or what embed makes of them), or both Gaussians"
            raise ValueError(
                f"calibrate_risk knew {self.risk_by_ or 'no'} novelties and predict {by or 'none'}: {both}"
            )
        answered = threshold.answers({"confidence": self._confidence(shown, log_p)})
        free = labels.astype(object) if labels.dtype.kind == "U" else labels  # `filled` may take a longer word
        return np.ma.MaskedArray(free, mask=~answered)

    def refuse(self, X: Any, risk: float, delta: float = 0.1) -> np.ndarray:
        """Which images `predict` with this risk does not answer, (N,) bool."""
        return np.ma.getmaskarray(self.predict(X, risk, delta))

    def confidence(self, X: Any) -> np.ndarray:
        """What is refused by, (N,): the probability that the answer is right and, in models with a novelty, that the
        picture is like the training data; see `prolip.uncertainty.novelty.refusal`.
        """
        shown = self._shown(X)
        return self._confidence(shown, self._log_proba(shown))

    def calibrate_risk(self, X: Any, y: Any) -> ImageClassifier:
        """Record the confidence and the errors of labelled images for `predict` with a risk; `fit` forgets them.

        The images must be drawn like those to be asked, and must not be those of `fit`. A label that is no class counts
        as a wrong answer. ValueError for labels of another type than the classes, and for NaN.
        """
        shown = self._shown(X)
        log_p = self._log_proba(shown)
        y = column_or_1d(y)
        check_labels(y, self.classes_)
        if len(y) != len(log_p):
            raise ValueError(f"{len(log_p)} images and {len(y)} labels: give one of each")
        self.risk_confidence_ = self._confidence(shown, log_p)
        self.risk_by_ = novelties(shown)
        self.risk_wrong_ = self.classes_[log_p.argmax(1)] != y
        return self

    def risk_threshold(self, risk: float, delta: float = 0.1) -> Threshold:
        """The least confidence that is answered (`prolip.search.risk_control`). ValueError before `calibrate_risk`."""
        check_is_fitted(self)
        if not hasattr(self, "risk_wrong_"):
            first = "call calibrate_risk(images, labels) with labelled images that fit did not use"
            raise ValueError(f"the risk is not calibrated for this fit: first {first}")
        return find_threshold({"confidence": self.risk_confidence_}, self.risk_wrong_, risk, delta)

    def _confidence(self, shown: Any, log_p: np.ndarray) -> np.ndarray:
        answer = -log_p.max(1)
        if isinstance(shown, Shown) and shown.novelty:
            answer = refusal(shown.z.mean.new_tensor(answer), shown.novelty).double().numpy()
        return np.exp(-answer)

    def _log_proba(self, shown: Any) -> np.ndarray:
        log_p = log_softmax(self.sharpness_.logits(self._parts(shown), self._uncertainty(shown)), axis=1)
        reader = self._embedder().reader if self.doubts_ else None
        doubt = None if reader is None else self.score_.doubts(reader.evidence(shown.z.mean))
        return log_p if doubt is None else hedge(torch.from_numpy(log_p), doubt).numpy()

    def _uncertainty(self, shown: Any) -> np.ndarray:
        """By the model's own score, (N,)."""
        return self.score_.uncertainty(shown.z).double().numpy()

    def _begin(self, embedder: Embedder | None) -> None:
        """Forget the former fit with its calibration of risk, and record the model of this one."""
        for name in [name for name in vars(self) if name.endswith("_") and name[0] != "_"]:
            delattr(self, name)
        self.card_ = None if embedder is None else embedder.card
        if self.card_ is not None:
            self.score_ = self.card_.scored_by(self.similarity)

    def _judge(self, logits: np.ndarray, labels: np.ndarray) -> None:
        """Warn where the names of the classes classify labelled images at chance. (N, C), (N,)"""
        if (first := OwnFirst.of(torch.from_numpy(logits), torch.from_numpy(labels))).at_chance:
            warn_once(f"{first}, by the names of its classes")

    def _shown(self, X: Any) -> Any:
        check_is_fitted(self)
        if self.card_ is None:
            raise ValueError("fit had no model: give the model to fit, too")
        check_same(self.card_, self._embedder().card)
        return self._look(X)

    def _look(self, X: Any) -> Shown:
        return as_shown(X, self._embedder(), self.dimension_, self.batch_size)

    def _embedder(self) -> Embedder:
        """The model, loaded at its first use and after a change of its name."""
        if isinstance(self.model, Embedder):
            return self.model
        if not isinstance(self.model, str):
            raise ValueError(
                f"model={self.model!r}: give a name such as 'local-dir:runs/demo/model', or what"
                " prolip.Embedder.load gives"
            )
        named = (self.model, self.pretrained, self.device)
        if self.__dict__.get("_loaded", (None,))[0] != named:
            self._loaded = named, Embedder.load(self.model, self.pretrained, device=self.device)
        return self._loaded[1]

    def __getstate__(self) -> dict[str, Any]:
        """Without the loaded model, which a copy loads again by its name."""
        return {name: value for name, value in super().__getstate__().items() if name != "_loaded"}

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "sharpness_") and hasattr(self, "card_")


def check_same(fitted: ModelCard, given: ModelCard) -> None:
    """ValueError, naming the differences, unless a model is the one that a classifier was fitted with."""
    then, now = ({**asdict(card), **card.score, "score": card.score.get("name")} for card in (fitted, given))
    differ = [name for name in now if name not in ("name", "precision") and then.get(name) != now[name]]
    if differ:
        told = ", ".join(f"{name} {shortened(then.get(name))} then and {shortened(now[name])} now" for name in differ)
        again = "Call fit again, or give the former model"
        raise ValueError(f"{given.name} is not the model of fit, {fitted.name}: {told}. {again}")


def check_labels(labels: np.ndarray, classes: np.ndarray) -> None:
    """ValueError for labels of another type than the classes (texts or numbers), and for NaN."""
    known = {label_kind(one) for one in classes.tolist()}
    for label in labels.tolist():
        if label_kind(label) not in known or label != label:
            own = shortened(classes.tolist())
            raise ValueError(
                f"label {label!r} is {kind_of(label)}, and the classes are {own}: give labels of their type"
            )


def novelties(shown: Any) -> tuple[str, ...]:
    """The ends of the tower that inputs have a novelty of."""
    return tuple(shown.novelty) if isinstance(shown, Shown) else ()


def label_kind(label: Any) -> str:
    """`text`, `number`, or the name of another type."""
    if isinstance(label, (str, bytes)):
        return "text"
    return "number" if isinstance(label, Number) else type(label).__name__


def text_classes(embedder: Embedder, classes: Sequence[Sequence[str]], templates: str | Sequence[Any]) -> Gaussian:
    """Each class as the mixture of its names in all templates, (C, D)."""
    if isinstance(templates, str) or callable(templates):
        templates = (templates,) if callable(templates) else NAMED.get(templates, (templates,))
    prompts = fill_all(classes, templates)
    found = mix_groups(embedder.embed_texts([text for group in prompts for text in group]), list(map(len, prompts)))
    check_embeddings(found, "the embeddings of the classes")
    return found


def class_logits(score: Score, image: Gaussian, classes: Gaussian) -> np.ndarray:
    """The logits of a softmax over classes, (N, D), (C, D) -> (N, C): a * score where a scale was trained, the log of
    a score that is a match probability, and the score itself where nothing was trained.
    """
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
    """Label -> names, in the labels' order. ValueError for none, fewer than two, or what are no names."""
    if isinstance(classes, str) or not isinstance(classes, (Sequence, Mapping, np.ndarray)) or len(classes) < 2:
        raise ValueError(f"classes={classes!r}: give two names or more, or {{label: name or list of names}}")
    if isinstance(classes, Mapping) and (
        len({label_kind(x) for x in classes}) > 1
        or not all(isinstance(x, (str, bytes, Number)) and x == x for x in classes)
    ):
        raise ValueError(f"classes={classes!r}: give labels that are all texts or all numbers")
    pairs = classes.items() if isinstance(classes, Mapping) else ((name, name) for name in classes)
    named = {label: [names] if isinstance(names, str) else names for label, names in pairs}
    if len(named) < len(classes):
        raise ValueError("a class is named twice: give each once")
    for label, names in named.items():
        if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"class {label!r} is called {names!r}: give a name, or a list of them")
    return {label: list(named[label]) for label in sorted(named)}


def unknown_label(label: Any, known: Sequence) -> str:
    """What to say of a label that no class has."""
    return f"label {label!r} is no class: {did_you_mean(str(label), [str(one) for one in known])}"


# --- inputs: images, Gaussians, or arrays of features that were embedded before --------------------------------------
def is_pictures(given: Any) -> bool:
    """Whether these are pictures, in files or as Pillow images. TypeError for a single one."""
    kinds = (str, os.PathLike, bytes, Image.Image)
    if isinstance(given, kinds):
        raise TypeError(f"one {type(given).__name__}: give a list of pictures")
    if hasattr(given, "iloc"):
        given = np.asarray(given)
    listed = given.ndim == 1 if isinstance(given, np.ndarray) else isinstance(given, Sequence)
    return listed and len(given) > 0 and (isinstance(given[0], kinds) or hasattr(given[0], "read"))


def to_array(shown: Shown) -> np.ndarray:
    """One row of each image, (N, W) float32: mean, log_var, novelties; the mean alone of points."""
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
        own = " or ".join(map(str, wanted))
        parts = "(mean, log_var, and two novelties where it has them; a model of points the mean alone)"
        raise ValueError(f"X has {found} features, but this model has {own} {parts}: give {WANTED}")


def as_shown(given: Any, embedder: Embedder, dimension: int, batch_size: int) -> Shown:
    """Inputs of any kind. ValueError and TypeError for others, and for numbers that are not finite."""
    if isinstance(given, Gaussian):
        check_embeddings(given, "X")
        check_columns(given.mean.shape[-1], (dimension,))
        return Shown(Gaussian(*(x.detach().float().cpu() for x in given)), {})
    if not is_pictures(given):
        return from_array(given, dimension, embedder.probabilistic)
    found = Shown(*embedder.embed(given, "image", batch_size))
    check_embeddings(found.z, "the embeddings of X")
    return found
