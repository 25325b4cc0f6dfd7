"""From the bytes of an image file to RGB pixels: JPEG by libjpeg-turbo without detours, everything else by Pillow."""
from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image

from prolip.data.faults import SampleFault

#: What Pillow may take a file for: fewer to try, and no format that runs another program.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
#: Larger images are refused before they are decoded: 13,000 x 13,000 pixels, about half a gigabyte of RGB.
MAX_PIXELS = 13_000**2
WHITE = (255, 255, 255)
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


def decode_image(data: bytes) -> Image.Image:
    """An RGB image from the bytes of a file, transparency laid on white, 16-bit grey scaled to 8 bits.

    Palette and grey images become RGB, CMYK is converted by Pillow, an animation gives its first frame, EXIF rotation
    is not applied (as in OpenCLIP). SampleFault "bad image" for broken or cut files, "oversized image" above
    MAX_PIXELS.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            check_size(*image.size)
            image.load()
            return to_rgb(image)
    except SampleFault:
        raise
    except Image.DecompressionBombError as error:
        raise SampleFault("oversized image", str(error)) from error
    except Exception as error:  # Pillow's plugins raise OSError, SyntaxError, ValueError, struct.error and more
        raise SampleFault("bad image", f"{len(data)} bytes: {error}") from error


def check_size(width: int, height: int) -> None:
    """SampleFault "oversized image" above MAX_PIXELS."""
    if width * height > MAX_PIXELS:
        raise SampleFault("oversized image", f"{width} x {height} pixels, at most {MAX_PIXELS} are decoded")


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow mode as RGB; transparent pixels over white, because black would hide dark drawings."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):
        levels = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255)
        return Image.fromarray(levels.astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        canvas = Image.new("RGB", rgba.size, WHITE)
        canvas.paste(rgba, mask=rgba.getchannel("A"))
        return canvas
    return image.convert("RGB")
