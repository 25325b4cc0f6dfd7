"""The main interface: `Embedder.load(name)` loads any model to embed images and texts as Gaussians.

model = prolip.Embedder.load("local-dir:runs/demo/model")
image, text = model.embed_images(["cat.jpg"]), model.embed_texts(["a cat", "a dog"])
model.score.pairwise(image, text)  # (1, 2), larger is nearer
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from PIL import Image
from torch import Tensor, nn

from prolip.data.images import ImageSource, open_image
from prolip.embeddings import few_pairs
from prolip.gaussian import Gaussian, concatenate, kind_of
from prolip.measures.chance import OwnFirst, warn_once
from prolip.methods import find_method, find_score, score_from_dict, score_of
from prolip.scores import LEAST_SCALE, CSDScore, Score, Side, Similarity
from prolip.uncertainty.novelty import Novelty, fitted_novelty
from prolip.uncertainty.openclip import FittedCLIP, PointModel
from prolip.uncertainty.readings import FittedReader
from prolip.uncertainty.token_stats import Encoded, encode_with_stats
from prolip.uncertainty.units import Units
from prolip.utils.threads import default_workers, in_threads

log = logging.getLogger(__name__)

T = TypeVar("T")
PRECISIONS = {"fp32": None, "amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
AHEAD = 2  # batches that threads read ahead of the current one
UNINFORMED = "the cosines did not predict the matches of the fit: similarities, variances and novelty have no meaning"


@dataclass(frozen=True)
class ModelCard:
    """The description of a model in results and saved features."""

    name: str
    fingerprint: str  # of weights, settings, preprocessing and tokenizer
    precision: str = "fp32"
    probabilistic: bool = True  # whether its variances have a meaning
    logit_scale: float | None = None  # a of the logit a * similarity + b, None without a logit
    logit_bias: float | None = None
    score: dict[str, Any] = field(default_factory=dict)  # `Score.to_dict` of its method; empty: csd, in older files

    def scored_by(self, similarity: Similarity = None) -> Score:
        """Return the score of the model's method, or the named one; ValueError for one that the model cannot use."""
        own = score_from_dict(self.score) if self.score else CSDScore(self.logit_scale, self.logit_bias)
        return choose_score(similarity, own, self.probabilistic, self.name)


class Embedded(NamedTuple):
    """Gaussians (N, D), and their novelty in nats (N,) by tower end; {} for a model without a reference."""

    z: Gaussian
    novelty: dict[str, Tensor]


class Embedder:
    """A loaded model that embeds images and texts as Gaussians on the CPU, with the score that ranks them.

    network: `encode_image` and `encode_text` return Gaussians, or OpenCLIP's features, which become points. preprocess:
    Pillow image -> (3, H, W); tokenizer: list of texts -> ids (B, L). score: of the model's method; probabilistic:
    whether variances have a meaning, else log_var = -inf and traces are 0; novelty, text_novelty: functions of the
    output of `encode_hidden` -> nats (B,) by tower end, None for a model without novelty; caution: why the fit has no
    meaning, else ""; loaded_from: the `model`, `pretrained` and `tokenizer` given to `load`, {} if made otherwise.
    """

    def __init__(  # noqa: PLR0917
        self, name: str, network: nn.Module, preprocess: Callable, tokenizer: Callable, device="cpu", precision="fp32"
    ):
        inner = network.model if isinstance(network, PointModel) else network
        score, has_variances = own_score(inner)
        self.probabilistic = has_variances and inner is network
        self.name, self.preprocess, self.tokenizer, self.score = name, preprocess, tokenizer, score
        self.network = network if has_variances or inner is not network else PointModel(network)
        self._given = network
        self.device, self.precision = torch.device(device), precision
        self.caution = UNINFORMED if score.units is not None and (score.scale or 1.0) < 1.01 * LEAST_SCALE else ""
        if self.caution:
            warn_once(f"{name}: {self.caution}")
        if score.units is not None and score.reader is None:
            lacks = "has older variances without intervals, ambiguity and adjusted match probabilities"
            log.info("%s %s. Fit them with prolip uncertainty", name, lacks)
        trained = inner.model if isinstance(inner, FittedCLIP) else inner
        scale, bias = (getattr(trained, part, None) for part in ("logit_scale", "logit_bias"))
        self.logit_scale = None if scale is None else scale.exp().item()
        self.logit_bias = None if bias is None else bias.item()
        own = fitted_novelty(inner), fitted_novelty(inner, "text")
        self.novelty, self.text_novelty = (one and partial(_read_novelty, one, self.device) for one in own)
        self.parameters = sum(parameter.numel() for parameter in inner.parameters())
        self.loaded_from: dict[str, str | None] = {}

    @classmethod
    def load(
        cls,
        name: str,
        pretrained: str | None = None,
        *,
        tokenizer: str | None = None,
        device: torch.device | str = "cpu",
        precision: str = "fp32",
    ) -> Embedder:
        """Load a model by name.

        name: `local-dir:FOLDER` or `hf-hub:ORG/NAME`, our layout or OpenCLIP's; or one of `prolip.list_models()` with
        `pretrained`: a weights file or, for OpenCLIP's models, a tag; "random" for untrained weights, always the same.
        tokenizer: a folder of tokenizer files or `bpe`, instead of the model's own. device: cpu, cuda, cuda:0 or auto.
        precision: fp32, or amp_bf16 / amp_fp16 for autocast (amp_fp16 needs a GPU). Weights are float32.
        """
        from prolip.loading import load_model  # late: it imports OpenCLIP
        from prolip.models.diagnose import FIT, json_of

        autocast_dtype(precision)
        place = check_device(device)
        if precision == "amp_fp16" and place.type != "cuda":
            raise ValueError(f"amp_fp16 needs CUDA, but the device is {place}: use amp_bf16 or fp32")
        network, preprocess, tokenize = load_model(name, pretrained, tokenizer)
        network = network.to(place).eval().requires_grad_(False)
        shown = name if not pretrained else f"{name}:{pretrained}"
        made = cls(shown, network, preprocess, tokenize, place, precision)
        made.loaded_from = {"model": name, "pretrained": pretrained, "tokenizer": tokenizer}
        facts = json_of(Path(name.removeprefix("local-dir:")) / FIT) if name.startswith("local-dir:") else {}
        if (first := OwnFirst.read(facts.get("own_first"))).at_chance and not made.caution:
            made.caution = f"in its fit, {first}"
            warn_once(f"{shown}: {made.caution}")
        units, pairs = made.score.units, found if type(found := facts.get("pairs")) is int else None
        if units is not None and not made.caution and (few := few_pairs(pairs, units.images, units.texts)):
            warn_once(f"{shown}: in its fit, {few}")
        return made

    @cached_property
    def fingerprint(self) -> str:
        """A hash of 32 digits over weights, settings, preprocessing and tokenizer; "" for a model in training."""
        from prolip.loading import model_fingerprint

        return model_fingerprint(self._given, self.preprocess, self.tokenizer) if self.loaded_from else ""

    @property
    def card(self) -> ModelCard:
        """The description of the model for results and saved features."""
        settings = (self.precision, self.probabilistic, self.logit_scale, self.logit_bias, self.score.to_dict())
        return ModelCard(self.name, self.fingerprint, *settings)

    def scored_by(self, similarity: Similarity = None) -> Score:
        """Return the score as `ModelCard.scored_by`, without the fingerprint."""
        return choose_score(similarity, self.score, self.probabilistic, self.name)

    @property
    def reader(self) -> FittedReader | None:
        """The score's reader of ambiguity, intervals and adjusted match probabilities, if it has one."""
        return self.score.reader

    @property
    def units(self) -> Units:
        """The units of the traces, for shares and information of images and texts. ValueError without a fit."""
        if self.score.units is None:
            given = {"model": self.name, **self.loaded_from}
            words = " ".join(f"--{name} {value}" for name, value in given.items() if value is not None)
            what = f"{self.name} has no units of traces: expected variances fitted to data"
            raise ValueError(f"{what}. Fit them with: prolip uncertainty {words} --data captions.csv --output fitted")
        return self.score.units

    def embed_images(self, images: Iterable[ImageSource], batch_size: int = 64, workers: int | None = None) -> Gaussian:
        """Embed images as Gaussians (N, D), from inputs of `prolip.open_image`; workers: threads that read them."""
        return _whole([z for _, z in self.stream(images, open_image, self.encode_image, batch_size, workers)], "image")

    def embed_texts(self, texts: Iterable[str], batch_size: int = 512) -> Gaussian:
        """Embed texts as Gaussians (N, D)."""
        return embed_texts(self.encode_text, self.tokenizer, texts, batch_size)

    def embed(self, items: Iterable[Any], side: Side, batch_size: int = 64, workers: int | None = None) -> Embedded:
        """Embed images or texts with their novelty in one pass."""
        if side == "image":
            encode = partial(self.encode, side=side)
            parts = [part for _, part in self.stream(items, open_image, encode, batch_size, workers)]
        else:
            parts = [self.encode(self.tokenizer(group), side) for group in groups(items, batch_size)]
        z = _whole([part.z for part in parts], side)
        return Embedded(z, {end: torch.cat([part.novelty[end] for part in parts]) for end in parts[0].novelty})

    def stream(
        self,
        items: Iterable[T],
        read: Callable[[T], Image.Image],
        encode: Callable[[Tensor], Any],
        batch_size: int = 64,
        workers: int | None = None,
        lost: Callable[[T, Exception], object] | None = None,
    ) -> Iterator[tuple[list[T], Any]]:
        """Yield batches of items, in order, with the embeddings of their images.

        read: item -> image; runs with the preprocessing in `workers` threads, at most AHEAD batches early. encode:
        pixels (B, 3, H, W) -> embeddings, such as `encode_image`. lost: called with an item and its image's error;
        the item is then skipped; without it the error is raised.
        """

        def prepare(item: T) -> tuple[T, Tensor | Exception]:
            try:
                return item, self.preprocess(read(item))
            except Exception as error:  # Pillow's plugins raise OSError, SyntaxError, ValueError, struct.error and more
                return item, error

        def prepared() -> Iterator[tuple[T, Tensor]]:
            threads = default_workers() if workers is None else workers
            for item, pixels in in_threads(prepare, iter(items), threads, AHEAD * batch_size):
                if isinstance(pixels, Tensor):
                    yield item, pixels
                elif lost is None:
                    raise pixels
                else:
                    lost(item, pixels)

        for batch in groups(prepared(), batch_size):
            yield [item for item, _ in batch], encode(torch.stack([pixels for _, pixels in batch]))

    def encode_image(self, pixels: Tensor) -> Gaussian:
        """Embed pixels (B, 3, H, W) as a Gaussian (B, D): unit means, float32, on the CPU, without a graph."""
        return encode(self.network, "image", self.device, self.precision, pixels)

    def encode_text(self, ids: Tensor) -> Gaussian:
        """Embed token ids (B, L) as a Gaussian (B, D), as `encode_image`."""
        return encode(self.network, "text", self.device, self.precision, ids)

    def encode_hidden(self, batch: Tensor, side: Side = "image") -> Encoded:
        """Return the Gaussian of pixels or token ids and the statistics of their first tokens, in one pass."""
        with evaluating(self.network, self.device, self.precision):
            z, stats = encode_with_stats(self.network, batch.to(self.device, non_blocking=True), side)
        return Encoded(Gaussian(*map(to_cpu, z)), None if stats is None else to_cpu(stats))

    def encode(self, batch: Tensor, side: Side) -> Embedded:
        """Return the Gaussian and the novelty of pixels or token ids, in one pass."""
        novelty = self.novelty if side == "image" else self.text_novelty
        if novelty is None:
            return Embedded(self.encode_image(batch) if side == "image" else self.encode_text(batch), {})
        hidden = self.encode_hidden(batch, side)
        return Embedded(hidden.z, novelty(hidden))

    def __deepcopy__(self, memo: dict) -> Embedder:
        return self  # copies of an object with an embedder share its weights

    def __repr__(self) -> str:
        return f"Embedder({self.name!r}, device={str(self.device)!r}, precision={self.precision!r})"


def encode(network: nn.Module, side: Side, device: torch.device | str, precision: str, batch: Tensor) -> Gaussian:
    """Apply `network.encode_image` or `encode_text` to a batch, with autocast to `precision`; float32 on the CPU."""
    with evaluating(network, device, precision):
        z = getattr(network, f"encode_{side}")(batch.to(device, non_blocking=True))
    return Gaussian(*map(to_cpu, z))


def _read_novelty(novelty: Novelty, device: torch.device, hidden: Encoded) -> dict[str, Tensor]:
    stats = None if hidden.token_stats is None else hidden.token_stats.to(device)
    found = novelty(Encoded(Gaussian(*(x.to(device) for x in hidden.z)), stats))
    return {name: nats.cpu() for name, nats in found.items()}


def _whole(parts: Sequence[Gaussian], side: Side) -> Gaussian:
    if not parts:
        raise ValueError(f"no {side} to embed: give at least one")
    return concatenate(parts)


def to_cpu(x: Tensor) -> Tensor:
    """Return a model's output in float32 on the CPU, as an ordinary tensor instead of one of inference mode."""
    return x.float().cpu().clone()


@contextlib.contextmanager
def evaluating(model: nn.Module, device: torch.device | str, precision: str = "fp32") -> Iterator[None]:
    """Evaluate without gradients, with autocast to `precision`; restore the training modes afterwards."""
    dtype, modes = autocast_dtype(precision), [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode(), torch.autocast(torch.device(device).type, dtype, enabled=dtype is not None):
            yield
    finally:
        for module, training in modes:
            module.training = training


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the autocast dtype of a precision, None for none; ValueError for an unknown one."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} is unknown: use one of {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def check_device(device: torch.device | str) -> torch.device:
    """Return a device of this machine; auto: a GPU if there is one, the local rank's, else the CPU."""
    if device in ("auto", "cuda") and (count := torch.cuda.device_count()):
        local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
        device = f"cuda:{int(local) % count}"
    try:
        place = torch.device("cpu" if device == "auto" else device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is unknown: use cpu, cuda or cuda:0") from error
    if place.type == "cuda" and (place.index or 0) >= (count := torch.cuda.device_count()):
        has = f"{count}, counted from cuda:0" if count else "no CUDA device; use cpu"
        raise ValueError(f"device {device!r}: this machine has {has}")
    return place


def own_score(network: nn.Module) -> tuple[Score, bool]:
    """Return `score_of` a model, and whether its variances have a meaning by its method; True without a method."""
    config = getattr(network, "config", None)
    method = config.get("method_cfg") if isinstance(config, dict) else None
    return score_of(network), method is None or find_method(method["name"]).probabilistic


def choose_score(similarity: Similarity, own: Score, probabilistic: bool, name: str) -> Score:
    """Return the score named `NAME` or `NAME:setting=1`; `own` for None and its kind, as only it is trained."""
    if similarity is None or similarity == own.name:
        return own
    if not isinstance(similarity, (str, Score)):
        raise TypeError(f"similarity is {kind_of(similarity)}: give the name of a score, such as 'csd', or a Score")
    if isinstance(similarity, str) and ":" in similarity:
        asked, _, settings = similarity.partition(":")
        return choose_score(asked, own, probabilistic, name).with_settings(settings)
    if isinstance(similarity, Score):
        score = similarity
    elif isinstance(own, kind := find_score(similarity)):
        return own
    else:
        try:
            score = kind()
        except TypeError as error:
            why = f"{similarity!r} needs trained parameters, but {name} has none"
            raise ValueError(f"{why}. Its own score is {own.name!r}") from error
    if not probabilistic and not score.supports_points:
        why = f"{name} is deterministic, but {score.name!r} needs variances"
        raise ValueError(f"{why}: use csd, mean or wasserstein2 (csd equals the cosine there)")
    return score


def embed_texts(
    encode: Callable[[Tensor], Gaussian], tokenizer: Callable, texts: Iterable[str], batch_size: int = 512
) -> Gaussian:
    """Embed texts as Gaussians (N, D), `batch_size` at a time; encode: ids (B, L) -> Gaussian."""
    return _whole([encode(tokenizer(group)) for group in groups(texts, batch_size)], "text")


def token_lengths(tokenizer: Callable, texts: Iterable[str], batch_size: int = 4096) -> Tensor:
    """Return the tokens of each text without padding, (N,); the padding is the last id of the encoded empty text."""
    pad = tokenizer([""])[0, -1]
    return torch.cat([lengths_of(tokenizer(group), pad) for group in groups(texts, batch_size)])


def lengths_of(ids: Tensor, pad: Tensor) -> Tensor:
    """Return the tokens of each row without the padding at its end, (N, L) -> (N,)."""
    padding = (ids == pad).flip(1).int().cumprod(1).sum(1)
    return ids.shape[1] - padding


def groups(items: Iterable, size: int) -> Iterator[list]:
    """Yield lists of `size` items; the last one may be shorter."""
    if size < 1:
        raise ValueError(f"batch size {size}: give at least 1")
    iterator = iter(items)
    while group := list(islice(iterator, size)):
        yield group
