"""What breaks in clip_benchmark 1.6.2, mended in place while a command runs; its own code does the rest.

Every repair replaces one function of one of its modules, says what broke and why, and is undone afterwards.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import re
import sys
import tarfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import torch
from clip_benchmark import cli
from clip_benchmark.datasets import builder
from clip_benchmark.metrics import linear_probe, zeroshot_classification, zeroshot_retrieval
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from webdataset import autodecode
from webdataset.compat import check_empty
from webdataset.filters import _to_tuple

from prolip.data.faults import SampleFault
from prolip.data.images import decode_image, from_pillow
from prolip.data.samples import IMAGE_SUFFIXES, image_bytes, members_of
from prolip.evaluation.clip_benchmark.encoder import GaussianEncoder, class_vectors
from prolip.evaluation.datasets.base import DamagedData
from prolip.evaluation.metrics.classification import label_ranks
from prolip.scores import MeanScore

ORIGINAL = {
    "classifier": zeroshot_classification.zero_shot_classifier,
    "classification": zeroshot_classification.evaluate,
    "recall_at_k": zeroshot_retrieval.recall_at_k,
    "retrieval": zeroshot_retrieval.evaluate,
    "linear_probe": linear_probe.evaluate,
    "build_dataset": builder.build_dataset,
    "build_wds_dataset": builder.build_wds_dataset,
    "open": Image.open,
}


@contextmanager
def repaired() -> Iterator[None]:
    """clip_benchmark with all repairs, and with class mixtures for our models."""
    with ExitStack() as stack:
        for module, name, function in (
            (zeroshot_classification, "zero_shot_classifier", zero_shot_classifier),
            (zeroshot_classification, "accuracy", accuracy),
            (zeroshot_classification, "evaluate", evaluate_classification),
            (zeroshot_retrieval, "evaluate", evaluate_retrieval),
            (linear_probe, "accuracy", accuracy),
            (linear_probe, "evaluate", evaluate_linear_probe),
            (cli, "build_dataset", build_dataset),
            (builder, "build_wds_dataset", build_wds_dataset),
        ):
            stack.enter_context(patch.object(module, name, function))
        yield


def zero_shot_classifier(model, tokenizer, classnames, templates, device, amp=True) -> Tensor:
    """Not a repair: the original averages the prompts' vectors, for csd a class is the mixture of their Gaussians."""
    if isinstance(model, GaussianEncoder) and (model.prompts is not None or not model.of_means):
        return class_vectors(model, tokenizer, classnames, templates, device, amp)
    return ORIGINAL["classifier"](model, tokenizer, classnames, templates, device, amp=amp)


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...] = (1,)) -> list[float]:
    """Top-k accuracies; output (N, C), target (N,). Equal scores go to the lower class, as in `label_ranks`.

    The original takes float() of an array of shape (1,), which NumPy deprecated in 1.25 and refuses from 2.4 on.
    """
    ranks = label_ranks(output, target)
    return [(ranks <= k).sum().item() / len(target) for k in topk]


def evaluate_classification(*args, **kwargs) -> dict[str, float]:
    """The original leaves acc5 NaN, which is no JSON, below five classes, where every class is among the first five."""
    metrics = ORIGINAL["classification"](*args, **kwargs)
    leave_out(metrics, {"acc5": "fewer than five classes"} if math.isnan(metrics.get("acc5", 0.0)) else {})
    return metrics


def evaluate_retrieval(*args, **kwargs) -> dict[str, float]:
    """The original hands k to topk, which raises above the gallery's size, behind the last image."""
    galleries: dict[int, list[int]] = {}  # k -> sizes, block by block: first of images, then of texts

    def recall_at_k(scores: Tensor, positive_pairs: Tensor, k: int) -> Tensor:
        galleries.setdefault(k, []).append(scores.shape[1])
        return ORIGINAL["recall_at_k"](scores, positive_pairs, min(k, scores.shape[1]))

    with patch.object(zeroshot_retrieval, "recall_at_k", recall_at_k):
        metrics = ORIGINAL["retrieval"](*args, **kwargs)
    beyond = {}
    for k, sizes in galleries.items():
        for what, size in (("image", sizes[0]), ("text", sizes[-1])):
            if k > size:
                beyond[f"{what}_retrieval_recall@{k}"] = f"only {size} {what}s"
    leave_out(metrics, beyond)
    return metrics


def leave_out(metrics: dict[str, float], reasons: dict[str, str]) -> None:
    """Take out figures that would be 1 for any model, and say so."""
    for name, reason in reasons.items():
        del metrics[name]
        print(f"note: {name} is left out: {reason}", file=sys.stderr)


def build_wds_dataset(dataset_name, transform, split="test", data_dir="root", cache_dir=None):
    """webdataset 1.x ends a loader with "No samples found" when one of its workers is left without a shard, so that
    the default of four workers fails below four shards: an idle worker is no fault. And its cache keeps a shard under
    its last name only, `0.tar`, so that the next data set or split reads the shards of the one before: each gets a
    folder of its own, which has to exist. And it drops transparency where it decodes, see `Pictures`, takes another
    picture than training of a sample that has several, and ends at what is damaged without naming it.
    """
    if cache_dir:
        source = f"{data_dir}/{split}"
        readable = re.sub(r"[^\w.-]+", "_", source).strip("_")[-60:]
        folder = f"{readable}-{hashlib.sha256(source.encode()).hexdigest()[:12]}"
        cache_dir = os.path.join(os.path.expanduser(cache_dir), folder)
        os.makedirs(cache_dir, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"WebDataset\(shardshuffle")  # advice to who wrote the call, not to users
        with patch.object(autodecode, "ImageHandler", Pictures):
            dataset = ORIGINAL["build_wds_dataset"](dataset_name, transform, split, data_dir, cache_dir)
    check = partial(check_unless_idle, shards=len(dataset.pipeline[0].urls))
    at = dataset.pipeline.index(check_empty)
    wanted = next(stage.args[1] for stage in dataset.pipeline[at:] if getattr(stage, "f", None) is _to_tuple)
    dataset.pipeline[at : at + 1] = [check, partial(one_picture, wanted=wanted)]
    dataset.pipeline.append(named_damage)
    return dataset


def one_picture(samples: Iterable[dict], wanted: str) -> Iterator[dict]:
    """Samples with one picture each, that which training takes, under a suffix that clip_benchmark knows.

    wanted: what stands beside a picture. DamagedData where one of the two is missing.
    """
    for sample in samples:
        try:
            picture = image_bytes(sample)
            if wanted not in sample:
                raise SampleFault("missing member", f"members: {members_of(sample)}; wanted {wanted}")
        except SampleFault as fault:
            raise damaged(f"sample {sample['__key__']!r} of {sample['__url__']}", fault) from fault
        yield {name: data for name, data in sample.items() if name not in IMAGE_SUFFIXES} | {"jpg": picture}


def named_damage(samples: Iterable) -> Iterator:
    """The same samples; DamagedData in place of webdataset's errors, which name no sample."""
    try:
        yield from samples
    except autodecode.DecodingError as error:
        place = f"sample {error.key!r} of {error.url}"
        raise damaged(place, error.__cause__ if error.k == "jpg" else f".{error.k}: {error.__cause__}") from error
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise damaged(str(error.args[-1]), error.args[0]) from error


def damaged(place: str, fault: object) -> DamagedData:
    """What to say of a file that cannot be used."""
    return DamagedData(
        f"{place}: {fault}. Fetch it again; prolip eval tasks --skip-damaged evaluates what is left, and says"
        " what it left out"
    )


class Pictures(autodecode.ImageHandler):
    """webdataset's step from bytes to pictures, which drops transparency: `decode_image` instead, for any model.

    Figures stay comparable with published ones where pictures are opaque with 8 bits, as those of published sets are.
    """

    def __call__(self, key: str, data: bytes) -> Image.Image | None:
        """The picture of a member whose suffix is a picture's."""
        return decode_image(data) if key.rpartition(".")[2].lower() in self.extensions else None


def build_dataset(*args, **kwargs) -> Dataset:
    """Data sets of single files drop transparency as those of shards do, see `Pictures`."""
    dataset = ORIGINAL["build_dataset"](*args, **kwargs)
    return dataset if isinstance(dataset, IterableDataset) else Opaque(dataset)


class Opaque(Dataset):
    """A data set that opens its files by Pillow, which gives it RGB instead of what is to be converted.

    Here rather than around the whole command, because workers that are started afresh know no repairs.
    """

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index):
        """The item, its pictures opened by `open_rgb`."""
        with patch.object(Image, "open", open_rgb):
            return self.dataset[index]

    def __getattr__(self, name: str):
        """Classes, templates and what else clip_benchmark asks for; not what Python does, such as __getitems__."""
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


def open_rgb(source, *args, **kwargs) -> Image.Image:
    """Pillow's `open`, and `from_pillow`; DamagedData naming the file."""
    try:
        return from_pillow(ORIGINAL["open"](source, *args, **kwargs))
    except FileNotFoundError:
        raise
    except (SampleFault, OSError, Image.DecompressionBombError) as error:
        raise damaged(str(getattr(source, "name", source)), error) from error


def check_unless_idle(samples: Iterable, shards: int) -> Iterable:
    """webdataset's check that there are samples, left out in workers beyond the number of shards."""
    worker = get_worker_info()
    return samples if worker is not None and worker.id >= shards else check_empty(samples)


def evaluate_linear_probe(model, train_dataloader, dataloader, *args, **kwargs) -> dict[str, float] | None:
    """Probe the means of our models; on a machine without CUDA too, where the original stops at an assertion."""
    if isinstance(model, GaussianEncoder):
        model = GaussianEncoder(model.model, MeanScore())
    original = nullcontext(ORIGINAL["linear_probe"])
    with original if torch.cuda.is_available() else linear_probe_without_cuda() as evaluate:
        metrics = evaluate(model, train_dataloader, dataloader, *args, **kwargs)
    if metrics and math.isnan(metrics["lp_acc5"]):  # as in `evaluate_classification`
        leave_out(metrics, {"lp_acc5": "no image of a sixth class"})
    return metrics


@contextmanager
def linear_probe_without_cuda() -> Iterator[Callable]:
    """linear_probe.evaluate compiled as `python -O` does, without `assert device == "cuda"`; .cuda() does nothing.

    The assertion is there because a probe takes long without a GPU. Small ones do not, and a result beats none.
    """
    namespace = dict(vars(linear_probe))
    exec(compile(inspect.getsource(linear_probe), linear_probe.__file__, "exec", optimize=1), namespace)
    namespace["accuracy"] = accuracy
    with patch.object(Tensor, "cuda", lambda self: self), patch.object(nn.Module, "cuda", lambda self: self):
        yield namespace["evaluate"]
