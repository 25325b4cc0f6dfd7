"""A small model and pictures for the tests of the command."""

from __future__ import annotations

import pytest
import torch
from squares import COLOURS, picture
from webdataset import TarWriter

import prolip
from prolip.models.checkpoint import save_pretrained
from prolip.search import index as built
from prolip.search.index import SearchIndex


@pytest.fixture(scope="session")
def small_model(tmp_path_factory) -> str:
    """`local-dir:` address of a random model whose traces differ."""
    torch.manual_seed(0)
    model = prolip.create_model("ProLIP-ViT-test", init_unc_bias=-4.0, init_unc_gain=1.0)
    return f"local-dir:{save_pretrained(model, tmp_path_factory.mktemp('searching_model'))}"


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
    """A folder of pictures in two folders, one file in it that is none."""
    folder = tmp_path_factory.mktemp("photos")
    for number, colour in enumerate(COLOURS):
        place = folder / ("warm" if number % 2 else "cold") / f"{colour}.png"
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(picture(colour))
    (folder / "notes.txt").write_text("no picture")
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
