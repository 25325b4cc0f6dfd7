"""Tiny test sets in the true format of each reader, and tiny models, for the tests of evaluations."""

from __future__ import annotations

import csv
import io
import json
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import open_clip
import torch
from PIL import Image
from tiny_tars import write_tar

import prolip
from prolip.embedder import Embedder
from prolip.models.checkpoint import save_pretrained

CLASSES = ("red car", "green tree", "blue sea", "small dog", "old house", "snow", "night sky")
TEMPLATES = ("a photo of a {c}.", "{c}", "this is the {c} of a friend")
WORDS = ("a", "dog", "cat", "sits", "runs", "on", "the", "grass", "under", "blue", "sky", "boat", "two", "people")
TINY_CLIP = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


# --- models ----------------------------------------------------------------------------------------------------------
def prolip_folder(folder: Path, seed: int = 0) -> str:
    """Write a small random model of ours with different traces, and return its --model."""
    torch.manual_seed(seed)
    model = prolip.create_model("ProLIP-ViT-test", init_unc_bias=-4.0, init_unc_gain=1.0)
    return f"local-dir:{save_pretrained(model, folder)}"


def small_prolip(folder: Path, seed: int = 0) -> Embedder:
    """The same, ready to evaluate."""
    return Embedder.load(prolip_folder(folder, seed))


def small_openclip(folder: Path) -> Embedder:
    """A small random OpenCLIP model, registered with OpenCLIP under the name ViT-mini."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ViT-mini.json").write_text(json.dumps(TINY_CLIP))
    open_clip.add_model_config(folder / "ViT-mini.json")
    torch.manual_seed(1)
    torch.save(open_clip.create_model("ViT-mini").state_dict(), folder / "weights.pt")
    return Embedder.load("ViT-mini", str(folder / "weights.pt"))


# --- images ----------------------------------------------------------------------------------------------------------
def picture(number: int, kind: str = "PNG", size: int = 24) -> bytes:
    """Return an encoded image, different for every number."""
    rng = np.random.default_rng(number)
    ramp = np.linspace(0, 1, size)[:, None, None] * rng.uniform(-200, 200, 3) + rng.uniform(30, 220, 3)
    return encoded(np.clip(ramp + rng.normal(0, 25, (size, size, 3)), 0, 255).astype(np.uint8), kind)


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def array(values) -> bytes:
    """A .npy file."""
    out = io.BytesIO()
    np.save(out, np.asarray(values))
    return out.getvalue()


def sentences(rng: np.random.Generator, number: int, count: int) -> list[str]:
    """Return captions that no other image has."""
    return [f"{' '.join(rng.choice(WORDS, 5))} {number}" for _ in range(count)]


# --- webdataset folders ----------------------------------------------------------------------------------------------
def write_shards(folder: Path, samples: Sequence[tuple[str, dict[str, bytes]]], shards: int = 1) -> Path:
    """nshards.txt and its shards; samples: (key, suffix -> bytes)."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(np.array_split(np.arange(len(samples)), shards)):
        write_tar(folder / f"{number}.tar", [samples[i] for i in part])
    (folder / "nshards.txt").write_text(f"{shards}\n")
    return folder


def read_split(folder: Path) -> list[dict[str, bytes]]:
    """The samples of all shards, suffix -> bytes, by nothing but tarfile."""
    samples: dict[str, dict[str, bytes]] = {}
    for number in range(int((folder / "nshards.txt").read_text())):
        with tarfile.open(folder / f"{number}.tar") as tar:
            for member in tar:
                key, suffix = member.name.split(".")
                samples.setdefault(key, {})[suffix] = tar.extractfile(member).read()
    return list(samples.values())


def picture_of(sample: dict[str, bytes]) -> bytes:
    return next(data for suffix, data in sample.items() if suffix in ("png", "jpg", "jpeg", "webp"))


def write_classes(root: Path, classes: Sequence[str] = CLASSES, templates: Sequence[str] = TEMPLATES) -> None:
    """classnames.txt and zeroshot_classification_templates.txt."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "classnames.txt").write_text("\n".join(classes) + "\n")
    (root / "zeroshot_classification_templates.txt").write_text("\n".join(templates) + "\n")


def wds_classification(
    root: Path,
    classes: Sequence[str] = CLASSES,
    templates: Sequence[str] = TEMPLATES,
    images: int = 13,
    columns: Sequence[int] = (),
    shards: int = 2,
    seed: int = 0,
    split: str = "test",
) -> Path:
    """A class per image; columns: how many values each column of the metadata (.npy) has, none without."""
    write_classes(root, classes, templates)
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(images) % len(classes))
    samples = []
    for i in range(images):
        members = {"png": picture(1000 * seed + i), "cls": str(labels[i]).encode()}
        if columns:
            members["npy"] = array([rng.integers(count) for count in columns])
        samples.append((f"s{i:07d}", members))
    write_shards(root / split, samples, shards)
    return root


def wds_faces(root: Path, prompts: dict[str, int], columns: Sequence[int], images: int = 11, seed: int = 0) -> Path:
    """FairFace's layout: lines `objective:...`, no labels but metadata; prompts: objective -> its number of classes."""
    classes = [f"{objective}:kind {i} of {objective}" for objective, count in prompts.items() for i in range(count)]
    write_classes(root, classes, [f"{objective}:a photo of a {{c}} person" for objective in prompts])
    rng = np.random.default_rng(seed)
    rows = [array([rng.integers(count) for count in columns]) for _ in range(images)]
    write_shards(root / "test", [(f"s{i:07d}", {"webp": picture(i, "WEBP"), "npy": rows[i]}) for i in range(images)])
    return root


def wds_multilabel(root: Path, classes: Sequence[str] = CLASSES, images: int = 14, seed: int = 0) -> Path:
    """Several classes per image, at least one image per class."""
    write_classes(root, classes)
    (root / "dataset_type.txt").write_text("multilabel\n")
    rng = np.random.default_rng(seed)
    labels = (rng.random((images, len(classes))) < 0.35).astype(np.int64)
    labels[np.arange(len(classes)), np.arange(len(classes))] = 1
    samples = [(f"s{i:07d}", {"jpg": picture(i, "JPEG"), "npy": array(labels[i])}) for i in range(images)]
    write_shards(root / "test", samples, 2)
    return root


def wds_retrieval(root: Path, images: int = 12, captions: int = 3, shards: int = 2, seed: int = 0) -> Path:
    """`captions` lines of text per image."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "dataset_type.txt").write_text("retrieval\n")
    rng = np.random.default_rng(seed)
    texts = ["\n".join(sentences(rng, i, captions)).encode() for i in range(images)]
    samples = [(f"s{i:07d}", {"jpeg": picture(i, "JPEG"), "txt": text}) for i, text in enumerate(texts)]
    write_shards(root / "test", samples, shards)
    return root


# --- other formats ---------------------------------------------------------------------------------------------------
def class_folders(root: Path, folders: Sequence[str], images: int = 2, suffix: str = "JPEG") -> Path:
    """ImageNet's validation folders."""
    for label, folder in enumerate(folders):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for i in range(images):
            (root / folder / f"val_{label}_{i}.{suffix}").write_bytes(picture(10 * label + i, "JPEG"))
    return root


def karpathy(root: Path, images: int = 6, captions: int = 5, dataset: str = "coco") -> tuple[Path, Path]:
    """(annotations, image folder) of COCO or Flickr30k: `images` of the split test, one of train."""
    rng, records = np.random.default_rng(5), []
    for i in range(images + 1):
        ids = list(range(i * captions, (i + 1) * captions))
        texts = zip(ids, sentences(rng, i, captions))
        split = "train" if i == 2 else "test"
        record: dict = {"imgid": i, "split": split, "sentids": ids, "filename": f"{1000 + i}.jpg"}
        record["sentences"] = [{"raw": x, "tokens": x.split(), "imgid": i, "sentid": number} for number, x in texts]
        if dataset == "coco":
            record |= {"filepath": "val2014", "filename": f"COCO_val2014_{400 - i:012d}.jpg", "cocoid": 400 - i}
        path = root / "images" / record.get("filepath", "") / record["filename"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(i, "JPEG"))
        records.append(record)
    file = root / f"dataset_{dataset}.json"
    file.write_text(json.dumps({"images": records, "dataset": dataset}))
    return file, root / "images"


def pack(folder: Path, name: str, files: dict[str, bytes], packed: bool) -> None:
    """`name.zip` with a folder of that name, or the folder itself."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}.zip", "w") as archive:
        for file, data in files.items():
            archive.writestr(f"{name}/{file}", data)
    if not packed:
        with zipfile.ZipFile(folder / f"{name}.zip") as archive:
            archive.extractall(folder)
        (folder / f"{name}.zip").unlink()


def write_table(path: Path, rows: Sequence[dict]) -> None:
    """A CSV; lists become JSON."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows)


def caption_table(root: Path, dataset: str = "flickr", images: int = 5, packed: bool = True) -> Path:
    """DataComp's Flickr30k 1K (dataset "flickr") or COCO 5K ("coco") as the hub has them."""
    tables = {"flickr": "test_1k_flickr.csv", "coco": "test_5k_mscoco_2014.csv"}
    names = {"flickr": "images_flickr_1k_test", "coco": "images_mscoco_2014_5k_test"}
    rng = np.random.default_rng(6)
    files = {f"{2000 + i}.jpg": picture(i, "JPEG") for i in range(images)}
    pack(root, names[dataset], files, packed)
    rows = [{"raw": sentences(rng, i, 5), "split": "test", "filename": file} for i, file in enumerate(files)]
    write_table(root / tables[dataset], rows)
    return root


def winogavil(root: Path, sizes: Sequence[int] = (5, 6, 10, 12, 12), packed: bool = True, seed: int = 0) -> Path:
    """One instance per size; its candidates are drawn from 16 words, so that instances share images."""
    rng = np.random.default_rng(seed)
    words = [f"thing{i}" for i in range(16)]
    pack(root, "winogavil_images", {f"{word}.jpg": picture(i, "JPEG") for i, word in enumerate(words)}, packed)
    rows = []
    for number, size in enumerate(sizes):
        candidates = rng.choice(words, size, replace=False).tolist()
        true, cue = candidates[: 2 + number % 3], ("Ocean", "music", "Egypt", "run", "tree")[number % 5]
        row = {"ID": number, "cue": cue, "candidates": candidates, "associations": true}
        rows.append(row | {"num_associations": len(true), "num_candidates": size})
    write_table(root / "winogavil_dataset.csv", rows)
    return root


def cub(root: Path, species: int = 4, images: int = 3, captions: int = 10) -> tuple[Path, Path]:
    """Write (captions, images), with the lists of all splits next to the images; the last species is unseen."""
    rng = np.random.default_rng(7)
    names = [f"{i + 1:03d}.Bird_{i}" for i in range(species)]
    keys = [f"{name}/Bird_{i}_{j:04d}.jpg" for i, name in enumerate(names) for j in range(images)]
    for number, key in enumerate(keys):
        image, text = root / "images" / key, (root / "text_c10" / key).with_suffix(".txt")
        for path in (image, text):
            path.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(picture(number, "JPEG"))
        text.write_text("\n".join(sentences(rng, number, captions)) + "\n")
    (root / "images.txt").write_text("".join(f"{i + 1} {key}\n" for i, key in enumerate(keys)))
    (root / "train_test_split.txt").write_text("".join(f"{i + 1} {int(i % images == 0)}\n" for i in range(len(keys))))
    (root / "testclasses.txt").write_text(f"{names[-1]}\n")
    (root / "trainvalclasses.txt").write_text("\n".join(names[:-1]) + "\n")
    (root / "seen_test_images.txt").write_text("\n".join(keys[::images]) + "\n")
    return root / "text_c10", root / "images"


def iapr(root: Path, images: int = 20) -> Path:
    """The folder iaprtc12 as it is unpacked: annotations 00/0.eng and 00/1.eng, 01/2.eng and so on, with images."""
    rng = np.random.default_rng(11)
    for number in range(images):
        key = f"{number // 2:02d}/{number}"
        texts = "; ".join(sentences(rng, number, 1 + number % 3)) + ";"
        if number == 1:
            texts = "a caf\xe9 of Smith & Sons &amp; Co;\na wall behind it ; "
        annotation = root / "annotations_complete_eng" / f"{key}.eng"
        image = root / "images" / f"{key}.jpg"
        for path in (annotation, image):
            path.parent.mkdir(parents=True, exist_ok=True)
        annotation.write_text(
            f"<DOC>\n<DOCNO>annotations/{key}.eng</DOCNO>\n<TITLE>Title {number}</TITLE>\n"
            f"<DESCRIPTION>{texts}</DESCRIPTION>\n<NOTES></NOTES>\n<LOCATION>Quilotoa, Ecuador</LOCATION>\n"
            f"<DATE>April 2002</DATE>\n<IMAGE>images/{key}.jpg</IMAGE>\n"
            f"<THUMBNAIL>thumbnails/{key}.jpg</THUMBNAIL>\n</DOC>\n",
            encoding="iso-8859-1",
        )
        image.write_bytes(picture(number, "JPEG"))
    return root
