"""Any model as an evaluation wants it: images and texts in, Gaussians on the CPU out, and the score to rank them by."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from prolip.gaussian import Gaussian, concatenate, kind_of
from prolip.measures.chance import warn_once
from prolip.methods import find_method, find_score, score_from_dict, score_of
from prolip.scores import LEAST_SCALE, CSDScore, Score, Side, Similarity
from prolip.uncertainty.novelty import Novelty, fitted_novelty
from prolip.uncertainty.openclip import FittedCLIP
from prolip.uncertainty.readings import Reader
from prolip.uncertainty.token_stats import Encoded, encode_with_stats

log = logging.getLogger(__name__)

PRECISIONS = {"fp32": None, "amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}


@dataclass(frozen=True)
class ModelCard:
    """What results and stored features keep of a model.

    fingerprint: of weights, settings, preprocessing and tokenizer; probabilistic: whether its variances mean something;
    logit_scale, logit_bias: a and b of the logit a * similarity + b, None where the model has none; score: of its
    method, as `Score.to_dict` writes it; empty: csd, as of all that was kept before methods had scores.
    """

    name: str
    fingerprint: str
    precision: str = "fp32"
    probabilistic: bool = True
    logit_scale: float | None = None
    logit_bias: float | None = None
    score: dict[str, Any] = field(default_factory=dict)

    def scored_by(self, similarity: Similarity = None) -> Score:
        """The score of the model's method, or the one that is asked for.

        ValueError for an unknown one, and for one that needs variances where the model has none.
        """
        own = score_from_dict(self.score) if self.score else CSDScore(self.logit_scale, self.logit_bias)
        return choose_score(similarity, own, self.probabilistic, self.name)


class Embedded(NamedTuple):
    """Inputs of one side: Gaussians (N, D), and by the end of the tower how unlike the training they are, nats (N,);
    {} where the model does not know.
    """

    z: Gaussian
    novelty: dict[str, Tensor]


@dataclass(frozen=True)
class Embedder:
    """A model that evaluates.

    encode_image: pixels (B, 3, H, W) -> Gaussian (B, D); encode_text: token ids (B, L) -> Gaussian (B, D); both with
    unit means, float32, on the CPU, without a graph; encode_hidden, encode_hidden_text: -> `Encoded`, the same with the
    first tokens; novelty, text_novelty: what these give -> nats (B,) by the end of the tower that they are of, None
    where the model knows of none.
    preprocess: a Pillow image -> (3, H, W); tokenizer: list of texts
    -> (B, L) ids. A deterministic model gives log_var = -inf, so its traces are exactly 0, and probabilistic is False.
    logit_scale, logit_bias: as in `ModelCard`; score: of its method; fingerprint: 32 digits that change with weights,
    settings, preprocessing and tokenizer; parameters: how many the model has; loaded_from: the model, pretrained and
    tokenizer of `load_embedder`, {} where it was made otherwise.
    """

    name: str
    encode_image: Callable[[Tensor], Gaussian] = field(repr=False)
    encode_text: Callable[[Tensor], Gaussian] = field(repr=False)
    encode_hidden: Callable[[Tensor], Encoded] = field(repr=False)
    encode_hidden_text: Callable[[Tensor], Encoded] = field(repr=False)
    novelty: Callable[[Encoded], dict[str, Tensor]] | None = field(repr=False)
    text_novelty: Callable[[Encoded], dict[str, Tensor]] | None = field(repr=False)
    preprocess: Callable[[Image.Image], Tensor]
    tokenizer: Callable[[list[str]], Tensor]
    probabilistic: bool
    logit_scale: float | None
    logit_bias: float | None
    score: Score
    device: torch.device
    precision: str
    fingerprint: str
    parameters: int
    loaded_from: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def card(self) -> ModelCard:
        """What is kept of it."""
        return ModelCard(
            self.name,
            self.fingerprint,
            self.precision,
            self.probabilistic,
            self.logit_scale,
            self.logit_bias,
            self.score.to_dict(),
        )

    @property
    def reader(self) -> Reader | None:
        """The score's reader of what the model keeps of its training; None where it keeps nothing."""
        return self.score.reader

    def embed(self, batch: Tensor, side: Side) -> Embedded:
        """One batch of pixels or token ids and its novelty, by one pass."""
        shown = side == "image"
        novelty = self.novelty if shown else self.text_novelty
        if novelty is None:
            return Embedded(self.encode_image(batch) if shown else self.encode_text(batch), {})
        hidden = self.encode_hidden(batch) if shown else self.encode_hidden_text(batch)
        return Embedded(hidden.z, novelty(hidden))

    def embed_texts(self, texts: Iterable[str], batch_size: int = 512) -> Gaussian:
        """Any number of texts, (N, D). ValueError for none."""
        return embed_texts(self.encode_text, self.tokenizer, texts, batch_size)

    def embed_images(self, images: Iterable[Image.Image], batch_size: int = 64) -> Embedded:
        """Any number of images, (N, D), one or more."""
        batches = groups(map(self.preprocess, images), batch_size)
        return joined([self.embed(torch.stack(batch), "image") for batch in batches])

    def __deepcopy__(self, memo: dict) -> Embedder:
        """Itself: copies of what holds an embedder share its weights."""
        return self


class Loaded(NamedTuple):
    """A network with `encode_image` and `encode_text` -> Gaussian, and what its inputs go through."""

    network: nn.Module
    preprocess: Callable[[Image.Image], Tensor]
    tokenizer: Callable[[list[str]], Tensor]


def embedder_of(
    name: str, loaded: Loaded, device: torch.device, precision: str = "fp32", fingerprint: str = ""
) -> Embedder:
    """A network that is on `device` already, as an evaluation wants it; what is never stored needs no fingerprint."""
    network, preprocess, tokenize = loaded
    inner = network.model if isinstance(network, PointModel) else network
    score, has_variances = own_score(inner)
    probabilistic = has_variances and inner is network
    if not has_variances and inner is network:
        network = PointModel(network)
    if score.units is not None and (score.scale or 1.0) < 1.01 * LEAST_SCALE:
        warn_once(
            f"{name}: its cosines said nothing of the pairs that its variances were fitted to, and so its"
            " similarities, variances and novelty mean nothing"
        )
    if score.units is not None and score.reader is None:
        log.info(
            "%s has variances from before intervals, ambiguity of images and doubt were fitted. To fit them, run"
            " prolip uncertainty",
            name,
        )
    trained = inner.model if isinstance(inner, FittedCLIP) else inner
    scale, bias = (getattr(trained, part, None) for part in ("logit_scale", "logit_bias"))
    novelty, text_novelty = (
        None if one is None else partial(_read_novelty, one, device)
        for one in (fitted_novelty(inner), fitted_novelty(inner, "text"))
    )
    return Embedder(
        name=name,
        encode_image=encoder(network, "image", device, precision),
        encode_text=encoder(network, "text", device, precision),
        encode_hidden=partial(_encode_hidden, network, "image", device, precision),
        encode_hidden_text=partial(_encode_hidden, network, "text", device, precision),
        novelty=novelty,
        text_novelty=text_novelty,
        preprocess=preprocess,
        tokenizer=tokenize,
        probabilistic=probabilistic,
        logit_scale=None if scale is None else scale.exp().item(),
        logit_bias=None if bias is None else bias.item(),
        score=score,
        device=device,
        precision=precision,
        fingerprint=fingerprint,
        parameters=sum(parameter.numel() for parameter in inner.parameters()),
    )


def encoder(network: nn.Module, modality: str, device: torch.device, precision: str) -> Callable[[Tensor], Gaussian]:
    """`network.encode_<modality>` of one batch: on `device` under autocast to `precision`, float32 on the CPU."""
    return partial(_encode, network, modality, device, precision)


def _encode(network: nn.Module, modality: str, device: torch.device, precision: str, batch: Tensor) -> Gaussian:
    with evaluating(network, device, precision):
        z = getattr(network, f"encode_{modality}")(batch.to(device, non_blocking=True))
    return Gaussian(*map(kept, z))


def _encode_hidden(network: nn.Module, side: Side, device: torch.device, precision: str, batch: Tensor) -> Encoded:
    with evaluating(network, device, precision):
        z, first = encode_with_stats(network, batch.to(device, non_blocking=True), side)
    return Encoded(Gaussian(*map(kept, z)), None if first is None else kept(first))


def _read_novelty(novelty: Novelty, device: torch.device, hidden: Encoded) -> dict[str, Tensor]:
    first = None if hidden.token_stats is None else hidden.token_stats.to(device)
    found = novelty(Encoded(Gaussian(*(x.to(device) for x in hidden.z)), first))
    return {name: nats.cpu() for name, nats in found.items()}


def kept(x: Tensor) -> Tensor:
    """What an encoder gives, float32 on the CPU, as an ordinary tensor and no inference one."""
    return x.float().cpu().clone()


@contextlib.contextmanager
def evaluating(model: nn.Module, device: torch.device | str, precision: str = "fp32") -> Iterator[None]:
    """Evaluation mode without gradients under autocast to `precision`; the modes of training return afterwards."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} is unknown: use one of {', '.join(PRECISIONS)}")
    dtype, modes = PRECISIONS[precision], [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode(), torch.autocast(torch.device(device).type, dtype, enabled=dtype is not None):
            yield
    finally:
        for module, training in modes:
            module.training = training


def check_device(device: torch.device | str) -> torch.device:
    """A device that this machine has; ValueError for others. auto: a GPU if there is one, or else the CPU.

    "auto" and "cuda" are the GPU of this process's number on its machine, where torchrun or srun started several.
    """
    if device in ("auto", "cuda") and (count := torch.cuda.device_count()):
        local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
        device = f"cuda:{int(local) % count}"
    try:
        place = torch.device("cpu" if device == "auto" else device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is unknown: use cpu, cuda or cuda:0") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r}: this machine has no CUDA device; use cpu")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {device!r}: this machine has {torch.cuda.device_count()}, counted from cuda:0")
    return place


def own_score(network: nn.Module) -> tuple[Score, bool]:
    """`score_of` a model, and whether its variances mean something, which its method knows: True where it has none."""
    config = getattr(network, "config", None)
    method = config.get("method_cfg") if isinstance(config, dict) else None
    return score_of(network), method is None or find_method(method["name"]).probabilistic


def choose_score(similarity: Similarity, own: Score, probabilistic: bool, name: str) -> Score:
    """The score that is asked for, `NAME` or `NAME:setting=1`; None: the model's own, and so where it is of the kind
    asked for, as what was trained is in it alone. name: the model's, for errors.

    ValueError for an unknown one, and for one that needs variances where the model has none.
    """
    if similarity is None or similarity == own.name:
        return own
    if not isinstance(similarity, (str, Score)):
        raise TypeError(f"similarity is {kind_of(similarity)}: give the name of a score, such as 'csd', or a Score")
    if isinstance(similarity, str) and ":" in similarity:
        asked, _, settings = similarity.partition(":")
        return choose_score(asked, own, probabilistic, name).with_settings(settings)
    if isinstance(similarity, Score):
        score = similarity
    else:
        kind = find_score(similarity)
        if isinstance(own, kind):
            return own
        try:
            score = kind()
        except TypeError as error:
            raise ValueError(
                f"{similarity!r} is made of what a model learned for it, and {name} has none: its own is {own.name!r}"
            ) from error
    if not probabilistic and not score.supports_points:
        raise ValueError(
            f"{name} is deterministic, its embeddings have no variance, and {score.name!r} needs one: use csd, mean or "
            "wasserstein2 (csd equals the cosine there)"
        )
    return score


class PointModel(nn.Module):
    """A deterministic OpenCLIP model as a probabilistic one whose variances are 0."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def encode_image(self, image: Tensor) -> Gaussian:
        """Pixels (B, 3, H, W) -> points of unit length (B, D)."""
        return as_points(self.model.encode_image(image))  # type: ignore[operator]

    def encode_text(self, text: Tensor) -> Gaussian:
        """Token ids (B, L) -> points of unit length (B, D)."""
        return as_points(self.model.encode_text(text))  # type: ignore[operator]


def as_points(features: Tensor | Gaussian) -> Gaussian:
    """Features (B, D), or the means of Gaussians, as Gaussians of no extent: unit means in float32, log_var = -inf."""
    mean = F.normalize((features.mean if isinstance(features, Gaussian) else features).float(), dim=-1)
    return Gaussian(mean, torch.full_like(mean, -torch.inf))


def embed_texts(
    encode: Callable[[Tensor], Gaussian],
    tokenizer: Callable,
    texts: Iterable[str],
    batch_size: int = 512,
    progress: bool = False,
) -> Gaussian:
    """Any number of texts, some at a time, (N, D). ValueError for none."""
    parts = []
    with tqdm(desc="texts", unit="", disable=not progress) as bar:
        for group in groups(texts, batch_size):
            parts.append(encode(tokenizer(group)))
            bar.update(len(group))
    if not parts:
        raise ValueError("no text to embed: give at least one")
    return concatenate(parts)


def joined(parts: Sequence[Embedded]) -> Embedded:
    """Batches of one side as one."""
    novelty = {end: torch.cat([part.novelty[end] for part in parts]) for end in parts[0].novelty}
    return Embedded(concatenate([part.z for part in parts]), novelty)


def token_lengths(tokenizer: Callable, texts: Iterable[str], batch_size: int = 4096) -> Tensor:
    """Tokens of each text without padding, (N,): the padding is the last id that the empty text is encoded to."""
    pad = tokenizer([""])[0, -1]
    return torch.cat([lengths_of(tokenizer(group), pad) for group in groups(texts, batch_size)])


def lengths_of(ids: Tensor, pad: Tensor) -> Tensor:
    """Tokens of each row without the run of padding at its end, (N, L) -> (N,)."""
    padding = (ids == pad).flip(1).int().cumprod(1).sum(1)
    return ids.shape[1] - padding


def groups(items: Iterable, size: int) -> Iterator[list]:
    """Lists of `size` items, the last one shorter."""
    if size < 1:
        raise ValueError(f"batch size {size}: give 1 or more")
    iterator = iter(items)
    while group := list(islice(iterator, size)):
        yield group
