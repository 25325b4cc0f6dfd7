"""Shards of the emoji corpus with flat drawings."""

import io
import json
import tarfile

from PIL import Image


def write_shard(path, style, records, size=4, colour=(200, 30, 30)):
    """One flat drawing per record. colour: RGB, or a function of the record."""
    with tarfile.open(path, "w") as tar:
        for record in records:
            picture = io.BytesIO()
            Image.new("RGB", (size, size), colour(record) if callable(colour) else colour).save(picture, "png")
            text = json.dumps({**record, "style": style}).encode()
            for suffix, data in (("png", picture.getvalue()), ("json", text)):
                info = tarfile.TarInfo(f"{style}-{record['hexcode']}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path
