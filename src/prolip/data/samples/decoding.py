"""From the bytes of an image file to RGB pixels: JPEG by libjpeg-turbo without detours, everything else by Pillow.

Every part sees a file through this module and nothing else: what training lays on white must not be black in a test.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from prolip.data.faults import SampleFault

#: What Pillow may take a file for: fewer to try, and no format that runs another program.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
#: Larger images are refused before they are decoded: 13,000 x 13,000 pixels, about half a gigabyte of RGB.
MAX_PIXELS = 13_000**2
WHITE = (255, 255, 255)
#: Raised when a file gives other pixels than before: embeddings that are kept are then computed again.
VERSION = 2
#: PNGs whose samples Pillow brings to 8 bits, but not their transparent value: times, divided by.
UNSCALED_KEYS = {"L;2": (85, 1), "L;4": (17, 1), "RGB;16B": (1, 256)}
#: By which part of white a picture of floats may go beyond black and white, as resizing makes them do.
OVERSHOOT = 1 / 16
#: First bytes of a JPEG.
JPEG_START = b"\xff\xd8\xff"
#: Colour spaces of JPEGs that libjpeg-turbo turns into the same RGB as Pillow; CMYK ones are Pillow's to convert.
PLAIN_COLOURS = ("YCbCr", "RGB", "Gray")


def decode_pixels(data: bytes) -> np.ndarray:
    """The RGB pixels of a file, (H, W, 3) uint8: bit for bit those of `decode_image`, of JPEGs sooner.

    SampleFault as `decode_image`.
    """
    size = jpeg_size(data)
    pixels = decode_jpeg(data, *size) if size else None
    return np.array(decode_image(data)) if pixels is None else pixels


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """(height, width) of a JPEG that libjpeg-turbo may decode, None for what is left to Pillow to decode or to refuse.

    SampleFault "oversized image" above MAX_PIXELS.
    """
    if not data.startswith(JPEG_START):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    check_size(width, height)
    return (height, width) if colours in PLAIN_COLOURS else None


def decode_jpeg(data: bytes, height: int, width: int, factor: int = 1) -> np.ndarray | None:
    """The RGB pixels of a JPEG of that size, (ceil(height / factor), ceil(width / factor), 3) uint8.

    factor: 1, 2, 4 or 8; above 1 only the lower frequencies of each block are decoded, which is an area average in
    all but rounding and aliasing. None where the decoder has anything to complain about: Pillow, which forgives some
    damage and refuses a file that ends early, then has the last word.
    """
    smallest: dict[str, Any] = {}
    if factor > 1:
        smallest = {"min_height": -(-height // factor), "min_width": -(-width // factor), "min_factor": factor}
    try:
        return simplejpeg.decode_jpeg(data, "RGB", **smallest)
    except ValueError:
        return None


def decode_image(data: bytes, most: int | None = None, side: int | None = None) -> Image.Image:
    """An RGB image from the bytes of a file, as `to_rgb` has it.

    An animation gives its first frame, EXIF rotation is not applied (as in OpenCLIP). SampleFault "bad image" for
    broken or cut files, "oversized image" above `most` pixels (MAX_PIXELS). side: where a JPEG may be decoded coarser,
    the pixels that each side keeps at least.
    """
    try:
        with warnings.catch_warnings():  # of several threads one may leave it ignored, which harms nobody
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
        wanted = ", ".join(FORMATS)
        raise SampleFault("bad image", f"{len(data)} bytes{start}: cannot identify image, wanted {wanted}") from error
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
    """Any Pillow image as RGB; transparent pixels over white, because black would hide dark drawings.

    Palettes and colour spaces are converted by Pillow, of 16 bits per channel the upper 8 are taken. ValueError where
    it is not known what white is, see `white_of`; what Pillow raises where the file behind the image is broken or cut.
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
    if image.mode == "La":  # Pillow knows but one way from here
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
    """Grey of 16 or 32 bits, or of floats, as RGB; its transparent value, where it has one, is white."""
    values, key = np.asarray(image), image.info.get("transparency")
    # Pillow before 10.3 opens PNGs of 16 bits with 32
    white = 65535 if image.mode.startswith("I;16") or image.format == "PNG" else white_of(values)
    levels = np.rint(values * 255.0) if white == 1 else values // (256 if white == 65535 else 1)
    levels = np.clip(levels, 0, 255).astype(np.uint8)
    if isinstance(key, int):
        levels[values == key] = 255
    return Image.fromarray(levels).convert("RGB")


def white_of(values: np.ndarray) -> int:
    """What white is in grey that does not say it: of floats 1 or 255, of integers of 32 bits 255 or 65535.

    It is the smaller one unless a value is above it, which is the only hint there is. ValueError where no range fits;
    floats may leave theirs by OVERSHOOT, and are refused too where they would be all but black in 0 to 255.
    """
    low, high = values.min(), values.max()
    floats = values.dtype.kind == "f"
    beyond = OVERSHOOT if floats else 0
    for white, least in ((1, -np.inf), (255, 255 * OVERSHOOT)) if floats else ((255, 0), (65535, 0)):
        if least <= high <= white * (1 + beyond) and low >= -white * beyond:
            return white
    kind, wanted = ("floats", "0 to 1 or 0 to 255") if floats else ("integers of 32 bits", "0 to 255 or 0 to 65535")
    raise ValueError(
        f"{kind} from {low:g} to {high:g} do not say what is white: wanted {wanted}; save the picture with 8 or 16 bits"
    )
