"""Names from data in every view: control characters, line ends, characters that reorder, bytes that are no UTF-8."""

from __future__ import annotations

import http.client
import io
import json
import tarfile
import threading
from pathlib import Path

import pytest
from explored import COLOURS, make_app, picture
from PIL import Image

from prolip.explorer.server import make_server
from prolip.utils.console import STEERING_A_VALUE

NAMES = ["a\nb", "a\x1b[31mred", "a\u202eb", "\u2028", "\x85\x7f", "tab\t"]
NAMES += ["\rcr", " lead ", "<b>x", "caf\udce9", "x" * 250, "qu'o\"te"]


def shard_of(place: Path) -> str:
    """A shard of samples by these names, its own as odd as theirs."""
    place.mkdir()
    with tarfile.open(place / "s\n\x1b.tar", "w", encoding="utf-8", errors="surrogateescape") as archive:
        for name, colour in zip(NAMES, COLOURS):
            for suffix, data in (("png", picture(colour)), ("txt", f"{colour} \x1b[31m \u202e".encode())):
                member = tarfile.TarInfo(f"{name}.{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return f"shards:{place / 's'}\n\x1b.tar"


def strings(values) -> list[str]:
    """All of a JSON value."""
    if isinstance(values, dict):
        return [text for part in values.values() for text in strings(part)]
    return [text for part in values for text in strings(part)] if isinstance(values, list) else [values]


@pytest.fixture
def answers():
    """(an explorer) -> (method, path, values) -> an answer's body, JSON as values."""
    ended = []

    def run(app):
        made = make_server(app, "127.0.0.1", 0)
        threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
        connection = http.client.HTTPConnection(*made.server_address, timeout=60)
        ended.extend([connection.close, made.shutdown, made.server_close])

        def ask(path: str, values=None):
            body = None if values is None else json.dumps(values)
            connection.request("GET" if values is None else "POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            data = answer.read()
            assert answer.status == 200, data
            kind = answer.headers.get_content_type()
            return json.loads(data.decode("utf-8")) if kind == "application/json" else data

        return ask

    yield run
    for end in ended:
        end()


def test_odd_names_are_shown_escaped_in_every_view(small_model, tmp_path, answers):
    source = shard_of(tmp_path / "of")
    app = make_app([small_model, "--data", source, "--output", str(tmp_path / "index")])
    ask = answers(app)
    colours, found = set(), []
    for row in range(len(NAMES)):
        image = Image.open(io.BytesIO(ask(f"/thumbnail/item/{row}"))).convert("RGB")
        colours.add(image.getpixel((9, 9)))
        found += [ask(f"/api/{name}", {"row": row}) for name in ("search", "compare", "walk")]
    assert len(colours) == len(NAMES)
    found += [ask(f"/api/{name}") for name in ("about", "map", "uncertain", "columns")]
    found += [ask("/api/search", {"text": "a\udce9\x1b"}), ask("/api/rules", {"rules": ["x: image_uncertainty > -1"]})]
    said = [text for text in strings(found) if isinstance(text, str)]
    assert any(r"a\nb" in text for text in said) and any(r"a\x1b[31mred" in text for text in said)
    assert not [text for text in said if STEERING_A_VALUE.search(text)]
