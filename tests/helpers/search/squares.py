"""Pictures of one colour."""

from __future__ import annotations

import io

from PIL import Image

COLOURS = ("red", "green", "blue", "yellow", "black", "white", "purple", "orange", "brown", "pink", "gray", "cyan")


def picture(colour: str) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (32, 32), colour).save(data, "PNG")
    return data.getvalue()
