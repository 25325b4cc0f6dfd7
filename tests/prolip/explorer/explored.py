"""What the explored gallery is made of: squares of one colour, and captions that would run scripts."""
from __future__ import annotations

import io

from PIL import Image

COLOURS = ("red", "green", "blue", "yellow", "black", "white", "purple", "orange", "brown", "pink", "gray", "cyan")
#: What a caption must not do.
HOSTILE = ("<script>window.ran = 1</script>", '<img src=x onerror="window.ran = 2">', '"><svg onload=window.ran=3>')


def picture(colour: str, kind: str = "PNG", size: int = 32) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (size, size), colour).save(data, kind)
    return data.getvalue()
