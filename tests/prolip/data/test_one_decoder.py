"""One file, the same pixels everywhere: `open_image`, training, evaluation, clip_benchmark.

Images of every mode that Pillow writes, in every format, drawn at random; their meaning is computed independently.
"""

from __future__ import annotations

import ast
import io
import re
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from clip_benchmark.datasets import builder
from generated_pictures import generated, meant
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from PIL import __version__ as pillow_version
from tiny_tars import letters, write_tar
from torchvision.transforms import PILToTensor

import prolip
from prolip.data.augment.crops import RandomCrop, crop
from prolip.data.images import decode_pixels
from prolip.data.loader import DataConfig, build_loader
from prolip.evaluation.clip_benchmark.patches import patched
from prolip.evaluation.datasets.webdataset import open_wds

SOURCE = Path(__file__).parents[3] / "src"
#: Older ones report one kind of TIFF as cut, and cannot write others.
NEW = int(pillow_version.partition(".")[0]) >= 13
new_pillow = pytest.mark.skipif(not NEW, reason="needs Pillow 13 to write and read every kind")


# --- doors: files -> arrays, in their order
def library(folder, files):
    """`open_image` of a path, bytes of three types, an open file, a URL, a Pillow image."""
    for number, path in enumerate(files):
        data, kind = path.read_bytes(), number % 8
        sources = (path, str(path), data, bytearray(data), memoryview(data), io.BytesIO(data), path.as_uri())
        yield prolip.open_image(Image.open(path) if kind == 7 else sources[kind])


def training(folder, files):
    """A loader's batches of one, whole images."""
    tar = write_tar(folder / "train.tar", [(path.stem, {"png": path.read_bytes(), "txt": b"x"}) for path in files])
    config = DataConfig(train_data=tar, train_num_samples=len(files), batch_size=1, workers=0, seed=1)
    batches = build_loader(config, PILToTensor(), letters)
    found = {batch["key"][0]: batch["image"][0].permute(1, 2, 0).numpy() for batch in batches}
    return [image for _, image in sorted(found.items())]


def training_fast(folder, files):
    return [decode_pixels(path.read_bytes()) for path in files]


def wds_folder(folder, samples):
    root = folder / "wds"
    (root / "test").mkdir(parents=True, exist_ok=True)
    (root / "classnames.txt").write_text("a\nb\n")
    (root / "zeroshot_classification_templates.txt").write_text("a {c}\n")
    (root / "test" / "nshards.txt").write_text("1\n")
    write_tar(root / "test" / "0.tar", [(key, {**images, "cls": b"0"}) for key, images in samples])
    return root


def evaluation_and_benchmark(root):
    with patched():
        theirs = [image for image, _ in builder.build_wds_dataset("x", np.array, "test", str(root))]
    return [sample.open() for sample in open_wds(root).samples()], theirs


@new_pillow
def test_every_mode_and_format_gives_the_same_pixels_through_every_door(tmp_path):
    pictures = [picture for picture in generated() if picture.format is not None]
    files = [tmp_path / f"p{number:04d}.png" for number in range(len(pictures))]  # the bytes decide
    for path, picture in zip(files, pictures):
        path.write_bytes(picture.data)
    first = [np.asarray(image) for image in library(tmp_path, files)]
    for picture, path, got in zip(pictures, files, first):
        want = meant(picture, path.read_bytes())
        assert got.shape == want.shape and np.abs(got.astype(int) - want).max() <= 1, picture.name
    root = wds_folder(tmp_path, [(path.stem, {"png": path.read_bytes()}) for path in files])
    doors = [training(tmp_path, files), training_fast(tmp_path, files), *evaluation_and_benchmark(root)]
    for number, door in enumerate(doors):
        got = [np.asarray(image) for image in door]
        assert [p.name for p, one, other in zip(pictures, first, got) if not np.array_equal(one, other)] == [], number
        assert len(got) == len(files)


@new_pillow
def test_transforms_take_every_mode_as_its_rgb():
    """An image of any mode, from a file or not, goes through a model's transforms as its RGB does; so do crops."""
    torch.manual_seed(0)
    _, train, evaluation = prolip.create_model_and_transforms("ProLIP-ViT-test")
    plain = image_transform_v2(PreprocessCfg(**prolip.create_model("ProLIP-ViT-test").visual.preprocess_cfg), False)
    for picture in generated():
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


def opens_files(node: ast.AST) -> bool:
    """Return whether this calls another function that turns bytes into pixels or RGB."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    of_image = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "Image"
    method = isinstance(node.func, ast.Attribute) and name == "convert"
    return method or name in {"imread", "read_image", "ImageHandler", "pil_loader"} or (name == "open" and of_image)


def test_nothing_else_in_the_code_opens_images():
    texts = {path: path.read_text() for path in SOURCE.rglob("*.py")}
    calls = re.compile(r"convert\(|imread|read_image|Handler|pil_loader|open\(")
    near = [path for path, text in texts.items() if calls.search(text)]
    found = [path for path in near if any(map(opens_files, ast.walk(ast.parse(texts[path]))))]
    assert found == [SOURCE / "prolip" / "data" / "images.py"]
