"""Commits of curation that tests/faults.py interrupts: scores of a shard, a selection, new shards with their index.

The module also has helpers of curation tests: shards of any samples, and scores without a model.
"""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from prolip.curate.rules import parse_rules
from prolip.curate.score import Scorer
from prolip.curate.select import Choice, select, selection_of
from prolip.curate.tables import read_table
from prolip.curate.write import ShardPlan, write_shards
from prolip.data.captions import CaptionSampler
from prolip.data.reading.tar import ShardReader


@cache
def picture(seed: int, size: tuple[int, int] = (8, 8)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def sample(key: str, number: int, **more: bytes) -> list[tuple[str, bytes]]:
    """The members of a good sample, or with others in their place."""
    parts = {"png": picture(number), "txt": f"caption {number}".encode()} | more
    return [(f"{key}.{suffix}", data) for suffix, data in parts.items()]


def write_tar(path: Path, members: Sequence[tuple[str | bytes, bytes]]) -> str:
    """A shard of these members; names of bytes go in as they are."""
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name.decode(errors="surrogateescape") if isinstance(name, bytes) else name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return str(path)


def brightness(pixels: torch.Tensor, captions: Sequence[str]) -> dict[str, Any]:
    """Return brightness as a stand-in for a model's signals."""
    return {"cosine": pixels.mean((1, 2, 3)).numpy(), "text_tokens": np.float32([len(text) for text in captions])}


def pixels_of(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image.resize((2, 2)), np.float32).transpose(2, 0, 1).copy())


def scorer(urls: Sequence[str], out: Path, captions: str = "txt") -> Scorer:
    """Build the scorer of shards as the command does, without a model."""
    made = Scorer(
        urls, out, brightness, pixels_of, CaptionSampler.parse(captions), {"model": "brightness"}, ShardReader()
    )
    made.begin()
    return made


def score_all(urls: Sequence[str], out: Path) -> list[dict[str, Any]]:
    made = scorer(urls, out)
    return [made.score(number) for number in range(len(urls)) if not made.is_done(number)]


def write_all(out: Path, shards: Path, samples: int = 3) -> int:
    return sum(write_shards(ShardPlan(out, samples, ShardReader()), shards)[0])


def three_shards(folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    return [
        write_tar(folder / f"{n}.tar", [x for row in range(4) for x in sample(f"{row}", 4 * n + row)]) for n in range(3)
    ]


def choose(out: Path, *rules: str) -> dict[str, Any]:
    return select(out, Choice(rules=parse_rules(list(rules))), yes=True)


def _shards(folder: Path) -> list[str]:
    """Return a folder outside the copied and watched one, because tables name shards by their whole paths."""
    place = folder.parent / "shards"
    return [str(path) for path in sorted(place.glob("*.tar"))] or three_shards(place)


def _prepare_table(folder: Path) -> None:
    score_all(_shards(folder), folder)
    (folder / "scores/000001.parquet").write_bytes(b"PAR1 cut")


def _state_of_table(folder: Path) -> str | list[str]:
    if (folder / "scores/000001.parquet").read_bytes() == b"PAR1 cut":
        return "damaged"
    return read_table(folder / "scores/000001.parquet", ["key"]).columns["key"].tolist()


def _prepare_selection(folder: Path) -> None:
    score_all(_shards(folder), folder)
    choose(folder)


def _select(folder: Path) -> None:
    choose(folder, "dark: cosine < quantile(cosine, 0.5)")


def _state_of_selection(folder: Path) -> Any:
    if not (folder / "selection").exists():
        return None
    summary, paths = selection_of(folder)
    copies = [read_table(folder / "selection" / path.name, ["copies"]).columns["copies"].tolist() for path in paths]
    assert [sum(part) for part in copies] == summary["by_shard"]
    return summary, copies


def _state_of_shards(folder: Path) -> str:
    """Return the state of the existing files, which must be complete; all together are the new state."""
    found = {path.name: path.read_bytes() for path in (folder / "kept").glob("[!.]*") if path.is_file()}
    with tempfile.TemporaryDirectory() as other:
        write_all(folder, Path(other))
        want = {path.name: path.read_bytes() for path in Path(other).iterdir()}
    assert found.items() <= want.items(), f"{sorted(found)} of {sorted(want)} are others"
    if found == want:
        return "all"
    again = folder.with_name("again")
    shutil.rmtree(again, ignore_errors=True)
    shutil.copytree(folder, again)
    write_all(again, again / "kept")
    assert {path.name: path.read_bytes() for path in (again / "kept").glob("[!.]*")} == want
    return "some"


table = SimpleNamespace(
    prepare=_prepare_table, commit=lambda folder: scorer(_shards(folder), folder).score(1), state=_state_of_table
)
selection = SimpleNamespace(prepare=_prepare_selection, commit=_select, state=_state_of_selection)
first_selection = SimpleNamespace(
    prepare=lambda folder: score_all(_shards(folder), folder), commit=_select, state=_state_of_selection
)
shards = SimpleNamespace(
    prepare=_prepare_selection, commit=lambda folder: write_all(folder, folder / "kept"), state=_state_of_shards
)
