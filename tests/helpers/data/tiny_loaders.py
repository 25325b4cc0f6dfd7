"""Loaders of small data for the tests of the data module."""

from __future__ import annotations

import torch
from tiny_tars import letters, members, noisy, png, write_tar

from prolip.data.loader import DataConfig, build_loader
from prolip.data.reading.named import NamedSource
from prolip.data.reading.rows import RECOGNISED, read_rows


def build(data, batch_size=4, workers=0, rank=0, world_size=1, transform=noisy, **settings):
    config = DataConfig(train_data=str(data), batch_size=batch_size, workers=workers, **settings)
    return build_loader(config, transform, letters, rank=rank, world_size=world_size)


def read_csv(path, columns=RECOGNISED, separator=None, selector=None, quoting=True, max_bad=1.0):
    """The rows of a CSV, however many lack an image or a caption."""
    columns = columns._replace(separator=separator, quoting=quoting)
    return read_rows(NamedSource("csv", str(path)), columns, selector, max_bad=max_bad)


def epoch(loader, number=0):
    loader.set_epoch(number)
    return list(loader)


def same(one, other):
    assert one.keys() == other.keys()
    return all(
        torch.equal(one[name], other[name]) if isinstance(one[name], torch.Tensor) else one[name] == other[name]
        for name in one
    )


def gathered(batches):
    """The global batch of W local ones: row g is local row g // W of rank g % W."""
    whole = {"key": [key for row in zip(*(batch["key"] for batch in batches)) for key in row]}
    longest = max(batch["caption_ids"].shape[1] for batch in batches) if "caption_ids" in batches[0] else 0
    for name in batches[0]:
        if name != "key":
            parts = [batch[name] for batch in batches]
            if name == "caption_ids":
                parts = [torch.nn.functional.pad(part, (0, longest - part.shape[1]), value=-1) for part in parts]
            whole[name] = torch.stack(parts, 1).flatten(0, 1)
    return whole


def write_csv(tmp_path, rows):
    lines = ["filepath\ttitle\tname\tgroup"]
    for i in range(rows):
        (tmp_path / f"{i}.png").write_bytes(png(i))
        lines.append(f"{i}.png\tcaption {i}\tname {i}\tgroup")
    (tmp_path / "d.csv").write_text("\n".join(lines))
    return tmp_path / "d.csv"


def with_bad_images(tmp_path, good, bad):
    rows = [(f"g{i}", members(i)) for i in range(good)] + [(f"b{i}", {**members(i), "png": b"x"}) for i in range(bad)]
    return write_tar(tmp_path / "bad.tar", rows)
