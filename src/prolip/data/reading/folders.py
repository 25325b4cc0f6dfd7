"""Images known in advance as rows, from folders, published sets and tables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from prolip.data.captions import Plain, Selector
from prolip.data.faults import SampleFault
from prolip.data.order import Groups
from prolip.data.reading.tar import SAMPLE_BYTES, printable
from prolip.data.samples import IMAGE_SUFFIXES, JSON_BYTES, Raw, image_bytes
from prolip.data.split import Split
from prolip.utils.documents import loads, read_file, text_of
from prolip.utils.links import check_inside, walk
from prolip.utils.messages import explain_missing, listing
from prolip.utils.threads import default_workers, in_threads

if TYPE_CHECKING:
    from prolip.data.reading.parquet import EmbeddedImages

AHEAD = 64  # files hashed ahead of the requested one


@dataclass(slots=True)
class ImageRow:
    """An image with its captions and a record of caption fields, conditions and a label."""

    path: str  # path of its unique file; TABLE#ROW for bytes in a table
    caption: Plain
    record: dict[str, Any]
    number: int = 0  # row number as a spreadsheet counts, 0 without a table
    inside: tuple[int, int, int] | None = None  # position of its bytes in a table, for `EmbeddedImages`

    @property
    def key(self) -> str:
        """The path in printable form."""
        return printable(self.path)


@dataclass(frozen=True)
class ImageRows:
    """Reader of row i as a raw sample, as if it came from a shard."""

    rows: Sequence[ImageRow]
    embedded: EmbeddedImages | None = None  # reader of the images in a table
    held_out: ImageRows | None = None  # the rows that a split holds out of these

    def __len__(self) -> int:
        return len(self.rows)

    def __call__(self, index: int) -> Raw:
        """Return the raw sample; SampleFault if the file cannot be read."""
        row = self.rows[index]
        try:
            if row.inside is not None and self.embedded is not None:
                data = self.embedded(row.inside)
            else:
                data = read_file(row.path, SAMPLE_BYTES)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
            reason = getattr(error, "strerror", None) or error
            where = f" (row {row.number} of the table)" if row.number else ""
            raise SampleFault("missing image", f"{printable(row.path)}: {reason}{where}") from error
        suffix = os.path.splitext(row.path)[1][1:].lower()
        # Pillow decides by the bytes: a file without a known suffix may be an image
        return {suffix if suffix in IMAGE_SUFFIXES else "jpg": data, **self.texts(index)}

    def texts(self, index: int) -> Raw:
        """Return the raw sample without its image."""
        row = self.rows[index]
        plain = {} if row.caption is None else {"txt": row.caption}
        return {"__key__": row.key, "__url__": printable(row.path), **plain, "json": row.record}

    def groups(self) -> Groups | None:
        """Return a table's row groups and their share of a process's memory; None for files."""
        if self.embedded is None:
            return None
        places = [row.inside[:2] for row in self.rows if row.inside is not None]
        numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
        sizes = torch.tensor([self.embedded.share(*place) for place in numbers], dtype=torch.float64)
        return Groups(torch.tensor([numbers[place] for place in places]), sizes)

    def part(self, split: Split) -> ImageRows:
        """Return the rows of one part of a split by content. Reads all images; unreadable ones are in the rest."""

        def is_held_out(index: int) -> bool:
            try:
                return Split(split.share).takes(image_bytes(self(index)))
            except SampleFault:
                return False

        taken = list(in_threads(is_held_out, iter(range(len(self))), default_workers(), AHEAD))
        sides = [[row for row, side in zip(self.rows, taken) if side == wanted] for wanted in (True, False)]
        held, rest = (ImageRows(rows, self.embedded) for rows in sides)
        if not len(held) or (not len(rest) and split.part == "rest"):
            other = f"a larger share, such as --split {min(max(2 * split.share, 3 / len(self)), 0.9):.2g}"
            what, other = ("leaves", "a smaller share, such as --split 0.1") if len(held) else ("holds out", other)
            raise ValueError(f"--split {split.share} {what} none of {len(self)} images. Give {other}")
        return held if split.part == "held-out" else replace(rest, held_out=held)


def rows_of(paths: Iterable[str]) -> ImageRows:
    """Return image files as rows without captions or fields."""
    return ImageRows([ImageRow(path, None, {}) for path in paths])


def keep_selected(rows: Iterable[ImageRow], selector: Selector | None, what: str) -> ImageRows:
    """Return the selected rows; ValueError if there is none."""
    every = list(rows)
    kept = [row for row in every if selector is None or selector(row.record)]
    if not kept:
        fields = f", with the fields {', '.join(every[0].record) or 'none'}" if every else ""
        raise ValueError(f"{what} has no selected sample: it has {len(every)} rows{fields}; select is {selector}")
    return ImageRows(kept)


def read_folder(root: str, selector: Selector | None = None) -> ImageRows:
    """Read images below a folder, `<root>/<class>/.../<image>` or `<root>/<image>`.

    The caption is the text of `<image>.txt` (same stem) next to it, else the class name with underscores as spaces. The
    record has `class`, if any, and the fields of `<image>.json`. Names that begin with a dot, and links to a folder
    above, are skipped. ValueError if there is no image or a link leaves the folder; OSError.
    """
    if not os.path.isdir(root):
        raise FileNotFoundError(f"image folder {root!r} is missing. {explain_missing(root)}")
    rows = []
    for folder, names in walk(root):
        parts = Path(folder).relative_to(root).parts
        label = parts[0].replace("_", " ") if parts else None
        present = set(names)
        for name in names:
            stem, suffix = os.path.splitext(os.path.join(folder, name))
            if suffix[1:].lower() not in IMAGE_SUFFIXES or name.startswith("."):  # macOS writes "._cat.jpg"
                continue
            check_inside(root, stem + suffix)
            row = ImageRow(stem + suffix, label, {} if label is None else {"class": label})
            for path, form in ((f"{stem}.txt", "UTF-8"), (f"{stem}.json", "a JSON object")):
                if os.path.basename(path) not in present:
                    continue
                check_inside(root, path)
                try:
                    text = text_of(path, JSON_BYTES)
                    found = loads(text, unique=True) if form == "a JSON object" else {}
                    if not isinstance(found, dict):
                        raise ValueError(f"a {type(found).__name__}, expected an object")
                except ValueError as error:
                    raise ValueError(f"{path} is not {form}: {error}. Repair or remove it") from error
                row.record |= found
                row.caption = text if form == "UTF-8" else row.caption
            rows.append(row)
    if not rows:
        raise ValueError(f"folder {root} has no image ({', '.join(IMAGE_SUFFIXES)}); it contains {listing(root)}")
    return keep_selected(rows, selector, root)
