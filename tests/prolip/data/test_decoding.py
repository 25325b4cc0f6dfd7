"""The fast way from JPEG bytes to pixels is Pillow's in everything but time: same pixels, same refusals."""

import io
import random

import numpy as np
import pytest
from PIL import Image

from prolip.data import images as decoding
from prolip.data.faults import SampleFault
from prolip.data.images import decode_image, decode_jpeg, decode_pixels, jpeg_size


def drawing(width=96, height=80):
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 5, 3), dtype=np.uint8)).resize((width, height))
    return Image.fromarray((np.asarray(coarse) // 2 + rng.integers(0, 120, (height, width, 3))).astype(np.uint8))


def saved(image, kind="JPEG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


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


@pytest.mark.parametrize("name", JPEGS)
def test_pixels_are_pillows_bit_for_bit(name):
    assert isinstance(verdict(decode_pixels, JPEGS[name]), np.ndarray)
    assert same(JPEGS[name])
    assert (jpeg_size(JPEGS[name]) is None) == (name == "cmyk")  # so the others are not Pillow's twice


@pytest.mark.parametrize("name", JPEGS)
def test_a_cut_file_is_refused_or_forgiven_as_by_pillow(name):
    data = JPEGS[name]
    ends = [*range(0, len(data), max(1, len(data) // 120)), *range(len(data) - 6, len(data))]
    assert [end for end in ends if not same(data[:end])] == []
    assert verdict(decode_pixels, data[: len(data) * 3 // 4]) == "bad image"


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of broken EXIF
@pytest.mark.parametrize("name", JPEGS)
def test_flipped_bytes_are_refused_or_forgiven_as_by_pillow(name):
    rng = random.Random(name)
    outcomes = set()
    for _ in range(150):
        data = bytearray(JPEGS[name])
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        assert same(bytes(data)), data.hex()
        outcomes.add(isinstance(verdict(decode_image, bytes(data)), str))
    assert outcomes == {True, False}


def test_oversized_jpegs_are_refused_before_they_are_decoded(monkeypatch):
    monkeypatch.setattr(decoding, "MAX_PIXELS", 96 * 80 - 1)
    monkeypatch.setattr(decoding.simplejpeg, "decode_jpeg", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(SampleFault, match="oversized image: 96 x 80 pixels"):
        decode_pixels(JPEGS["4:2:0"])


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("width, height", [(96, 80), (97, 81), (101, 55), (64, 15)])
def test_scaled_decoding_averages_squares_of_pixels(factor, width, height):
    smooth = drawing(5, 4).resize((width, height), Image.Resampling.BICUBIC)
    data = saved(smooth, quality=95, subsampling=0)
    small = decode_jpeg(data, height, width, factor)
    assert small.shape == (-(-height // factor), -(-width // factor), 3)
    rows, columns = height // factor, width // factor  # whole squares
    full = np.asarray(decode_image(data))[: rows * factor, : columns * factor].astype(float)
    averages = full.reshape(rows, factor, columns, factor, 3).mean((1, 3))
    assert np.abs(small[:rows, :columns] - averages).mean() < 2.5
