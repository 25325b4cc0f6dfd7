"""Random images in Pillow's modes and formats, with their RGB.

NumPy computes the RGB from the drawn numbers. If a format changes them (JPEG, lossy WebP, the palettes of GIF), or
Pillow's conversion is expected (CMYK), it comes from Pillow's image, with its alpha on white.
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
    """Return the RGB of an image: the drawn numbers, or Pillow's reading of the file."""
    if picture.rgb is not None:
        return picture.rgb
    image = picture.image if data is None else Image.open(io.BytesIO(data))
    if image.mode in ("RGBA", "LA") or "transparency" in image.info:
        rgba = np.asarray(image.convert("RGBA"))
        return on_white(rgba[..., :3], rgba[..., 3])
    return np.asarray(image.convert("RGB"))


def drawn(rng, h, w) -> dict[str, tuple]:
    """Return for each mode the formats that keep its numbers and those that change them (- for none), an image, its
    RGB, and the transparency of its file, if any.
    """
    bits, hole = rng.random((h, w)) < 0.5, rng.random((h, w)) < 0.4
    levels, rgb = rng.integers(0, 256, (h, w), dtype=np.uint8), rng.integers(0, 256, (h, w, 3), dtype=np.uint8)
    deep, floats = rng.integers(0, 65536, (h, w), dtype=np.uint16), (rng.random((h, w)) * 255).astype(np.float32)
    deep[0, 0], floats[0, 0] = 256 + deep[0, 0] // 2, 200
    veils = np.array([0, 0, 255, *range(1, 255, 9)], np.uint8)  # clear, half clear and opaque
    alpha, count = rng.choice(veils, (h, w)), int(rng.integers(2, 257))
    index, table = rng.integers(0, count, (h, w)), rng.integers(0, 256, (count, 3), dtype=np.uint8)
    alphas = rng.choice(veils, count)

    def paletted(values, mode):
        image = Image.fromarray(index.astype(np.uint8))
        image.putpalette(np.ascontiguousarray(values).tobytes(), mode)  # makes it P
        return image

    def clear(values, rgb, key):
        """One value is clear."""
        found = values == key
        return on_white(rgb, np.where(found.all(-1) if found.ndim == 3 else found, 0, 255))

    holed, holed_rgb, holed_deep = (
        np.where(m, v[:1, :1], v) for v, m in ((levels, hole), (rgb, hole[..., None]), (deep, hole))
    )
    key, key_rgb, key_deep, key_index = int(holed[0, 0]), tuple(rgb[0, 0].tolist()), int(deep[0, 0]), int(index[0, 0])
    grey_alpha = Image.merge("LA", [Image.fromarray(levels), Image.fromarray(alpha)])
    premultiplied, cmyk = grey_alpha.convert("La"), Image.fromarray(rgb).convert("CMYK")
    kept = np.asarray(premultiplied.convert("LA").convert("RGBA"))  # light colours of little alpha are lost
    palette, many = paletted(table, "RGB"), paletted(np.column_stack([table, alphas]), "RGBA")
    clear_deep = clear(holed_deep, grey(holed_deep // 256), key_deep)
    return {
        "1": ("PNG BMP TIFF GIF", "JPEG WEBP", Image.fromarray(bits), grey(bits * 255)),
        "L": ("PNG BMP TIFF GIF", "JPEG WEBP", Image.fromarray(levels), grey(levels)),
        "L key": ("PNG", "", Image.fromarray(holed), clear(holed, grey(holed), key), key),
        "LA": ("PNG TIFF", "WEBP GIF", grey_alpha, on_white(grey(levels), alpha)),
        "La": ("-", "", premultiplied, on_white(kept[..., :3], kept[..., 3])),
        "P": ("PNG BMP TIFF GIF", "WEBP", palette, table[index]),
        "P key": ("PNG GIF", "WEBP", palette, clear(index, table[index], key_index), key_index),
        "P alphas": ("PNG", "WEBP", palette, on_white(table[index], alphas[index]), alphas.tobytes()),
        "P of RGBA": ("PNG -", "WEBP", many, on_white(table[index], alphas[index])),
        "RGB": ("PNG BMP TIFF", "JPEG WEBP GIF", Image.fromarray(rgb), rgb),
        "RGB key": ("PNG", "", Image.fromarray(holed_rgb), clear(holed_rgb, holed_rgb, key_rgb), key_rgb),
        "RGBA": ("PNG TIFF -", "WEBP GIF", Image.fromarray(np.dstack([rgb, alpha])), on_white(rgb, alpha)),
        "CMYK": ("TIFF -", "JPEG WEBP", cmyk, np.asarray(cmyk.convert("RGB"))),
        "I;16": ("PNG TIFF -", "", Image.fromarray(deep), grey(deep // 256)),
        "I;16 key": ("PNG", "", Image.fromarray(holed_deep), clear_deep, key_deep),
        "I of 16 bits": ("TIFF -", "", Image.fromarray(deep.astype(np.int32)), grey(deep // 256)),
        "F to 1": ("TIFF -", "", Image.fromarray((levels / 255).astype(np.float32)), grey(levels)),
        "F to 255": ("TIFF -", "", Image.fromarray(floats), grey(floats.astype(np.uint8))),
    }


def generated() -> list[Picture]:
    """Every way of writing every mode; all else is drawn."""
    modes = drawn(np.random.default_rng(0), 5, 5).items()
    ways = [
        (name, kind, i < len(exact.split()))
        for name, (exact, changing, *_) in modes
        for i, kind in enumerate((exact + " " + changing).split())
    ]
    return [generate(number, *way) for number, way in enumerate(ways)]


def generate(number: int, name: str, kind: str, exact: bool) -> Picture:
    rng = np.random.default_rng([number, 77])
    height, width = rng.integers(5, 30, 2)
    _, _, image, rgb, *key = drawn(rng, height, width)[name]
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
