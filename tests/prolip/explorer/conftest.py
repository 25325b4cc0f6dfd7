"""A gallery whose captions try to run scripts, on a page that a thread serves."""

from __future__ import annotations

import threading

import pytest
from explored import HOSTILE, make_app
from squares import COLOURS, picture
from webdataset import TarWriter

from prolip.explorer.server import make_server


@pytest.fixture(scope="session")
def shard(tmp_path_factory) -> str:
    """Twelve squares; the captions of the first three are hostile."""
    path = str(tmp_path_factory.mktemp("squares") / "squares.tar")
    with TarWriter(path, encoder=False) as writer:
        for row, colour in enumerate(COLOURS):
            captions = [*HOSTILE[row : row + 1], f"a {colour} square", colour]
            writer.write({"__key__": f"s{row:02}", "png": picture(colour), "txt": "\n".join(captions).encode()})
    return path


@pytest.fixture(scope="session")
def app(small_model, shard, tmp_path_factory):
    place = tmp_path_factory.mktemp("explored") / "index"
    return make_app([small_model, "--data", shard, "--output", str(place)])


@pytest.fixture(scope="session")
def server(app):
    """The page on a free port of this machine."""
    made = make_server(app, "127.0.0.1", 0)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()
