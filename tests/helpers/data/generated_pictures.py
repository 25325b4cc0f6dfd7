"""Pictures at random in the modes that Pillow has and the formats that it writes, with the RGB that they mean.

It is computed here from the numbers that were drawn, in NumPy; where a format changes them (JPEG, lossy WebP, the
palettes of GIF) or Pillow's conversion is what is wanted (CMYK), from what Pillow opens, its alpha laid on white.
"""

from __future__ import annotations

import io
from typing import NamedTuple

import numpy as np
from PIL import Image


class Picture(NamedTuple):
    """A Pillow image, how it is saved (format None: not at all), and its RGB, (H, W, 3); None: as Pillow opens it."""

    name: str
    image: Image.Image
    format: str | None
    options: dict
    rgb: np.ndarray | None = None

    @property
    def data(self) -> bytes:
        """The file."""
        buffer = io.BytesIO()
        self.image.save(buffer, self.format, **self.options)
        return buffer.getvalue()


def on_white(rgb, alpha):
    """Float composition, rounded."""
    share = np.asarray(alpha, np.float64)[..., None] / 255
    return np.floor(np.asarray(rgb) * share + 255 * (1 - share) + 0.5).astype(np.uint8)


def grey(levels):
    return np.repeat(np.asarray(levels, np.uint8)[..., None], 3, -1)


def meant(picture: Picture, data: bytes | None) -> np.ndarray:
    """The RGB of a picture: what was drawn, or Pillow's opening of the file."""
    if picture.rgb is not None:
        return picture.rgb
    image = picture.image if data is None else Image.open(io.BytesIO(data))
    if image.mode in ("RGBA", "LA") or "transparency" in image.info:
        rgba = np.asarray(image.convert("RGBA"))
        return on_white(rgba[..., :3], rgba[..., 3])
    return np.asarray(image.convert("RGB"))


# --- what is drawn: (rng, height, width) -> image, RGB and, where it has one, its transparency
def numbers(rng, *shape, top=256):
    return rng.integers(0, top, shape).astype(np.uint16 if top > 256 else np.uint8)


def veil(rng, h, w):
    """Alpha: clear, half clear and opaque pixels."""
    return rng.choice(np.array([0, 0, 255, *range(1, 255, 9)], np.uint8), (h, w))


def bilevel(rng, h, w):
    bits = rng.random((h, w)) < 0.5
    return Image.fromarray(bits), grey(bits * 255)


def plain_grey(rng, h, w):
    drawn = numbers(rng, h, w)
    return Image.fromarray(drawn), grey(drawn)


def grey_alpha(rng, h, w):
    drawn, alpha = numbers(rng, h, w), veil(rng, h, w)
    return Image.merge("LA", [Image.fromarray(drawn), Image.fromarray(alpha)]), on_white(grey(drawn), alpha)


def premultiplied(rng, h, w):
    """Colours are stored times their alpha, so light ones of little alpha are lost."""
    kept = grey_alpha(rng, h, w)[0].convert("La")
    rgba = np.asarray(kept.convert("LA").convert("RGBA"))
    return kept, on_white(rgba[..., :3], rgba[..., 3])


def plain_rgb(rng, h, w):
    drawn = numbers(rng, h, w, 3)
    return Image.fromarray(drawn), drawn


def rgb_alpha(rng, h, w):
    drawn, alpha = numbers(rng, h, w, 3), veil(rng, h, w)
    return Image.fromarray(np.dstack([drawn, alpha])), on_white(drawn, alpha)


def palette(kind):
    """Indices of up to 256 colours: opaque, with one that is clear, alphas in info, or in the palette itself."""

    def draw(rng, h, w):
        count = int(rng.integers(2, 257))
        drawn, table, alphas = rng.integers(0, count, (h, w)), numbers(rng, count, 3), veil(rng, 1, count)[0]
        image = Image.fromarray(drawn.astype(np.uint8))
        image.putpalette(table.tobytes(), "RGB")  # makes it P
        if kind == "opaque":
            return image, table[drawn]
        if kind == "key":
            key = int(drawn.flat[0])
            return image, on_white(table[drawn], np.where(drawn == key, 0, 255)), key
        if kind == "RGBA":  # as Pillow's quantize makes it
            image.putpalette(np.column_stack([table, alphas]).tobytes(), "RGBA")
            return image, on_white(table[drawn], alphas[drawn])
        return image, on_white(table[drawn], alphas[drawn]), alphas.tobytes()

    return draw


def keyed(top=256, channels=()):
    """One value is clear."""

    def draw(rng, h, w):
        drawn = numbers(rng, h, w, *channels, top=top)
        drawn[rng.random((h, w)) < 0.4] = drawn[0, 0]
        key = tuple(drawn[0, 0].tolist()) if channels else int(drawn[0, 0])
        clear = (drawn == key).all(-1) if channels else drawn == key
        rgb = drawn if channels else grey(drawn // (top // 256))
        return Image.fromarray(drawn), on_white(rgb, np.where(clear, 0, 255)), key

    return draw


def deep(kind):
    """Grey of 16 bits, the same in integers of 32 bits, or floats to 1."""

    def draw(rng, h, w):
        drawn = numbers(rng, h, w, top=256 if kind == np.float32 else 65536)
        if kind == np.float32:
            return Image.fromarray((drawn / 255).astype(kind)), grey(drawn)
        drawn[0, 0] = 256 + drawn[0, 0] // 2
        return Image.fromarray(drawn.astype(kind)), grey(drawn // 256)

    return draw


def floats_to_255(rng, h, w):
    drawn = (rng.random((h, w)) * 255).astype(np.float32)
    drawn[0, 0] = 200
    return Image.fromarray(drawn), grey(drawn.astype(np.uint8))


def cmyk(rng, h, w):
    image = Image.fromarray(numbers(rng, h, w, 3)).convert("CMYK")
    return image, np.asarray(image.convert("RGB"))


#: name: (what is drawn, the formats that keep its numbers, those that change them; - for none)
KINDS = {
    "1": (bilevel, "PNG BMP TIFF GIF", "JPEG WEBP"),
    "L": (plain_grey, "PNG BMP TIFF GIF", "JPEG WEBP"),
    "L key": (keyed(), "PNG", ""),
    "LA": (grey_alpha, "PNG TIFF", "WEBP GIF"),
    "La": (premultiplied, "-", ""),
    "P": (palette("opaque"), "PNG BMP TIFF GIF", "WEBP"),
    "P key": (palette("key"), "PNG GIF", "WEBP"),
    "P alphas": (palette("alphas"), "PNG", "WEBP"),
    "P of RGBA": (palette("RGBA"), "PNG -", "WEBP"),
    "RGB": (plain_rgb, "PNG BMP TIFF", "JPEG WEBP GIF"),
    "RGB key": (keyed(channels=(3,)), "PNG", ""),
    "RGBA": (rgb_alpha, "PNG TIFF -", "WEBP GIF"),
    "CMYK": (cmyk, "TIFF -", "JPEG WEBP"),
    "I;16": (deep(np.uint16), "PNG TIFF -", ""),
    "I;16 key": (keyed(65536), "PNG", ""),
    "I of 16 bits": (deep(np.int32), "TIFF -", ""),
    "F to 1": (deep(np.float32), "TIFF -", ""),
    "F to 255": (floats_to_255, "TIFF -", ""),
}
WAYS = [
    (name, kind, i < len(exact.split()))
    for name, (_, exact, changing) in KINDS.items()
    for i, kind in enumerate((exact + " " + changing).split())
]


def generate(number: int) -> Picture:
    """Picture `number`: every way of writing every mode comes in turn, all else is drawn."""
    rng = np.random.default_rng([number, 77])
    name, kind, exact = WAYS[number % len(WAYS)]
    height, width = rng.integers(5, 30, 2)
    image, rgb, *key = KINDS[name][0](rng, height, width)
    if kind == "-":
        return Picture(f"{number}: {name} in memory", image, None, {}, rgb)
    options = {"transparency": key[0]} if key else {}
    if kind == "WEBP":
        options |= {"lossless": bool(rng.random() < 0.5), "exact": True, "quality": int(rng.integers(30, 100))}
        exact = name in ("RGB", "RGBA") and options["lossless"]
    if kind == "JPEG":
        options |= {"quality": int(rng.integers(30, 100)), "progressive": bool(rng.random() < 0.3)}
    if kind == "TIFF" and rng.random() < 0.5:
        options |= {"compression": str(rng.choice(["tiff_lzw", "tiff_adobe_deflate"]))}
    if kind == "GIF" and exact and rng.random() < 0.4:
        options |= {"save_all": True, "append_images": [Image.new("RGB", image.size, "red")]}
    return Picture(f"{number}: {name} as {kind} {options}", image, kind, options, rgb if exact else None)


def generated(first: int, count: int) -> list[Picture]:
    return [generate(number) for number in range(first, first + count)]
