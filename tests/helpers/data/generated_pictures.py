"""Pictures at random in every mode that Pillow has and every format that it writes, with the RGB that they mean.

What they mean is computed here from the numbers that were drawn, in NumPy; where a format changes them (JPEG, lossy
WebP, the palettes of GIF) or Pillow's own conversion is what is wanted (CMYK, LAB, ...), from what Pillow opens, its
alpha laid on white in NumPy.
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
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = np.asarray(image.convert("RGBA"))
        return on_white(rgba[..., :3], rgba[..., 3])
    return np.asarray(image.convert("RGB"))


# --- what is drawn
def levels(rng, h, w, top=256):
    return rng.integers(0, top, (h, w)).astype(np.uint16 if top > 256 else np.uint8)


def colours(rng, h, w):
    return rng.integers(0, 256, (h, w, 3), dtype=np.uint8)


def veil(rng, h, w):
    """Alpha: clear, half clear and opaque pixels."""
    return rng.choice(np.array([0, 0, 255, *range(1, 255, 9)], np.uint8), (h, w))


def bilevel(rng, h, w):
    bits = rng.random((h, w)) < 0.5
    return Image.fromarray(bits), grey(bits * 255)


def plain_grey(rng, h, w):
    drawn = levels(rng, h, w)
    return Image.fromarray(drawn), grey(drawn)


def grey_alpha(rng, h, w):
    drawn, alpha = levels(rng, h, w), veil(rng, h, w)
    return Image.merge("LA", [Image.fromarray(drawn), Image.fromarray(alpha)]), on_white(grey(drawn), alpha)


def plain_rgb(rng, h, w):
    drawn = colours(rng, h, w)
    return Image.fromarray(drawn), drawn


def rgb_alpha(rng, h, w):
    drawn, alpha = colours(rng, h, w), veil(rng, h, w)
    return Image.fromarray(np.dstack([drawn, alpha])), on_white(drawn, alpha)


def indices(rng, h, w):
    """A palette image of up to 256 colours, its rows and its palette."""
    count = int(rng.integers(2, 257))
    drawn, table = rng.integers(0, count, (h, w)).astype(np.uint8), colours(rng, 1, count)[0]
    image = Image.fromarray(drawn)
    image.putpalette(table.tobytes(), "RGB")  # makes it P
    return image, drawn, table


def palette(rng, h, w):
    image, drawn, table = indices(rng, h, w)
    return image, table[drawn]


def palette_one_clear(rng, h, w):
    image, drawn, table = indices(rng, h, w)
    key = int(drawn.flat[0])
    return image, on_white(table[drawn], np.where(drawn == key, 0, 255)), {"transparency": key}


def palette_alphas(rng, h, w):
    image, drawn, table = indices(rng, h, w)
    alphas = veil(rng, 1, len(table))[0]
    return image, on_white(table[drawn], alphas[drawn]), {"transparency": alphas.tobytes()}


def rgba_palette(rng, h, w):
    """A palette with alphas of its own, which Pillow's quantize makes, and no entry in info."""
    image, drawn, table = indices(rng, h, w)
    alphas = veil(rng, 1, len(table))[0]
    image.putpalette(np.column_stack([table, alphas]).tobytes(), "RGBA")
    return image, on_white(table[drawn], alphas[drawn])


def palette_alpha_band(rng, h, w):
    image, drawn, table = indices(rng, h, w)
    alpha = veil(rng, h, w)
    image = image.convert("PA")
    image.putalpha(Image.fromarray(alpha))
    return image, on_white(table[drawn], alpha)


def rgb_key(rng, h, w):
    drawn = colours(rng, h, w)
    drawn[rng.random((h, w)) < 0.4] = key = tuple(drawn[0, 0].tolist())
    clear = (drawn == key).all(-1)
    return Image.fromarray(drawn), on_white(drawn, np.where(clear, 0, 255)), {"transparency": key}


def grey_key(rng, h, w):
    drawn = levels(rng, h, w)
    drawn[rng.random((h, w)) < 0.4] = key = int(drawn[0, 0])
    return Image.fromarray(drawn), grey(np.where(drawn == key, 255, drawn)), {"transparency": key}


def bilevel_key(rng, h, w):
    image, rgb = bilevel(rng, h, w)
    key = int(rng.integers(2)) * 255
    return image, np.full_like(rgb, 255) if key == 0 else np.full_like(rgb, 255) * (rgb == 255), {"transparency": key}


def deep(rng, h, w):
    drawn = levels(rng, h, w, 65536)
    return Image.fromarray(drawn), grey(drawn // 256)


def deep_key(rng, h, w):
    drawn = levels(rng, h, w, 65536)
    drawn[rng.random((h, w)) < 0.4] = key = int(drawn[0, 0])
    return Image.fromarray(drawn), grey(np.where(drawn == key, 255, drawn // 256)), {"transparency": key}


def integers_of_16_bits(rng, h, w):
    drawn = levels(rng, h, w, 65536).astype(np.int32)
    drawn[0, 0] = 256 + drawn[0, 0] // 2
    return Image.fromarray(drawn), grey(drawn // 256)


def integers_of_8_bits(rng, h, w):
    drawn = levels(rng, h, w)
    return Image.fromarray(drawn.astype(np.int32)), grey(drawn)


def floats_to_1(rng, h, w):
    drawn = levels(rng, h, w)
    return Image.fromarray((drawn / 255).astype(np.float32)), grey(drawn)


def floats_to_255(rng, h, w):
    drawn = (rng.random((h, w)) * 255).astype(np.float32)
    drawn[0, 0] = 200
    return Image.fromarray(drawn), grey(drawn.astype(np.uint8))


def converted(mode):
    """As Pillow converts it: other colour spaces, of which RGB is not known otherwise."""

    def make(rng, h, w):
        image = Image.fromarray(colours(rng, h, w)).convert(mode)
        return image, np.asarray(image.convert("RGB"))

    return make


def premultiplied(mode):
    """La and RGBa: colours are stored times their alpha, so light ones of little alpha are lost."""

    def make(rng, h, w):
        image, _ = (grey_alpha if mode == "La" else rgb_alpha)(rng, h, w)
        kept = image.convert(mode)
        rgba = np.asarray((kept.convert("LA") if mode == "La" else kept).convert("RGBA"))
        return kept, on_white(rgba[..., :3], rgba[..., 3])

    return make


#: name: (what is drawn, the formats that keep its numbers, those that change them)
KINDS = {
    "1": (bilevel, "PNG BMP TIFF GIF", "JPEG WEBP"),
    "1 key": (bilevel_key, "PNG", ""),
    "L": (plain_grey, "PNG BMP TIFF GIF", "JPEG WEBP"),
    "L key": (grey_key, "PNG", ""),
    "LA": (grey_alpha, "PNG TIFF", "WEBP GIF"),
    "La": (premultiplied("La"), "-", ""),
    "P": (palette, "PNG BMP TIFF GIF", "WEBP"),
    "P key": (palette_one_clear, "PNG GIF", "WEBP"),
    "P alphas": (palette_alphas, "PNG", "WEBP"),
    "P of RGBA": (rgba_palette, "PNG -", "WEBP"),
    "PA": (palette_alpha_band, "TIFF -", "WEBP"),
    "RGB": (plain_rgb, "PNG BMP TIFF", "JPEG WEBP GIF"),
    "RGB key": (rgb_key, "PNG", ""),
    "RGBA": (rgb_alpha, "PNG TIFF -", "WEBP GIF"),
    "RGBa": (premultiplied("RGBa"), "-", "WEBP"),
    "CMYK": (converted("CMYK"), "TIFF -", "JPEG WEBP"),
    "HSV": (converted("HSV"), "-", "WEBP"),
    "I;16": (deep, "PNG TIFF -", ""),
    "I;16 key": (deep_key, "PNG", ""),
    "I of 16 bits": (integers_of_16_bits, "TIFF -", ""),
    "I of 8 bits": (integers_of_8_bits, "TIFF -", ""),
    "F to 1": (floats_to_1, "TIFF -", ""),
    "F to 255": (floats_to_255, "TIFF -", ""),
}
WAYS = [
    (name, kind, i < len(exact.split()))
    for name, (_, exact, changing) in KINDS.items()
    for i, kind in enumerate((exact + " " + changing).split())
]


def saving(rng, kind, name):
    """Options of a format, some at random."""
    if kind == "WEBP":
        return {"lossless": bool(rng.random() < 0.5), "exact": True, "quality": int(rng.integers(30, 100))}
    if kind == "JPEG":
        return {"quality": int(rng.integers(30, 100)), "progressive": bool(rng.random() < 0.3)}
    if kind == "TIFF" and name not in ("YCbCr", "LAB", "PA") and rng.random() < 0.5:
        return {"compression": str(rng.choice(["tiff_lzw", "tiff_adobe_deflate"]))}
    if kind == "PNG":
        return {"optimize": bool(rng.random() < 0.3)}
    return {}


def generate(number: int) -> Picture:
    """Picture `number`: every way of writing every mode comes in turn, all else is drawn."""
    rng = np.random.default_rng([number, 77])
    name, kind, exact = WAYS[number % len(WAYS)]
    height, width = rng.integers(5, 30, 2)
    image, rgb, *extra = KINDS[name][0](rng, height, width)
    options = saving(rng, kind, name) | (extra[0] if extra else {})
    if kind == "-":
        return Picture(f"{number}: {name} in memory", image, None, {}, rgb)
    if kind == "GIF" and exact and rng.random() < 0.4:
        options |= {"save_all": True, "append_images": [Image.new("RGB", image.size, "red")]}
    if kind == "WEBP" and name in ("RGB", "RGBA") and options["lossless"]:
        exact = True
    return Picture(f"{number}: {name} as {kind} {options}", image, kind, options, rgb if exact else None)


def generated(first: int, count: int) -> list[Picture]:
    return [generate(number) for number in range(first, first + count)]
