"""Images per second and core from JPEG bytes to a training image: OpenCLIP's transform against ours.

    PYTHONPATH=src OMP_NUM_THREADS=1 python scripts/bench/train/loader.py --sizes 512x512 1024x768

One core, one thread. The ways take turns within one process (A B A B..., the order reversed every other turn), on the
same files with the same seeds. Ratios are medians of the ratios within a turn, with their quartiles. Claims refer to
processor time; wall-clock time is printed next to it. The files are synthetic images with smooth and fine noise,
quality 90, 4:2:0 (--images takes a folder of JPEGs instead).

    openclip           webdataset's Pillow decoding, then OpenCLIP's transform with a crop alone: float32, normalised
    openclip + jitter  the same with the paper's colour jitter and greyscale
    ours               `RandomCrop` from the file: uint8; the device changes colours and normalises
    ours, dct-scaled   the same with --dct-scaled-decoding

"openclip + jitter" against "ours" is the gain of a training run whose device changes the colours. The time on the
device is printed below, also for this core, although it is too slow for training.

--decoders compares, in the same manner, decoding alone, to an array in memory; torchcodec where it is installed.

Errors compare the pixels before colour changes with Pillow's crop of the same box, in levels of 255.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import numpy as np
import simplejpeg
import torch
import torchvision
import webdataset
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import pil_to_tensor, resized_crop

from bench.common import spread
from prolip.data.augment.colour import ColourJitter, split_augmentation
from prolip.data.augment.crops import RandomCrop
from prolip.data.images import decode_image
from prolip.data.samples import seed_rng

PAPER = {  # ProLIP B.1
    "scale": (0.8, 1.0),
    "color_jitter": (0.32, 0.32, 0.32, 0.08),
    "color_jitter_prob": 0.8,
    "gray_scale_prob": 0.2,
}
OPEN = webdataset.imagehandler("pilrgb")  # OpenCLIP's decoder for shards
LEAST_SIDE = 40
Way = Callable[[bytes, int], Tensor]


def picture(width: int, height: int, seed: int) -> bytes:
    """Return a JPEG that decodes like a photograph: soft shades, edges, and some grain."""
    rng = np.random.default_rng(seed)
    pixels = np.full((height, width, 3), 128, dtype=np.float32)
    for cell in (4, 16, 64):
        coarse = rng.normal(scale=8 * cell**0.5, size=(3, height // cell + 2, width // cell + 2)).astype(np.float32)
        for channel, layer in enumerate(coarse):
            pixels[..., channel] += np.asarray(Image.fromarray(layer).resize((width, height), Image.Resampling.BICUBIC))
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for number in range(12):
        left, top, span = (int(rng.integers(*ends)) for ends in ((width,), (height,), (8, width // 4)))
        shape = draw.ellipse if number % 2 else draw.rectangle
        shape((left, top, left + span, top + span // 2), fill=tuple(rng.integers(0, 256, 3).tolist()))
    grainy = np.asarray(image) + rng.normal(scale=4, size=(height, width, 1))
    file = io.BytesIO()
    Image.fromarray(grainy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90, subsampling="4:2:0")
    return file.getvalue()


def openclip(size: int, aug_cfg: dict[str, Any]) -> Way:
    """Return OpenCLIP's way, seeded as our loader seeds any transform."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about the settings that it has just used
        transform = image_transform_v2(PreprocessCfg(size=size), is_train=True, aug_cfg=aug_cfg)

    def way(data: bytes, seed: int) -> Tensor:
        seed_rng(seed)
        return transform(OPEN("0.jpg", data))

    return way


def host_half(size: int, dct_scaled: bool = False) -> RandomCrop:
    """Return our way, as a run with the paper's augmentation builds it."""
    halves = split_augmentation(PAPER, size, dct_scaled)
    assert halves is not None
    return halves[0]


def ways(size: int) -> dict[str, Way]:
    """Return name -> function from the bytes of a file and a seed to a training image."""
    exact, scaled = host_half(size), host_half(size, dct_scaled=True)
    return {
        "openclip": openclip(size, {"scale": PAPER["scale"]}),
        "openclip + jitter": openclip(size, PAPER),
        "ours": lambda data, seed: exact.from_file(data, Random(seed)),
        "ours, dct-scaled": lambda data, seed: scaled.from_file(data, Random(seed)),
    }


def decoders() -> dict[str, Way]:
    """Return name -> function from the bytes of a file to its pixels, in the library's own layout."""

    def as_tensor(data: bytes) -> Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    found: dict[str, Way] = {
        "pillow": lambda data, _: torch.from_numpy(np.array(decode_image(data))),
        "simplejpeg": lambda data, _: torch.from_numpy(simplejpeg.decode_jpeg(data)),
        "torchvision": lambda data, _: torchvision.io.decode_jpeg(as_tensor(data), torchvision.io.ImageReadMode.RGB),
    }
    with contextlib.suppress(ImportError):
        from torchcodec.decoders import decode_jpeg

        found["torchcodec"] = lambda data, _: decode_jpeg(as_tensor(data))
    return found


def report_decoders(label: str, files: list[bytes], turns: int) -> None:
    """Print the table of the decoders."""
    found = decoders()
    processor = {name: [spent[0] for spent in spents] for name, spents in take_turns(found, files, turns).items()}
    print(f"\nDecoding {label}\n| | ms | pillow / this |\n" + "|---" * 3 + "|")
    for name, seconds in processor.items():
        print(f"| {name} | {statistics.median(seconds) * 1e3:.2f} | {over_base(processor['pillow'], seconds)} |")


def take_turns(ways: dict[str, Way], files: list[bytes], turns: int) -> dict[str, list[tuple[float, float]]]:
    """Return (processor, wall-clock) seconds per image of every way and turn, after one uncounted turn."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(-1, turns):
        for name in list(ways) if turn % 2 else reversed(list(ways)):
            processor, wall = time.process_time(), time.perf_counter()
            for number, data in enumerate(files):
                ways[name](data, turn * len(files) + number)
            if turn >= 0:
                spent = time.process_time() - processor, time.perf_counter() - wall
                taken[name].append((spent[0] / len(files), spent[1] / len(files)))
    return taken


def errors(ours: RandomCrop, files: list[bytes], boxes: int) -> tuple[int, float, float, float]:
    """Return (largest error, mean absolute error, share of different pixels, PSNR in dB) against Pillow's crops."""
    off = []
    for number, data in enumerate(files):
        image = decode_image(data)
        for seed in range(number * boxes, (number + 1) * boxes):
            box, _ = ours.draw(image.height, image.width, Random(seed))
            pillow = resized_crop(image, *box, ours.size, InterpolationMode.BICUBIC)
            off.append((ours.from_file(data, Random(seed)).short() - pil_to_tensor(pillow).short()).abs())
    all_off = torch.stack(off).float()
    noise = all_off.square().mean().item()
    psnr = 10 * np.log10(255**2 / noise) if noise else float("inf")
    return int(all_off.max()), all_off.mean().item(), all_off.gt(0).float().mean().item(), psnr


def device_seconds(rows: int, size: int, device: str, turns: int) -> dict[str, float]:
    """Return the median seconds per image of the device's work on a batch."""
    images = torch.randint(0, 256, (rows, 3, size, size), dtype=torch.uint8).to(device)
    medians = {}
    for name, aug_cfg in {"normalise": {}, "jitter, grey, normalise": PAPER}.items():
        halves = split_augmentation(aug_cfg, size)
        assert halves is not None
        augment = ColourJitter(halves[1], PreprocessCfg().mean, PreprocessCfg().std).to(device)
        taken = []
        for step in range(-1, turns):
            if device == "cuda":
                torch.cuda.synchronize()
            clock = time.perf_counter if device == "cuda" else time.process_time
            start = clock()
            augment(images, step)
            if device == "cuda":
                torch.cuda.synchronize()
            taken.append(clock() - start)
        medians[name] = statistics.median(taken[1:]) / rows
    return medians


def over_base(a: list[float], b: list[float]) -> str:
    """Format the median and quartiles of a / b over the turns."""
    return spread([x / y for x, y in zip(a, b)], 2)


def report(label: str, files: list[bytes], args: argparse.Namespace) -> None:
    """Print the tables of one set of files."""
    all_ways = ways(args.image_size)
    taken = take_turns(all_ways, files, args.turns)
    processor = {name: [spent[0] for spent in turns] for name, turns in taken.items()}
    print(f"\n{label}: {len(files)} files of {sum(map(len, files)) / len(files) / 1024:.0f} KiB on average")
    print("| | images/s/core | by the wall | ms | over openclip | over openclip + jitter |\n" + "|---" * 6 + "|")
    for name in all_ways:
        seconds, wall = (statistics.median(spent[clock] for spent in taken[name]) for clock in (0, 1))
        over = [over_base(processor[base], processor[name]) for base in ("openclip", "openclip + jitter")]
        print(f"| {name} | {1 / seconds:.0f} | {1 / wall:.0f} | {seconds * 1e3:.2f} | {over[0]} | {over[1]} |")
    print("\n| pixels | max error | mean error | pixels that differ | PSNR, dB |\n" + "|---" * 5 + "|")
    for name, half in {"ours": False, "ours, dct-scaled": True}.items():
        most, mean, share, psnr = errors(host_half(args.image_size, half), files, args.boxes)
        print(f"| {name} | {most} | {mean:.4f} | {share:.2%} | {psnr:.1f} |", flush=True)


def jpegs(folder: Path) -> list[Path]:
    """Return the JPEGs in a folder; none if there is no folder."""
    return sorted(path for path in folder.glob("*") if path.suffix.lower() in (".jpg", ".jpeg"))


def all_files(args: argparse.Namespace) -> dict[str, list[bytes]]:
    """Return name -> files."""
    if args.images:
        return {str(args.images): [path.read_bytes() for path in jpegs(args.images)]}
    sizes = {size: size.split("x") for size in args.sizes}
    return {
        size: [picture(int(width), int(height), seed) for seed in range(args.files)]
        for size, (width, height) in sizes.items()
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["512x512", "1024x768"], help="width x height of files, pixels")
    parser.add_argument("--images", type=Path, help="folder of JPEGs to use instead of synthetic files")
    parser.add_argument("--files", type=int, default=12, help="number of files of each size")
    parser.add_argument("--turns", type=int, default=25, help="number of counted turns")
    parser.add_argument("--boxes", type=int, default=8, help="boxes per file for measuring errors")
    parser.add_argument("--image-size", type=int, default=224, help="size of the model's images, pixels")
    parser.add_argument("--rows", type=int, help="images per batch on the device (default: 16 on a CPU, 512 on CUDA)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device to time")
    parser.add_argument("--decoders", action="store_true", help="compare only decoders")
    parser.add_argument("--core", type=int, help="processor core to run on (default: the last one allowed)")
    args = parser.parse_args(argv)
    for name, least in {"files": 1, "turns": 2, "boxes": 1, "image_size": 1}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}: give {least} or more")
    for size in args.sizes:
        sides = re.fullmatch(r"(\d+)x(\d+)", size)
        if sides is None or min(map(int, sides.groups())) < LEAST_SIDE:
            parser.error(f"--sizes {size} must be a width x height of {LEAST_SIDE} pixels or more. Give e.g. 512x512")
    if args.images is not None and not jpegs(args.images):
        parser.error(f"--images {args.images} is not a folder with .jpg or .jpeg files")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0)) if args.core is None else args.core})
    for label, files in all_files(args).items():
        if args.decoders:
            report_decoders(label, files, args.turns)
        else:
            report(label, files, args)
    if args.decoders:
        return
    for device in dict.fromkeys(["cpu", args.device]):
        rows = args.rows or (512 if device == "cuda" else 16)
        print(f"\n{rows} images on {device}" + (" (this core)" if device == "cpu" else ""))
        for name, seconds in device_seconds(rows, args.image_size, device, args.turns).items():
            print(f"{name}: {seconds * 1e3:.3f} ms per image")


if __name__ == "__main__":
    main()
