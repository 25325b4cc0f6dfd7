"""`prolip.open_image`: where pictures may lie, what is said of what cannot be used, grey without a known range."""

from __future__ import annotations

import io
import os
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from faulty_servers import FaultyServer, closing_port
from PIL import Image

import prolip
from prolip.data import images as decoding

RGBA = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 9, 4), dtype=np.uint8))


def saved(image=RGBA, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def wanted():
    canvas = Image.new("RGB", RGBA.size, "white")
    canvas.paste(RGBA, mask=RGBA.getchannel("A"))
    return np.asarray(canvas)


def test_a_picture_behind_a_url_is_read_though_its_connection_breaks(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    large = Image.effect_noise((300, 300), 90)
    with FaultyServer({"a.png": saved(), "large.png": saved(large)}) as server:
        assert np.array_equal(prolip.open_image(server.url("ok", "a.png")), wanted())
        assert np.array_equal(prolip.open_image(server.url("cut-once", "large.png")), large.convert("RGB"))
        with pytest.raises(OSError, match=r"/missing/a\.png: .*404.*Look at the URL"):
            prolip.open_image(server.url("missing", "a.png"))


def test_a_file_whose_name_looks_like_a_command_is_read_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipe:touch x").write_bytes(saved())
    for path in ("./pipe:touch x", Path("pipe:touch x"), str(tmp_path / "pipe:touch x")):
        assert np.array_equal(prolip.open_image(path), wanted())


def test_one_picture_is_not_waited_for_as_shards_are():
    started = time.monotonic()
    for url in (f"http://127.0.0.1:{closing_port()}/a.png", "http://no.invalid/a.png"):
        with pytest.raises(OSError, match="/a.png: .*Look at the URL and the network"):
            prolip.open_image(url)
    assert time.monotonic() - started < 8


def test_missing_files_and_folders_are_named_with_what_is_there(tmp_path):
    (tmp_path / "picture.png").write_bytes(saved())
    with pytest.raises(FileNotFoundError, match=r"no picture .*pictur\.png: Did you mean picture\.png in"):
        prolip.open_image(tmp_path / "pictur.png")
    with pytest.raises(IsADirectoryError, match="is a folder: give one of its pictures"):
        prolip.open_image(tmp_path)


@pytest.mark.parametrize(
    "source, message",
    [
        (np.zeros((4, 4, 3), np.uint8), r"a ndarray is no picture: give a path.*Image.fromarray\(array\)"),
        (None, "a NoneType is no picture: give a path"),
        (io.StringIO("x"), r"gives text: open it with open\(path, 'rb'\)"),
        (b"", "the bytes: bad image: 0 bytes: cannot identify image, wanted JPEG, PNG"),
        (b"<html>no</html>", "bad image: 15 bytes that begin with b'<html>no</html>': cannot identify image"),
        (
            saved(Image.effect_noise((40, 40), 60))[:-300],
            "the bytes: bad image: .*Give another picture, or repair this",
        ),
        (Image.new("RGB", (0, 5)), "the Pillow image of mode RGB and size 0 x 5: bad image: 0 x 5 pixels"),
        (
            saved(Image.fromarray(np.full((3, 3), 5.0, np.float32)), "TIFF"),
            "floats from 5 to 5 do not say what is white",
        ),
        (
            Image.fromarray(np.full((3, 3), np.nan, np.float32)),
            "mode F and size 3 x 3: .*nan .*wanted 0 to 1 or 0 to 255",
        ),
        (Image.fromarray(np.full((3, 3), -0.5, np.float32)), "floats from -0.5"),
        (Image.fromarray(np.full((3, 3), 70_000, np.int32)), "integers of 32 bits from 70000 to 70000 do not say"),
        (
            Image.fromarray(np.array([[-1, 5]], np.int32)),
            "integers of 32 bits from -1 to 5 .*save the picture with 8 or",
        ),
    ],
)
def test_what_is_no_picture_is_refused_in_one_line(source, message):
    with pytest.raises(ValueError, match=message) as refusal:
        prolip.open_image(source)
    assert "\n" not in str(refusal.value)


def test_a_pillow_image_of_a_file_that_is_cut_or_too_large_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_bytes(saved(Image.effect_noise((40, 40), 60))[:-300])
    with pytest.raises(ValueError, match=r"mode L and size 40 x 40: bad image: .*truncated"):
        prolip.open_image(Image.open(path))
    monkeypatch.setattr(decoding, "MAX_PIXELS", 40 * 40 - 1)
    for source in (path, Image.open(path)):
        with pytest.raises(ValueError, match="oversized image: 40 x 40 pixels, at most 1599"):
            prolip.open_image(source)


def test_floats_may_overshoot_a_little_as_after_resizing():
    for white in (1, 255):
        values = np.array([[-0.05, 0.5, 1.05]], np.float32) * white
        rgb = np.asarray(prolip.open_image(Image.fromarray(values)))[0, :, 0]
        assert rgb.tolist() == [0, 128 if white == 1 else 127, 255]


# --- PNGs that Pillow reads and does not write
def png_of(depth, colour, rows, key):
    """A PNG of two rows with a transparent value."""
    width = len(rows[0]) * 8 // depth // (3 if colour == 2 else 1)
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, len(rows), depth, colour, 0, 0, 0)),
        (b"tRNS", key),
        (b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows))),
        (b"IEND", b""),
    ]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    "data, levels",
    [
        (png_of(2, 0, [bytes([0b00011011])], b"\0\1"), [0, 255, 170, 255]),
        (png_of(4, 0, [bytes([0x12])], b"\0\1"), [255, 34]),
        (png_of(8, 0, [bytes([7, 8])], b"\0\7"), [255, 8]),
        (png_of(16, 0, [b"\x56\x78\x12\x34"], b"\x56\x78"), [255, 0x12]),
        (png_of(16, 2, [b"\x56\x78\x56\x78\x56\x78" + b"\x12\x34\x12\x34\x12\x34"], b"\x56\x78" * 3), [255, 0x12]),
        (png_of(16, 2, [b"\x56\x78\x56\x78\x56\x78" + b"\x12\x34\x12\x34\x12\x34"], b"\0\1" * 3), [0x56, 0x12]),
    ],
)
def test_the_transparent_value_of_a_png_is_found_at_every_depth(data, levels):
    for source in (data, Image.open(io.BytesIO(data))):
        assert np.asarray(prolip.open_image(source))[0, :, 0].tolist() == levels


def test_a_png_of_16_bits_that_is_dark_stays_dark_with_an_older_pillow():
    image = Image.fromarray(np.array([[0, 200, 255]], np.int32))
    image.format = "PNG"  # before Pillow 10.3 it had mode I
    assert np.asarray(prolip.open_image(image)).max() == 0


@pytest.mark.parametrize(
    "place, reported",
    [("/dev/zero", "is a pipe or a device"), ("pipe", "is a pipe or a device"), ("", "an empty path is no picture")],
)
def test_what_has_no_end_is_no_picture(place, reported, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(ValueError, match=reported):
        prolip.open_image(place)


def test_larger_files_than_pictures_are_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(decoding, "MAX_BYTES", 50)
    (tmp_path / "a.png").write_bytes(saved())
    with FaultyServer({"a.png": saved()}) as server:
        for place in (tmp_path / "a.png", server.url("ok", "a.png")):
            with pytest.raises(ValueError, match=r"a\.png (has|sends) more than 50 bytes"):
                prolip.open_image(place)


def test_the_error_of_an_address_shows_no_secret_and_chains_none():
    with pytest.raises(OSError, match="https://127.0.0.1:9/x.png: ") as caught:
        prolip.open_image("https://user:hunter2@127.0.0.1:9/x.png?sig=S3CRET")
    chain = [caught.value, caught.value.__cause__]
    assert not any(secret in str(error) for error in chain for secret in ("hunter2", "S3CRET"))
    assert caught.value.__suppress_context__
