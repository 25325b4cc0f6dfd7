"""One file, the same pixels through every door: training, evaluation, clip_benchmark, the corpus, the report, README.

Pictures of every mode that Pillow writes, in every format, drawn at random; what they mean is computed independently.
"""

from __future__ import annotations

import ast
import base64
import io
import json
from functools import lru_cache
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from clip_benchmark.datasets import builder
from generated_pictures import WAYS, Picture, generated, meant
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from PIL import __version__ as pillow_version
from tiny_tars import letters, write_tar
from torchvision.transforms import PILToTensor

import prolip
from prolip.corpora.emoji import corpus as emoji
from prolip.corpora.emoji.report import uncertainty
from prolip.data.augment.crops import RandomCrop, crop
from prolip.data.images import decode_pixels
from prolip.data.loader import DataConfig, build_loader
from prolip.evaluation.clip_benchmark.patches import patched
from prolip.evaluation.datasets.imagefolder import open_folder
from prolip.evaluation.datasets.webdataset import open_wds

SOURCE = Path(__file__).parents[3] / "src"


@lru_cache(maxsize=1)
def transforms():
    torch.manual_seed(0)
    return prolip.create_model_and_transforms("ProLIP-ViT-test")[1:]


# --- doors: files -> arrays, in their order
def library(folder, files):
    """`open_image` of a path, bytes of three types, an open file, a URL, a Pillow image."""
    for number, path in enumerate(files):
        data = path.read_bytes()
        sources = (
            path,
            str(path),
            data,
            bytearray(data),
            memoryview(data),
            io.BytesIO(data),
            path.as_uri(),
            Image.open(path),
        )
        yield prolip.open_image(sources[number % len(sources)])


def training(folder, files, **settings):
    """A loader's batches of one, whole pictures."""
    config = DataConfig(batch_size=1, workers=0, seed=1, **settings)
    loader = build_loader(config, PILToTensor(), letters)
    loader.set_epoch(0)
    batches = {batch["key"][0]: batch["image"][0].permute(1, 2, 0).numpy() for batch in loader}
    assert len(batches) == len(files)
    return [image for _, image in sorted(batches.items())]


def training_shard(folder, files):
    tar = write_tar(folder / "train.tar", [(path.stem, {"png": path.read_bytes(), "txt": b"x"}) for path in files])
    return training(folder, files, train_data=tar, train_num_samples=len(files))


def training_csv(folder, files):
    (folder / "d.csv").write_text("\n".join(["filepath\ttitle", *(f"{path}\tx" for path in files)]))
    return training(folder, files, train_data=str(folder / "d.csv"), dataset_type="csv")


def training_folder(folder, files):
    return training(folder, files, train_data=str(files[0].parents[1]), dataset_type="folder")


def training_fast(folder, files):
    return [decode_pixels(path.read_bytes()) for path in files]


def corpus_of(folder, files):
    rows = []
    for path in files:
        texts = dict.fromkeys(("hexcode", "name", "subgroup", "group"), path.stem) | {"keywords": ["k"], "style": "s"}
        rows.append((path.stem, {"png": path.read_bytes(), "json": json.dumps(texts).encode()}))
    return emoji.read(write_tar(folder / "corpus.tar", rows))


def corpus(folder, files):
    return [drawing.image() for drawing in corpus_of(folder, files).drawings]


def report(folder, files):
    shown = uncertainty.drawn(SimpleNamespace(corpus=corpus_of(folder, files), image=None))
    for number in range(len(files)):
        uri = shown.picture(number)
        yield np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))))


def wds_folder(folder, files):
    root = folder / "wds"
    (root / "test").mkdir(parents=True, exist_ok=True)
    (root / "classnames.txt").write_text("a\nb\n")
    (root / "zeroshot_classification_templates.txt").write_text("a {c}\n")
    (root / "test" / "nshards.txt").write_text("1\n")
    write_tar(root / "test" / "0.tar", [(path.stem, {"png": path.read_bytes(), "cls": b"0"}) for path in files])
    return root


def evaluation_shards(folder, files):
    return [sample.open() for sample in open_wds(wds_folder(folder, files)).samples()]


def evaluation_folder(folder, files):
    return [sample.open() for sample in open_folder(files[0].parents[1]).samples()]


def benchmark_shards(folder, files):
    with patched():
        data = builder.build_wds_dataset("x", np.array, "test", str(wds_folder(folder, files)))
        return [image for image, _ in data]


DOORS = (
    library,
    training_shard,
    training_csv,
    training_folder,
    training_fast,
    corpus,
    report,
    evaluation_shards,
    evaluation_folder,
    benchmark_shards,
)


def write(folder, pictures) -> list[Path]:
    """Files in a class folder, in order; what they are is for their bytes to say."""
    place = folder / "images" / "class"
    place.mkdir(parents=True)
    files = []
    for number, picture in enumerate(pictures):
        files.append(place / f"p{number:04d}.png")
        files[-1].write_bytes(picture.data)
    return files


def check_files(folder, pictures: list[Picture]) -> None:
    """Every door gives what was drawn, or what Pillow opens where that is another thing; and all give the same."""
    pictures = [picture for picture in pictures if picture.format is not None]
    files = write(folder, pictures)
    first = [np.asarray(image) for image in library(folder, files)]
    for picture, path, got in zip(pictures, files, first):
        want = meant(picture, path.read_bytes())
        assert got.shape == want.shape and np.abs(got.astype(int) - want).max() <= 1, picture.name
    for door in DOORS[1:]:
        got = [np.asarray(image) for image in door(folder, files)]
        assert len(got) == len(files), door.__name__
        wrong = [p.name for p, one, other in zip(pictures, first, got) if not np.array_equal(one, other)]
        assert wrong == [], door.__name__


def check_transforms(pictures: list[Picture]) -> None:
    """A picture of any mode, from a file or not, goes through a model's transforms as its RGB does; so do crops."""
    train, evaluation = transforms()
    plain = image_transform_v2(PreprocessCfg(**prolip.create_model("ProLIP-ViT-test").visual.preprocess_cfg), False)
    for picture in pictures:
        data = None if picture.format is None else picture.data
        image = picture.image if data is None else Image.open(io.BytesIO(data))
        rgb = prolip.open_image(image.copy())
        want = meant(picture, data)
        assert rgb.mode == "RGB" and np.abs(np.asarray(rgb).astype(int) - want).max() <= 1, picture.name
        assert torch.equal(evaluation(image), plain(rgb)), picture.name
        torch.manual_seed(1)
        one = train(image)
        torch.manual_seed(1)
        assert torch.equal(one, train(rgb)), picture.name
        if data is not None:
            cropped = RandomCrop((8, 8), (0.5, 1.0))
            box, _ = cropped.draw(*want.shape[:2], Random(3))
            assert torch.equal(cropped.from_file(data, Random(3)), crop(np.array(rgb), box, (8, 8))), picture.name


#: Older ones report one kind of TIFF as cut, and cannot write others.
NEW = int(pillow_version.partition(".")[0]) >= 13
new_pillow = pytest.mark.skipif(not NEW, reason="needs Pillow 13 to write and read every kind")


@new_pillow
def test_every_mode_and_format_gives_the_same_pixels_through_every_door(tmp_path):
    check_files(tmp_path, generated(0, len(WAYS)))


@new_pillow
def test_transforms_take_every_mode_as_its_rgb():
    check_transforms(generated(0, len(WAYS)))


# --- embeddings


def saved(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, **{"format": "PNG", **options})
    return buffer.getvalue()


# --- no other decoder
def opens_files(node: ast.AST) -> bool:
    """Whether this calls something that turns bytes into pixels or RGB its own way."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    of_image = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "Image"
    method = isinstance(node.func, ast.Attribute) and name == "convert"
    return method or name in {"imread", "read_image", "ImageHandler", "pil_loader"} or (name == "open" and of_image)


def test_nothing_else_in_the_code_opens_pictures():
    found = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if any(opens_files(node) for node in ast.walk(ast.parse(path.read_text())))
    }
    assert found == {"prolip/data/images.py"}


def test_of_several_pictures_of_a_sample_every_door_takes_the_same(tmp_path):
    red, blue = encoded("JPEG", (250, 0, 0)), encoded("WEBP", (0, 0, 250))
    for order in ((("jpg", red), ("webp", blue)), (("webp", blue), ("jpg", red))):
        root = wds_folder(tmp_path, [])
        write_tar(root / "test" / "0.tar", [("a", {**dict(order), "cls": b"0"})])
        seen = [sample.open() for sample in open_wds(root).samples()]
        with patched():
            seen += [image for image, _ in builder.build_wds_dataset("x", np.array, "test", str(root))]
        assert [np.asarray(image)[0, 0].argmax() for image in seen] == [0, 0]


def encoded(form: str, colour: tuple[int, int, int]) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (40, 40), colour).save(out, form)
    return out.getvalue()
