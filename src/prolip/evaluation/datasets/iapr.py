"""IAPR TC-12 (Grubinger et al. 2006) as a test set; files and splits: `prolip.data.reading.published.iapr`."""
from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from prolip.data.faults import FaultCounter
from prolip.data.reading.published.iapr import read_iapr
from prolip.data.reading.published.images import check_files
from prolip.evaluation.datasets.base import Dataset, Sample, fingerprint
from prolip.evaluation.datasets.folders import read_files


def open_iapr(
    folder: str | os.PathLike,
    split: str = "test",
    lists: str | os.PathLike | None = None,
    name: str | None = None,
    damage: FaultCounter | None = None,
) -> Dataset:
    """The photographs of a split in the order of their ids; each sentence of a description is a caption.

    lists: a file of ids, or the folder of LEAR's lists; default: looked for in `folder`. FileNotFoundError, ValueError,
    DamagedData before anything is computed.
    """
    chosen = read_iapr(folder, (split,), lists)
    files = [(image.path, Sample(image.key, b"", captions=image.captions)) for image in chosen]
    sizes = check_files([path for path, _ in files], f"images of the split {split!r} of IAPR TC-12")
    return Dataset(
        name=name or f"iapr_{split}",
        kind="retrieval",
        samples=partial(read_files, files, damage),
        fingerprint=fingerprint("iapr", [(s.key, size, s.captions) for (_, s), size in zip(files, sizes)]),
        source=str(Path(folder)),
        size=len(files),
        info={"split": split},
        damage=damage,
    )
