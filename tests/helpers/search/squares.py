"""Images of one colour."""

from __future__ import annotations

import io

from PIL import Image

COLOURS = ("red", "green", "blue", "yellow", "black", "white", "purple", "orange", "brown", "pink", "gray", "cyan")


def picture(colour: str, kind: str = "PNG", size: int = 32) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (size, size), colour).save(data, kind)
    return data.getvalue()
