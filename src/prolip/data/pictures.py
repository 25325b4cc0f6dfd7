"""One picture from wherever it lies, with the pixels that training would see."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from typing import IO, Any

from PIL import Image

from prolip.data.faults import SampleFault
from prolip.data.reading.addresses import check_address
from prolip.data.reading.opening import ReadPolicy, is_local, local_path, open_stream, read_up_to
from prolip.data.samples.decoding import MAX_PIXELS, check_size, decode_image, to_rgb
from prolip.utils.documents import read_file
from prolip.utils.messages import explain_missing
from prolip.utils.secrecy import redacted, scrub

Source = str | os.PathLike | bytes | bytearray | memoryview | IO[bytes] | Image.Image

#: The largest picture in its largest form, four channels of 16 bits, and what its file says of it.
PICTURE_BYTES = 8 * MAX_PIXELS + 2**20
#: Somebody waits for the picture: a name that is not known, or a host that refuses, is reported within a second or two.
PATIENCE = ReadPolicy(connect_timeout=3, read_timeout=5, least_rate=2**13, retries=1, backoff=0.5, backoff_limit=1)


def open_image(source: Source, public_only: bool = False) -> Image.Image:
    """A picture in RGB: of a path, a URL (http, s3, ...), a file's bytes, an open file, or a Pillow image of any mode.

    public_only: refuse http(s) addresses of private and local hosts, as is wise for URLs that come from data.

    Pixels are those that training, validation and every evaluation see: transparency lies on white, grey of 16 bits is
    scaled to 8, an animation gives its first frame, EXIF rotation is not applied. OSError where nothing can be read,
    ValueError for what is no picture, is damaged or too large, and for grey that does not say what white is.
    """
    if isinstance(source, Image.Image):
        name = f"the Pillow image of mode {source.mode} and size {source.size[0]} x {source.size[1]}"
    elif isinstance(source, (str, os.PathLike)):
        name = redacted(os.fspath(source))
    else:
        name = f"the {type(source).__name__}"
    try:
        if isinstance(source, Image.Image):
            return from_pillow(source)
        return decode_image(read(source, replace(PATIENCE, public_only=public_only)))
    except SampleFault as fault:
        raise ValueError(f"{name}: {fault}. Give another picture, or repair this one") from fault


def from_pillow(image: Image.Image) -> Image.Image:
    """`to_rgb`, its errors as SampleFault."""
    check_size(*image.size)
    try:
        return to_rgb(image)
    except Exception as error:  # a file that is cut, or closed, is seen only now
        raise SampleFault("bad image", str(error)) from error


def read(source: Any, policy: ReadPolicy) -> bytes:
    """The bytes of a file. OSError, naming it, where there is none; ValueError for what is no source at all."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source)
    if hasattr(source, "read"):
        data = source.read()
        if isinstance(data, str):
            raise ValueError(f"{source!r} gives text: open it with open(path, 'rb')")
        return data
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(
            f"a {type(source).__name__} is no picture: give a path, a URL, bytes, an open file or a Pillow image (of an"
            " array of levels: Image.fromarray(array))"
        )
    place = os.fspath(source)
    if not place:
        raise ValueError("an empty path is no picture: give the path of a file")
    if isinstance(source, str) and not is_local(check_address(place)):
        try:
            with closing(open_stream(place, policy)) as stream:
                data = read_up_to(stream, PICTURE_BYTES + 1)
        except SampleFault as fault:
            problem = scrub(f"{place}: {fault.message}")
            raise OSError(f"{problem}. Look at the URL and the network, or fetch the file") from None
        if len(data) > PICTURE_BYTES:
            raise ValueError(f"{redacted(place)} sends more than {PICTURE_BYTES:,} bytes: it is no picture")
        return data
    path = local_path(place)
    try:
        return read_file(path, PICTURE_BYTES)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no picture {path}: {explain_missing(path)}") from error
    except IsADirectoryError as error:
        raise IsADirectoryError(f"{path} is a folder: give one of its pictures") from error
