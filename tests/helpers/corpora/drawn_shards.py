"""Shards of the emoji corpus with flat drawings."""

import json

from squares import picture
from tiny_tars import write_tar


def write_shard(path, style, records, size=4, colour=(200, 30, 30)):
    """One flat drawing per record. colour: RGB, or a function of the record."""
    samples = []
    for record in records:
        drawing = picture(colour(record) if callable(colour) else colour, size=size)
        text = json.dumps({**record, "style": style}).encode()
        samples.append((f"{style}-{record['hexcode']}", {"png": drawing, "json": text}))
    write_tar(path, samples)
    return path
