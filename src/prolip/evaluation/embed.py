"""Images and texts through a model in batches: Gaussians on the CPU in float32, and the scores to rank them by."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from prolip.gaussian import Gaussian, concatenate
from prolip.methods import Method, find_method, find_score
from prolip.scores import CSDScore, Score

PRECISIONS = {"fp32": None, "amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
#: How --similarity may be given: nothing for the score of the model's method, a name, or a score itself.
Similarity = str | Score | None


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


def embed_images(
    model: nn.Module,
    images: Iterable,
    preprocess: Callable,
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    precision: str = "fp32",
    progress: bool = False,
) -> Gaussian:
    """`model.encode_image` of every image: (N, D), CPU, float32.

    images: whatever `preprocess` turns into a (3, H, W) tensor, taken lazily; precision: fp32, or
    autocast with amp_bf16 or amp_fp16. Raises ValueError without images. The model is expected on `device` already.
    """
    def batches() -> Iterator[Tensor]:
        for group in _groups(images, batch_size):
            yield torch.stack([preprocess(image) for image in group])

    return _embed(model, "image", batches(), device, precision, progress)


def embed_texts(
    model: nn.Module,
    tokenizer: Callable,
    texts: Iterable[str],
    batch_size: int = 512,
    device: torch.device | str = "cpu",
    precision: str = "fp32",
    progress: bool = False,
) -> Gaussian:
    """`model.encode_text` of every text: (N, D), CPU, float32; tokenizer: list of strings -> (B, L) ids."""
    batches = (tokenizer(group) for group in _groups(texts, batch_size))
    return _embed(model, "text", batches, device, precision, progress)


def token_lengths(tokenizer: Callable, texts: Iterable[str], batch_size: int = 4096) -> Tensor:
    """Tokens of each text without padding, (N,): the padding is the last id that the empty text is encoded to."""
    pad = tokenizer([""])[0, -1]
    lengths = []
    for group in _groups(texts, batch_size):
        ids = tokenizer(group)
        padding = (ids == pad).flip(1).int().cumprod(1).sum(1)  # the run of padding at the end of the row
        lengths.append(ids.shape[1] - padding)
    return torch.cat(lengths)


def method_of(network: nn.Module) -> Method | None:
    """The method of one of our models; None for any other network."""
    config = getattr(network, "config", None)
    return find_method(config["method_cfg"]["name"]) if isinstance(config, dict) and "method_cfg" in config else None


def score_of(network: nn.Module) -> Score:
    """The score of a model's method; of a network that is not ours csd, which is the cosine of points."""
    method = method_of(network)
    return (CSDScore if method is None else method.score).of(network)


def is_probabilistic(network: nn.Module) -> bool:
    """Whether a model's variances mean something, which its method knows."""
    method = method_of(network)
    return not isinstance(network, PointModel) and (method is None or method.probabilistic)


def choose_score(similarity: Similarity, own: Score, probabilistic: bool, name: str) -> Score:
    """The score that is asked for; None: the model's own. name: the model's, for errors.

    ValueError for an unknown one, and for one that needs variances where the model has none.
    """
    if similarity is None:
        return own
    score = similarity if isinstance(similarity, Score) else find_score(similarity)()
    if not probabilistic and not score.takes_points:
        raise ValueError(
            f"{name} is deterministic, its embeddings have no variance, and {score.name!r} needs one: use csd, mean or "
            "wasserstein2 (csd equals the cosine there)"
        )
    return own if isinstance(similarity, str) and type(score) is type(own) else score


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


@torch.no_grad()
def similarity_scores(queries: Gaussian, gallery: Gaussian, similarity: str | Score = "csd") -> Tensor:
    """Scores to rank by, larger is nearer, (Q, D), (G, D) -> (Q, G).

    similarity: a score, or the name of one: "csd" (mean.mean' - (trace + trace')/2, ProLIP A.1), "mean" (cosine of the
    means, which ignores the variances), a name of `prolip.measures.MEASURES`. Raises ValueError for another.
    """
    score = similarity if isinstance(similarity, Score) else find_score(similarity)()
    return score.pairwise(queries, gallery)


def _groups(items: Iterable, size: int) -> Iterator[list]:
    """Lists of `size` items, the last one shorter."""
    if size < 1:
        raise ValueError(f"batch size {size}: give 1 or more")
    iterator = iter(items)
    while group := list(islice(iterator, size)):
        yield group


def _embed(
    model: nn.Module,
    modality: str,
    batches: Iterable[Tensor],
    device: torch.device | str,
    precision: str,
    progress: bool,
) -> Gaussian:
    """All batches through `model.encode_<modality>`."""
    encode = getattr(model, f"encode_{modality}")
    out: list[Gaussian] = []
    with evaluating(model, device, precision), tqdm(desc=f"{modality}s", unit="", disable=not progress) as bar:
        for batch in batches:
            z = encode(batch.to(device, non_blocking=True))
            out.append(Gaussian(z.mean.float().cpu(), z.log_var.float().cpu()))
            bar.update(len(batch))
    if not out:
        raise ValueError("nothing to embed: give at least one image or text")
    z = concatenate(out)
    # Inference tensors could not be saved for a backward pass later: hand out ordinary ones.
    return Gaussian(z.mean.clone(), z.log_var.clone())
