"""From the bytes of an image file to RGB pixels, everywhere the same: JPEG by libjpeg-turbo, others by Pillow."""

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
#: Formats that Pillow may try, none of which runs another program.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
#: Larger images are refused before they are decoded: half a gigabyte of RGB; and the bytes of the largest file.
MAX_PIXELS = 13_000**2
MAX_BYTES = 8 * MAX_PIXELS + 2**20
WHITE = (255, 255, 255)
VERSION = 2  # raised when a file gives other pixels than before: stored embeddings are then computed again
#: PNG modes whose samples Pillow scales to 8 bits without their transparent value -> (times, divided by).
UNSCALED_KEYS = {"L;2": (85, 1), "L;4": (17, 1), "RGB;16B": (1, 256)}
OVERSHOOT = 1 / 16  # share of white by which floats may go beyond black and white, as after resizing
#: For a waiting person: an unknown name, or a host that refuses, is reported within a second or two.
PATIENCE = ReadPolicy(connect_timeout=3, read_timeout=5, least_rate=2**13, retries=1, backoff=0.5, backoff_limit=1)


def decode_pixels(data: bytes) -> np.ndarray:
    """The RGB pixels of a file, (H, W, 3) uint8: bit for bit and with the faults of `decode_image`, of JPEGs sooner."""
    size = jpeg_size(data)
    pixels = decode_jpeg(data, *size) if size else None
    return np.array(decode_image(data)) if pixels is None else pixels


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """(height, width) of a JPEG that libjpeg-turbo may decode, None for Pillow's; SampleFault "oversized image"."""
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    check_size(width, height)
    return (height, width) if colours in ("YCbCr", "RGB", "Gray") else None  # Pillow's RGB of CMYK is another one


def decode_jpeg(data: bytes, height: int, width: int, factor: int = 1) -> np.ndarray | None:
    """The RGB pixels of a JPEG of that size, each side divided by 1, 2, 4 or 8 and rounded up, (H, W, 3) uint8.

    None where the decoder complains: Pillow then decides, which forgives some damage.
    """
    smallest: dict[str, Any] = {}
    if factor > 1:
        smallest = {"min_height": -(-height // factor), "min_width": -(-width // factor), "min_factor": factor}
    try:
        return simplejpeg.decode_jpeg(data, "RGB", **smallest)
    except ValueError:
        return None


def decode_image(data: bytes, most: int | None = None, side: int | None = None) -> Image.Image:
    """An RGB image from the bytes of a file, by `to_rgb`; SampleFault "bad image", "oversized image".

    An animation gives its first frame, EXIF rotation is not applied (as in OpenCLIP). most: pixels (MAX_PIXELS). side:
    a JPEG may be decoded coarser, with no fewer pixels a side.
    """
    try:
        with warnings.catch_warnings():  # a thread may leave it ignored, which does no harm
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
        what = f"{len(data)} bytes{start}: cannot identify image, wanted {', '.join(FORMATS)}"
        raise SampleFault("bad image", what) from error
    except Exception as error:  # Pillow's plugins raise OSError, SyntaxError, ValueError, struct.error and more
        raise SampleFault("bad image", f"{len(data)} bytes: {error}") from error


def check_size(width: int, height: int, most: int | None = None) -> None:
    """SampleFault "oversized image" above `most` pixels (MAX_PIXELS), "bad image" without a pixel."""
    if not width * height:
        raise SampleFault("bad image", f"{width} x {height} pixels")
    most = MAX_PIXELS if most is None else most
    if width * height > most:
        raise SampleFault("oversized image", f"{width} x {height} pixels, at most {most} are decoded")


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow image as RGB, of 16 bits the upper 8; transparent pixels over white, as black would hide drawings.

    ValueError where white is unknown, and Pillow's errors for a damaged file.
    """
    key, tiles = image.info.get("transparency"), getattr(image, "tile", None)
    times, divisor = UNSCALED_KEYS.get(str(tiles[0][3]), (1, 1)) if tiles else (1, 1)  # of a PNG not loaded yet
    if isinstance(key, int):
        image.info["transparency"] = key * times // divisor
    elif isinstance(key, tuple):
        image.info["transparency"] = tuple(value * times // divisor for value in key)
    image.load()
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith(("I", "F")):
        return grey_to_rgb(image)
    if image.mode == "La":  # Pillow has only this conversion
        image = image.convert("LA")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        canvas = Image.new("RGB", rgba.size, WHITE)
        canvas.paste(rgba, mask=rgba.getchannel("A"))
        return canvas
    return image.convert("RGB")


def as_rgb(image: Any) -> Any:
    """`to_rgb` as a transform's first step: tensors and arrays, which OpenCLIP's transforms take too, stay."""
    return to_rgb(image) if isinstance(image, Image.Image) else image


def grey_to_rgb(image: Image.Image) -> Image.Image:
    """Grey of 16 or 32 bits, or of floats, as RGB; its transparent value, where it has one, is white.

    White is 1 or 255 in floats, 255 or 65535 in integers of 32 bits: the smaller one unless a value is above it.
    ValueError where no range fits; floats may leave theirs by OVERSHOOT, and must not be all but black in 0 to 255.
    """
    values, key = np.asarray(image), image.info.get("transparency")
    low, high, floats = values.min(), values.max(), values.dtype.kind == "f"
    beyond = OVERSHOOT if floats else 0
    ranges = ((1, -np.inf), (255, 255 * OVERSHOOT)) if floats else ((255, 0), (65535, 0))
    fit = (white for white, least in ranges if least <= high <= white * (1 + beyond) and low >= -white * beyond)
    # Pillow before 10.3 opens PNGs of 16 bits with 32
    white = 65535 if image.mode.startswith("I;16") or image.format == "PNG" else next(fit, None)
    if white is None:
        kind, wanted = ("floats", "0 to 1 or 0 to 255") if floats else ("integers of 32 bits", "0 to 255 or 0 to 65535")
        what = f"{kind} from {low:g} to {high:g} do not say what is white"
        raise ValueError(f"{what}: wanted {wanted}; save the picture with 8 or 16 bits")
    levels = np.rint(values * 255.0) if white == 1 else values // (256 if white == 65535 else 1)
    levels = np.clip(levels, 0, 255).astype(np.uint8)
    if isinstance(key, int):
        levels[values == key] = 255
    return Image.fromarray(levels).convert("RGB")


def open_image(source: ImageSource, public_only: bool = False) -> Image.Image:
    """An RGB image of a path, a URL (http, s3, ...), a file's bytes, an open file, or a Pillow image of any mode.

    public_only: refuse http(s) addresses of private and local hosts, as is wise for URLs that come from data. OSError
    where nothing can be read, ValueError for anything but an image, and for a damaged or too large one.
    """
    name = redacted(os.fspath(source)) if isinstance(source, (str, os.PathLike)) else f"the {type(source).__name__}"
    try:
        if not isinstance(source, Image.Image):
            return decode_image(read_source(source, replace(PATIENCE, public_only=public_only)))
        name = f"the Pillow image of mode {source.mode} and size {source.size[0]} x {source.size[1]}"
        check_size(*source.size)
        try:
            return to_rgb(source)
        except Exception as error:  # a file that is cut, or closed, is seen only now
            raise SampleFault("bad image", str(error)) from error
    except SampleFault as fault:
        raise ValueError(f"{name}: {fault}. Give another picture, or repair this one") from fault


def read_source(source: Any, policy: ReadPolicy) -> bytes:
    """The bytes of a file; errors as `open_image`."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source)
    if hasattr(source, "read"):
        data = source.read()
        if isinstance(data, str):
            raise ValueError(f"{source!r} gives text: open it with open(path, 'rb')")
        return data
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        given = "an empty path" if isinstance(source, (str, os.PathLike)) else f"a {type(source).__name__}"
        wanted = "a path, a URL, bytes, an open file or a Pillow image (of an array of levels: Image.fromarray(array))"
        raise ValueError(f"{given} is no picture: give {wanted}")
    place = os.fspath(source)
    if isinstance(source, str) and not is_local(check_address(place)):
        try:
            with closing(open_stream(place, policy)) as stream:
                data = read_up_to(stream, MAX_BYTES + 1)
        except SampleFault as fault:
            problem = scrub(f"{place}: {fault.message}")
            raise OSError(f"{problem}. Look at the URL and the network, or fetch the file") from None
        if len(data) > MAX_BYTES:
            raise ValueError(f"{redacted(place)} sends more than {MAX_BYTES:,} bytes: it is no picture")
        return data
    path = local_path(place)
    try:
        return read_file(path, MAX_BYTES)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no picture {path}: {explain_missing(path)}") from error
    except IsADirectoryError as error:
        raise IsADirectoryError(f"{path} is a folder: give one of its pictures") from error
