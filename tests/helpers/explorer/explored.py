"""What the explored gallery is made of: squares of one colour, and captions that would run scripts."""

from __future__ import annotations

import io

from PIL import Image

from prolip.cli import explore
from prolip.cli.command import parser_of
from prolip.explorer.app import App

COLOURS = ("red", "green", "blue", "yellow", "black", "white", "purple", "orange", "brown", "pink", "gray", "cyan")
#: What a caption must not do.
HOSTILE = ("<script>window.ran = 1</script>", '<img src=x onerror="window.ran = 2">', '"><svg onload=window.ran=3>')


def picture(colour: str, kind: str = "PNG", size: int = 32) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (size, size), colour).save(data, kind)
    return data.getvalue()


def make_app(words: list[str]) -> App:
    """What `prolip explore` with these words shows."""
    return explore.make_app(parser_of(explore.explore).parse_strictly(words))
