"""Files to pixels: the fast way equals Pillow's except in time; inputs that `open_image` accepts and refuses."""

from __future__ import annotations

import io
import os
import random
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from faulty_servers import FaultyServer, closing_port
from PIL import Image
from tiny_tars import saved

import prolip
from prolip.data import images
from prolip.data.faults import SampleFault
from prolip.data.images import decode_image, decode_pixels, jpeg_size


def drawing(width=96, height=80):
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 5, 3), dtype=np.uint8)).resize((width, height))
    return Image.fromarray((np.asarray(coarse) // 2 + rng.integers(0, 120, (height, width, 3))).astype(np.uint8))


TURNED = Image.Exif()
TURNED[274] = 6  # orientation
JPEGS = {
    "4:2:0": saved(drawing(), quality=90),
    "4:4:4": saved(drawing(), subsampling=0),
    "progressive": saved(drawing(), progressive=True),
    "restarts": saved(drawing(), restart_marker_blocks=3),
    "grey": saved(drawing().convert("L")),
    "cmyk": saved(drawing().convert("CMYK")),
    "rgb": saved(drawing(), keep_rgb=True),
    "odd": saved(drawing(33, 17)),
    "turned by EXIF": saved(drawing(), exif=TURNED),
}


def verdict(decode, data):
    """The pixels, or the kind of fault."""
    try:
        return np.asarray(decode(data))
    except SampleFault as fault:
        return str(fault).split(":")[0]


def same(data):
    ours, pillows = verdict(decode_pixels, data), verdict(decode_image, data)
    return ours == pillows if isinstance(ours, str) or isinstance(pillows, str) else np.array_equal(ours, pillows)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of broken EXIF
@pytest.mark.parametrize("name", JPEGS)
def test_pixels_and_refusals_are_pillows(name):
    data, rng, outcomes = JPEGS[name], random.Random(name), set()
    assert isinstance(verdict(decode_pixels, data), np.ndarray) and same(data)
    assert (jpeg_size(data) is None) == (name == "cmyk")  # so the others are not Pillow's twice
    ends = [*range(0, len(data), max(1, len(data) // 40)), *range(len(data) - 6, len(data))]
    assert [end for end in ends if not same(data[:end])] == []
    assert verdict(decode_pixels, data[: len(data) * 3 // 4]) == "bad image"
    for _ in range(60):
        flipped = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            flipped[rng.randrange(len(data))] = rng.randrange(256)
        assert same(bytes(flipped)), flipped.hex()
        outcomes.add(isinstance(verdict(decode_image, bytes(flipped)), str))
    assert outcomes == {True, False}


def test_files_that_are_cut_or_too_large_are_refused_jpegs_before_they_are_decoded(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_bytes(CUT)
    with pytest.raises(ValueError, match=r"mode L and size 40 x 40: bad image: .*truncated"):
        prolip.open_image(Image.open(path))
    monkeypatch.setattr(images, "MAX_PIXELS", 40 * 40 - 1)
    for source in (path, Image.open(path)):
        with pytest.raises(ValueError, match="oversized image: 40 x 40 pixels, the limit is 1599"):
            prolip.open_image(source)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(images, "MAX_BYTES", 50)
    with FaultyServer({"a.png": FILE}) as server:
        for place in (path, server.url("ok", "a.png")):
            with pytest.raises(ValueError, match=r"a\.png (has|sends) more than 50 bytes"):
                prolip.open_image(place)
    monkeypatch.setattr(images, "MAX_PIXELS", 96 * 80 - 1)
    monkeypatch.setattr(images.simplejpeg, "decode_jpeg", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(SampleFault, match="oversized image: 96 x 80 pixels"):
        decode_pixels(JPEGS["4:2:0"])


# --- open_image -------------------------------------------------------------------------------------------------------
RGBA = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 9, 4), dtype=np.uint8))
FILE = saved(RGBA, "PNG")
CUT = saved(Image.effect_noise((40, 40), 60), "PNG")[:-300]


def wanted():
    canvas = Image.new("RGB", RGBA.size, "white")
    canvas.paste(RGBA, mask=RGBA.getchannel("A"))
    return np.asarray(canvas)


def test_a_picture_behind_a_url_is_read_though_its_connection_breaks_but_not_waited_for_as_shards_are(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    large = Image.effect_noise((300, 300), 90)
    with FaultyServer({"a.png": FILE, "large.png": saved(large, "PNG")}) as server:
        assert np.array_equal(prolip.open_image(server.url("ok", "a.png")), wanted())
        assert np.array_equal(prolip.open_image(server.url("cut-once", "large.png")), large.convert("RGB"))
        with pytest.raises(OSError, match=r"/missing/a\.png: .*404.*Check the URL"):
            prolip.open_image(server.url("missing", "a.png"))
    started = time.monotonic()
    for url in (f"http://127.0.0.1:{closing_port()}/a.png", "http://no.invalid/a.png"):
        with pytest.raises(OSError, match="/a.png: .*Check the URL and the network"):
            prolip.open_image(url)
    assert time.monotonic() - started < 8


def test_paths_may_look_like_commands_and_what_is_missing_is_named_with_what_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipe:touch x").write_bytes(FILE)
    for path in ("./pipe:touch x", Path("pipe:touch x"), str(tmp_path / "pipe:touch x")):
        assert np.array_equal(prolip.open_image(path), wanted())
    (tmp_path / "picture.png").write_bytes(FILE)
    with pytest.raises(FileNotFoundError, match=r"no image .*pictur\.png: Did you mean picture\.png in"):
        prolip.open_image(tmp_path / "pictur.png")
    with pytest.raises(IsADirectoryError, match="is a folder. Give one of its images"):
        prolip.open_image(tmp_path)
    os.mkfifo("a-pipe")
    for place, said in (("/dev/zero", "a pipe or a device"), ("a-pipe", "a pipe or a device"), ("", "an empty path")):
        with pytest.raises(ValueError, match=said):
            prolip.open_image(place)


def grey(values, kind=np.float32):
    return Image.fromarray(np.array(values, kind))


@pytest.mark.parametrize(
    "source, message",
    [
        (np.zeros((4, 4, 3), np.uint8), r"a ndarray is not an image: give a path.*Image.fromarray\(array\)"),
        (io.StringIO("x"), r"returns text. Open it with open\(path, 'rb'\)"),
        (b"", "the bytes: bad image: 0 bytes: cannot identify image, expected JPEG, PNG"),
        (b"<html>no</html>", "bad image: 15 bytes that begin with b'<html>no</html>': cannot identify image"),
        (CUT, "the bytes: bad image: .*Give another image, or repair this"),
        (Image.new("RGB", (0, 5)), "the Pillow image of mode RGB and size 0 x 5: bad image: 0 x 5 pixels"),
        (saved(grey([[5.0] * 3] * 3), "TIFF"), "floats from 5 to 5 do not determine the value of white"),
        (grey([[np.nan] * 3] * 3), "mode F and size 3 x 3: .*nan .*expected 0 to 1 or 0 to 255"),
        (grey([[-0.5]]), "floats from -0.5"),
        (grey([[70_000]], np.int32), "32-bit integers from 70000 to 70000 do not"),
        (grey([[-1, 5]], np.int32), "32-bit integers from -1 to 5 .*Save the image with 8 or"),
    ],
)
def test_what_is_no_picture_is_refused_in_one_line(source, message):
    with pytest.raises(ValueError, match=message) as refusal:
        prolip.open_image(source)
    assert "\n" not in str(refusal.value)


def test_floats_may_overshoot_a_little_as_after_resizing_and_dark_pngs_of_16_bits_stay_dark():
    for white in (1, 255):
        rgb = np.asarray(prolip.open_image(grey(np.array([[-0.05, 0.5, 1.05]]) * white)))[0, :, 0]
        assert rgb.tolist() == [0, 128 if white == 1 else 127, 255]
    image = grey([[0, 200, 255]], np.int32)
    image.format = "PNG"  # before Pillow 10.3 it had mode I
    assert np.asarray(prolip.open_image(image)).max() == 0


def png_of(depth, colour, row, key):
    """A PNG of one row with a transparent value, which Pillow reads and does not write."""
    width = len(row) * 8 // depth // (3 if colour == 2 else 1)
    header = struct.pack(">IIBBBBB", width, 1, depth, colour, 0, 0, 0)
    parts = [(b"IHDR", header), (b"tRNS", key), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")]
    chunks = (struct.pack(">I", len(x)) + kind + x + struct.pack(">I", zlib.crc32(kind + x)) for kind, x in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    "data, levels",
    [
        (png_of(2, 0, bytes([0b00011011]), b"\0\1"), [0, 255, 170, 255]),
        (png_of(4, 0, bytes([0x12]), b"\0\1"), [255, 34]),
        (png_of(8, 0, bytes([7, 8]), b"\0\7"), [255, 8]),
        (png_of(16, 0, b"\x56\x78\x12\x34", b"\x56\x78"), [255, 0x12]),
        (png_of(16, 2, b"\x56\x78" * 3 + b"\x12\x34" * 3, b"\x56\x78" * 3), [255, 0x12]),
        (png_of(16, 2, b"\x56\x78" * 3 + b"\x12\x34" * 3, b"\0\1" * 3), [0x56, 0x12]),
    ],
)
def test_the_transparent_value_of_a_png_is_found_at_every_depth(data, levels):
    for source in (data, Image.open(io.BytesIO(data))):
        assert np.asarray(prolip.open_image(source))[0, :, 0].tolist() == levels


def test_the_error_of_an_address_shows_no_secret_and_chains_none():
    with pytest.raises(OSError, match="https://127.0.0.1:9/x.png: ") as caught:
        prolip.open_image("https://user:hunter2@127.0.0.1:9/x.png?sig=S3CRET")
    chain = [caught.value, caught.value.__cause__]
    assert not any(secret in str(error) for error in chain for secret in ("hunter2", "S3CRET"))
    assert caught.value.__suppress_context__
