"""Images for the tests of the command."""

from __future__ import annotations

import pytest
from squares import COLOURS, picture
from webdataset import TarWriter

from prolip.search import index as built
from prolip.search.index import SearchIndex


@pytest.fixture
def small_appends(monkeypatch):
    """The command appends three rows at a time."""
    monkeypatch.setattr(built, "CHUNK", 3)


@pytest.fixture
def full_disk(monkeypatch, small_appends):
    """The third append fails. Calling the fixture makes room."""
    append, count = SearchIndex._append, []

    def broken(self, *args):
        count.append(1)
        if len(count) == 3:
            raise OSError("no space left on device")
        append(self, *args)

    monkeypatch.setattr(SearchIndex, "_append", broken)
    return lambda: monkeypatch.setattr(SearchIndex, "_append", append)


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """Write images in two folders, and one file that is not an image."""
    folder = tmp_path_factory.mktemp("photos")
    for number, colour in enumerate(COLOURS):
        place = folder / ("warm" if number % 2 else "cold") / f"{colour}.png"
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(picture(colour))
    (folder / "notes.txt").write_text("no image")
    return folder


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """Two shards with captions, of the same keys."""
    folder = tmp_path_factory.mktemp("shards")
    for number in range(2):
        with TarWriter(str(folder / f"{number}.tar"), encoder=False) as writer:
            for row, colour in enumerate(COLOURS[6 * number : 6 * number + 6]):
                captions = f"a {colour} square\n{colour}"
                writer.write({"__key__": f"s{row}", "png": picture(colour), "txt": captions.encode()})
    return folder
