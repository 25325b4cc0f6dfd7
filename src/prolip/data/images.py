"""Decoding of image files to RGB pixels, the same everywhere: JPEG by libjpeg-turbo, other formats by Pillow."""

from __future__ import annotations

import io
import os
import warnings
from contextlib import closing
from dataclasses import replace
from typing import IO, Any

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from prolip.data.faults import SampleFault
from prolip.data.reading.remote import ReadPolicy
from prolip.data.reading.stream import check_address, is_local, local_path, open_stream, read_up_to
from prolip.utils.documents import read_file
from prolip.utils.messages import explain_missing
from prolip.utils.secrecy import redacted, scrub

ImageSource = str | os.PathLike | bytes | bytearray | memoryview | IO[bytes] | Image.Image
#: Formats that Pillow may try; none of them runs another program.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
#: Larger images are refused before decoding: half a gigabyte of RGB; and the bytes of the largest file.
MAX_PIXELS = 13_000**2
MAX_BYTES = 8 * MAX_PIXELS + 2**20
WHITE = (255, 255, 255)
VERSION = 2  # increased when pixels of a file change: stored embeddings are then computed again
#: PNG modes whose samples Pillow scales to 8 bits, but not their transparent value -> (times, divided by).
UNSCALED_KEYS = {"L;2": (85, 1), "L;4": (17, 1), "RGB;16B": (1, 256)}
OVERSHOOT = 1 / 16  # share of white by which floats may exceed black and white, as after resizing
#: Limits while a person waits: an unknown name, or a host that refuses, is reported within a second or two.
PATIENCE = ReadPolicy(connect_timeout=3, read_timeout=5, least_rate=2**13, retries=1, backoff=0.5, backoff_limit=1)


def decode_pixels(data: bytes) -> np.ndarray:
    """Return a file's RGB pixels, (H, W, 3) uint8: equal to `decode_image` in every bit and fault; faster for JPEGs."""
    size = jpeg_size(data)
    pixels = decode_jpeg(data, *size) if size else None
    return np.array(decode_image(data)) if pixels is None else pixels


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return (height, width) of a JPEG for libjpeg-turbo, None if Pillow must decode; SampleFault "oversized image"."""
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    check_size(width, height)
    return (height, width) if colours in ("YCbCr", "RGB", "Gray") else None  # Pillow converts CMYK to other RGB values


def decode_jpeg(data: bytes, height: int, width: int, factor: int = 1) -> np.ndarray | None:
    """Return the RGB pixels of a JPEG of this size, (H, W, 3) uint8, each side divided by 1, 2, 4 or 8 and rounded up.

    None if the decoder complains: Pillow then decides, which accepts some damage.
    """
    smallest: dict[str, Any] = {}
    if factor > 1:
        smallest = {"min_height": -(-height // factor), "min_width": -(-width // factor), "min_factor": factor}
    try:
        return simplejpeg.decode_jpeg(data, "RGB", **smallest)
    except ValueError:
        return None


def decode_image(data: bytes, most: int | None = None, side: int | None = None) -> Image.Image:
    """Return the RGB image in the bytes of a file, by `to_rgb`; SampleFault "bad image", "oversized image".

    An animation gives its first frame; EXIF rotation is ignored (as in OpenCLIP). most: pixels (MAX_PIXELS). side: a
    JPEG may be decoded smaller, down to this many pixels a side.
    """
    try:
        with warnings.catch_warnings():  # a thread may leave the filter at "ignore", which is harmless
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            check_size(*image.size, most)
            if side is not None:
                image.draft(None, (side, side))
            return to_rgb(image)
    except SampleFault:
        raise
    except Image.DecompressionBombError as error:
        raise SampleFault("oversized image", str(error)) from error
    except UnidentifiedImageError as error:
        start = f" that begin with {data[:16]!r}" if data else ""
        what = f"{len(data)} bytes{start}: cannot identify image, expected {', '.join(FORMATS)}"
        raise SampleFault("bad image", what) from error
    except Exception as error:  # Pillow's plugins raise OSError, SyntaxError, ValueError, struct.error and more
        raise SampleFault("bad image", f"{len(data)} bytes: {error}") from error


def check_size(width: int, height: int, most: int | None = None) -> None:
    """Raise SampleFault "oversized image" above `most` pixels (MAX_PIXELS), "bad image" without any pixel."""
    if not width * height:
        raise SampleFault("bad image", f"{width} x {height} pixels")
    most = MAX_PIXELS if most is None else most
    if width * height > most:
        raise SampleFault("oversized image", f"{width} x {height} pixels, the limit is {most}")


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any Pillow image to RGB: the upper 8 of 16 bits; white under transparent pixels, as black hides drawings.

    ValueError if the value of white is unknown, and Pillow's errors for a damaged file.
    """
    key, tiles = image.info.get("transparency"), getattr(image, "tile", None)
    times, divisor = UNSCALED_KEYS.get(str(tiles[0][3]), (1, 1)) if tiles else (1, 1)  # for a PNG not loaded yet
    if isinstance(key, int):
        image.info["transparency"] = key * times // divisor
    elif isinstance(key, tuple):
        image.info["transparency"] = tuple(value * times // divisor for value in key)
    image.load()
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith(("I", "F")):
        return grey_to_rgb(image)
    if image.mode == "La":  # Pillow has no other conversion
        image = image.convert("LA")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        canvas = Image.new("RGB", rgba.size, WHITE)
        canvas.paste(rgba, mask=rgba.getchannel("A"))
        return canvas
    return image.convert("RGB")


def as_rgb(image: Any) -> Any:
    """Apply `to_rgb` as a transform's first step, but return tensors and arrays unchanged for OpenCLIP's transforms."""
    return to_rgb(image) if isinstance(image, Image.Image) else image


def grey_to_rgb(image: Image.Image) -> Image.Image:
    """Convert grey of 16 or 32 bits, or floats, to RGB; a transparent value becomes white.

    White is 1 or 255 for floats, 255 or 65535 for 32-bit integers: the smaller unless a value exceeds it. ValueError if
    no range contains the values; floats may exceed it by OVERSHOOT, and must not be nearly black on the 0 to 255 range.
    """
    values, key = np.asarray(image), image.info.get("transparency")
    low, high, floats = values.min(), values.max(), values.dtype.kind == "f"
    beyond = OVERSHOOT if floats else 0
    ranges = ((1, -np.inf), (255, 255 * OVERSHOOT)) if floats else ((255, 0), (65535, 0))
    fit = (white for white, least in ranges if least <= high <= white * (1 + beyond) and low >= -white * beyond)
    # Pillow before 10.3 opens 16-bit PNGs as 32-bit
    white = 65535 if image.mode.startswith("I;16") or image.format == "PNG" else next(fit, None)
    if white is None:
        kind, expected = ("floats", "0 to 1 or 0 to 255") if floats else ("32-bit integers", "0 to 255 or 0 to 65535")
        what = f"{kind} from {low:g} to {high:g} do not determine the value of white"
        raise ValueError(f"{what}: expected {expected}. Save the image with 8 or 16 bits")
    levels = np.rint(values * 255.0) if white == 1 else values // (256 if white == 65535 else 1)
    levels = np.clip(levels, 0, 255).astype(np.uint8)
    if isinstance(key, int):
        levels[values == key] = 255
    return Image.fromarray(levels).convert("RGB")


def open_image(source: ImageSource, public_only: bool = False) -> Image.Image:
    """Open an RGB image from a path, URL (http, s3, ...), a file's bytes, an open file, or a Pillow image of any mode.

    public_only: refuse http(s) addresses of private and local hosts; use it for URLs that come from data. OSError if it
    cannot be read, ValueError if it is not an image, damaged or too large.
    """
    name = redacted(os.fspath(source)) if isinstance(source, (str, os.PathLike)) else f"the {type(source).__name__}"
    try:
        if not isinstance(source, Image.Image):
            return decode_image(read_source(source, replace(PATIENCE, public_only=public_only)))
        name = f"the Pillow image of mode {source.mode} and size {source.size[0]} x {source.size[1]}"
        check_size(*source.size)
        try:
            return to_rgb(source)
        except Exception as error:  # only loading shows that a file is cut or closed
            raise SampleFault("bad image", str(error)) from error
    except SampleFault as fault:
        raise ValueError(f"{name}: {fault}. Give another image, or repair this one") from fault


def read_source(source: Any, policy: ReadPolicy) -> bytes:
    """Return the bytes of a file; errors as in `open_image`."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source)
    if hasattr(source, "read"):
        data = source.read()
        if isinstance(data, str):
            raise ValueError(f"{source!r} returns text. Open it with open(path, 'rb')")
        return data
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        given = "an empty path" if isinstance(source, (str, os.PathLike)) else f"a {type(source).__name__}"
        expected = "a path, a URL, bytes, an open file or a Pillow image (of an array: Image.fromarray(array))"
        raise ValueError(f"{given} is not an image: give {expected}")
    place = os.fspath(source)
    if isinstance(source, str) and not is_local(check_address(place)):
        try:
            with closing(open_stream(place, policy)) as stream:
                data = read_up_to(stream, MAX_BYTES + 1)
        except SampleFault as fault:
            problem = scrub(f"{place}: {fault.message}")
            raise OSError(f"{problem}. Check the URL and the network, or download the file") from None
        if len(data) > MAX_BYTES:
            raise ValueError(f"{redacted(place)} sends more than {MAX_BYTES:,} bytes, the limit of an image")
        return data
    path = local_path(place)
    try:
        return read_file(path, MAX_BYTES)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no image {path}: {explain_missing(path)}") from error
    except IsADirectoryError as error:
        raise IsADirectoryError(f"{path} is a folder. Give one of its images") from error
