"""HierarCaps (Alper and Averbuch-Elor, ECCV 2024): metrics by ProLIP's protocol (`paper/...`) and by its own."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import kendalltau
from tqdm import tqdm

from prolip.embedder import Embedder
from prolip.gaussian import Gaussian
from prolip.hierarchy import STEPS
from prolip.hierarchy.traversal import Traversal

#: Images embedded at a time.
BATCH = 64
COLUMNS = ("id", "captions", "image_url")
ARROW = "=>"
WANTED = "give HierarCaps' CSV with the columns id,captions,image_url, such as hierarcaps_test.csv"


@dataclass(frozen=True)
class HierarCaps:
    """N rows. chains: the L captions of each, general to specific; images: names of files."""

    chains: tuple[tuple[str, ...], ...]
    images: tuple[str, ...]

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """Distinct captions, in order of appearance."""
        return tuple(dict.fromkeys(text for chain in self.chains for text in chain))

    @cached_property
    def rows(self) -> np.ndarray:
        """Index (N, L) into `texts`."""
        place = {text: i for i, text in enumerate(self.texts)}
        return np.array([[place[text] for text in chain] for chain in self.chains])

    @property
    def image_of(self) -> np.ndarray:
        """Index (N,) into the distinct images, in order of appearance."""
        place = {name: i for i, name in enumerate(dict.fromkeys(self.images))}
        return np.array([place[name] for name in self.images])

    def files(self, folder: str | Path) -> list[Path]:
        """Return the image files, M, in a folder. FileNotFoundError with the first missing one."""
        paths = [Path(folder) / name for name in dict.fromkeys(self.images)]
        if missing := [path for path in paths if not path.is_file()]:
            some = f"{len(missing)} of {len(paths)} images are not in {folder}, such as {missing[0].name}"
            raise FileNotFoundError(f"{some}: download COCO's val2014.zip, unpack it and give its folder")
        return paths


def read_hierarcaps(path: str | Path) -> HierarCaps:
    """Read the CSV. FileNotFoundError for no file, ValueError with the line of an invalid row."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}: {WANTED}")
    found: list[tuple[tuple[str, ...], str]] = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            rows = csv.DictReader(file, strict=True)
            if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
                raise ValueError(f"{path} has no column {', '.join(missing)}, but {rows.fieldnames}: {WANTED}")
            for row in rows:
                where = f"{path}, line {rows.line_num}"
                chain = tuple(text.strip() for text in (row["captions"] or "").split(ARROW))
                name = (row["image_url"] or "").strip().rsplit("/", 1)[-1]
                if len(chain) < 2 or not all(chain) or not name:
                    what = f"captions {row['captions']!r} of image {row['image_url']!r}"
                    wanted = f"two levels or more joined by {ARROW}, none of them empty, and the image's URL"
                    raise ValueError(f"{where}: {what}: expected {wanted}")
                found.append((chain, name))
                if len(chain) != len(found[0][0]):
                    raise ValueError(f"{where}: {len(chain)} levels, expected {len(found[0][0])} as in the first row")
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a CSV in UTF-8 ({error}): {WANTED}") from error
    if not found:
        raise ValueError(f"{path} has no rows: {WANTED}")
    return HierarCaps(*zip(*found))


def paper_metrics(data: HierarCaps, found: Traversal) -> dict[str, float]:
    """Return ProLIP's metrics (table 2): a row of the CSV against the captions met from its image; found: M images.

    paper/precision: share of the distinct captions met that are the row's own; recall: share of the row's own that are
    met; any_hit: whether any is; root_recall, root_level0: whether the caption nearest to the root is one of the row's,
    or the most general one. Means over rows. The paper does not state which of recall and any_hit is its R@1.
    """
    root = found.met[:, -1].tolist()
    met = [set(row) for row in found.met.tolist()]
    values = []
    for own, image in zip(data.rows.tolist(), data.image_of):
        hits, end = len(set(own) & met[image]), root[image]
        values.append((hits / len(met[image]), hits / len(set(own)), hits > 0, end in own, end == own[0]))
    names = ("precision", "recall", "any_hit", "root_recall", "root_level0")
    return {f"paper/{name}": float(np.mean(column)) for name, column in zip(names, zip(*values))}


def benchmark_metrics(
    data: HierarCaps, image: Gaussian, text: Gaussian, empty: Gaussian, steps: int = STEPS
) -> dict[str, float]:
    """Return the metrics of the benchmark's authors; image (M, D), text (T, D), empty (1, D), by means only.

    Each of `steps` thresholds of the radius |m - r|, r the mean of "", retrieves the nearest caption within it.
    benchmark/precision: share of the retrieved captions that any row of the image has; recall: share of the levels with
    a retrieved caption; means over images. d_corr: Kendall's tau of a row's radii with its levels, mean over rows;
    d_corr_trace: the same for -trace if captions have variances, expected over the orders of equal traces.
    """
    radius = (text.mean - empty.mean).norm(dim=1)
    scores = image.mean @ text.mean.mT
    taken = []
    for threshold in np.linspace(radius.min().item(), radius.max().item(), steps):
        inside = radius.double() <= threshold
        inside |= radius == radius.min()  # rounding may put the first threshold below it
        taken.append(scores.masked_fill(~inside, -torch.inf).argmax(1))
    chosen = torch.stack(taken, 1).tolist()
    precision, recall, image_of = [], [], data.image_of
    for i, row in enumerate(chosen):
        own = data.rows[image_of == i]
        seen, truth = set(row), set(own.flatten().tolist())
        precision.append(len(seen & truth) / len(seen))
        recall.append(np.mean([bool(seen & set(level)) for level in own.T.tolist()]))
    radii = radius.numpy()[data.rows]
    order, levels = (
        np.argsort(radii, axis=1, kind="stable"),
        np.arange(radii.shape[1]),
    )  # of equal radii, the more general first
    taus = [kendalltau(row, levels).statistic for row in order]
    means: dict[str, Sequence[Any]] = {"precision": precision, "recall": recall, "d_corr": taus}
    out = {f"benchmark/{name}": float(np.mean(values)) for name, values in means.items()}
    if not bool(text.log_var.isneginf().any()):
        general, specific = np.triu_indices(len(levels), 1)
        trace = text.trace.numpy()[data.rows]
        out["benchmark/d_corr_trace"] = float(np.sign(trace[:, general] - trace[:, specific]).mean())
    return out


def embed_files(embedder: Embedder, files: Iterable[Path], progress: bool = False) -> Gaussian:
    """Embed image files (N, D), decoded in threads. ValueError for a damaged one."""
    return embedder.embed_images(tqdm(list(files), desc="images", unit="", disable=not progress), BATCH)
