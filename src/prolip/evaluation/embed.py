"""Images and texts through a model in batches: Gaussians on the CPU in float32, and the scores to rank them by."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor, nn
from tqdm import tqdm

from prolip.gaussian import Gaussian, concatenate
from prolip.measures import Measure, get_measure

PRECISIONS = {"fp32": None, "amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
SIMILARITIES = {"csd": "csd_similarity", "mean": "mean_cosine"}


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


def similarity_scores(queries: Gaussian, gallery: Gaussian, similarity: str = "csd") -> Tensor:
    """Scores to rank by, larger is nearer, (Q, D), (G, D) -> (Q, G).

    similarity: "csd" (mean.mean' - (trace + trace')/2, ProLIP A.1), "mean" (cosine of the means, which ignores the
    variances) or a name of `prolip.measures.MEASURES`. Raises ValueError for another.
    """
    return check_similarity(similarity).pairwise_scores(queries, gallery)


def check_similarity(similarity: str) -> Measure:
    """The measure behind a name of `similarity_scores`. Raises ValueError for an unknown one."""
    return get_measure(SIMILARITIES.get(similarity, similarity))


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
