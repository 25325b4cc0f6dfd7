"""Names from data in every view: control characters, line ends, characters that reorder, bytes that are no UTF-8."""

from __future__ import annotations

import io
import os

from commits_curate import write_tar
from explored import make_app
from PIL import Image
from squares import COLOURS, picture

from prolip.utils.console import STEERING_A_VALUE

NAMES = ["a\nb", "a\x1b[31mred", "a\u202eb", "\u2028", "\x85\x7f", "tab\t"]
NAMES += ["\rcr", " lead ", "<b>x", "caf\udce9", "x" * 250, "qu'o\"te"]
ODD = "s\n\x1b.tar"  # the shard's own name


def strings(values) -> list[str]:
    """All texts of a JSON value."""
    if isinstance(values, dict):
        return strings(list(values.values()))
    return [text for part in values for text in strings(part)] if isinstance(values, list) else [str(values)]


def test_odd_names_are_shown_escaped_in_every_view(small_model, tmp_path):
    members = [
        (os.fsencode(f"{name}.{suffix}"), data)
        for name, colour in zip(NAMES, COLOURS)
        for suffix, data in (("png", picture(colour)), ("txt", f"{colour} \x1b[31m \u202e".encode()))
    ]
    source = f"shards:{write_tar(tmp_path / ODD, members)}"
    app = make_app([small_model, "--data", source, "--output", str(tmp_path / "index")])
    colours, found = set(), []
    for row in range(len(NAMES)):
        colours.add(Image.open(io.BytesIO(app.thumbnail("item", row))).convert("RGB").getpixel((9, 9)))
        found += [app.questions[name]({"row": row}) for name in ("search", "compare", "walk")]
    assert len(colours) == len(NAMES)
    found += [look() for look in app.looks.values()]
    found += [app.search({"text": "a\udce9\x1b"}), app.rules({"rules": ["x: image_uncertainty > -1"]})]
    said = strings(found)
    assert any(r"a\nb" in text for text in said) and any(r"a\x1b[31mred" in text for text in said)
    assert not [text for text in said if STEERING_A_VALUE.search(text)]
