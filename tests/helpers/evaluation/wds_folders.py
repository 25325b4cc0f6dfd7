"""Small test sets in clip_benchmark's wds layout, and reading them back with nothing but tarfile."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("red car", "green tree", "blue sea", "small dog", "old house", "snow")
TEMPLATES = ("a photo of a {c}.", "{c}", "this is the {c} of a friend")


def picture(number: int) -> Image.Image:
    """A coloured ramp with noise, different for every number."""
    rng = np.random.default_rng(number)
    ramp = np.linspace(0, 1, 40)[:, None, None] * rng.uniform(-200, 200, 3) + rng.uniform(30, 220, 3)
    return Image.fromarray(np.clip(ramp + rng.normal(0, 25, (40, 40, 3)), 0, 255).astype(np.uint8))


def encoded(image: Image.Image) -> bytes:
    """As PNG."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def encoded_array(array: np.ndarray) -> bytes:
    """As .npy."""
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def write_split(folder: Path, samples: list[dict[str, bytes]], shards: int = 1) -> None:
    """nshards.txt and the shards, consecutive samples in one shard; samples: extension -> bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nshards.txt").write_text(f"{shards}\n")
    for number, part in enumerate(np.array_split(np.arange(len(samples)), shards)):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for i in part:
                for extension, data in samples[i].items():
                    member = tarfile.TarInfo(f"s{i:04d}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def read_split(folder: Path) -> list[dict[str, bytes]]:
    """The samples of all shards in their order."""
    out: dict[str, dict[str, bytes]] = {}
    for number in range(int((folder / "nshards.txt").read_text())):
        with tarfile.open(folder / f"{number}.tar") as tar:
            for member in tar:
                key, extension = member.name.split(".")
                out.setdefault(key, {})[extension] = tar.extractfile(member).read()
    return list(out.values())


def pictures(samples: list[dict[str, bytes]]) -> list[Image.Image]:
    """The images of `read_split`."""
    return [Image.open(io.BytesIO(sample["png"])).convert("RGB") for sample in samples]


def write_texts(root: Path, kind: str, classes=CLASSES, templates=TEMPLATES) -> None:
    """The text files of a test set."""
    root.mkdir(parents=True, exist_ok=True)
    if kind != "retrieval":
        (root / "classnames.txt").write_text("\n".join(classes) + "\n")
        (root / "zeroshot_classification_templates.txt").write_text("\n".join(templates) + "\n")
    if kind != "classification":
        (root / "dataset_type.txt").write_text(kind + "\n")


def classification(root: Path, images: int = 13, shards: int = 2, classes=CLASSES, split: str = "test", first: int = 0):
    """One class per image; the pictures are numbered from `first`."""
    write_texts(root, "classification", classes)
    labels = np.random.default_rng(1).permutation(np.arange(images) % len(classes))
    samples = [{"png": encoded(picture(first + i)), "cls": str(labels[i]).encode()} for i in range(images)]
    write_split(root / split, samples, shards)
    return root


def multilabel(root: Path, images: int = 14, classes=CLASSES):
    """Several classes per image, at least one image per class."""
    write_texts(root, "multilabel", classes)
    rng = np.random.default_rng(2)
    labels = (rng.random((images, len(classes))) < 0.35).astype(np.int64)
    labels[np.arange(len(classes)), np.arange(len(classes))] = 1
    samples = [{"png": encoded(picture(100 + i)), "npy": encoded_array(labels[i])} for i in range(images)]
    write_split(root / "test", samples)
    return root


def retrieval(root: Path, images: int = 12, captions: int = 3):
    """`captions` lines of text per image."""
    write_texts(root, "retrieval")
    rng = np.random.default_rng(3)
    words = ["a", "dog", "cat", "sits", "runs", "on", "the", "grass", "under", "blue", "sky", "boat", "two", "people"]
    samples = []
    for i in range(images):
        lines = [f"{' '.join(rng.choice(words, 5))} {i}" for _ in range(captions)]
        samples.append({"png": encoded(picture(200 + i)), "txt": "\n".join(lines).encode()})
    write_split(root / "test", samples, 2)
    return root
