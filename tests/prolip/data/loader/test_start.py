"""The start of a run on several ranks: one of them reads the files, and all have the data, or the same error."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from functools import partial
from pathlib import Path

import pytest
from distributed_helpers import run_ranks
from tiny_loaders import epoch
from tiny_tars import letters, plain, png, write_shards

from prolip.data.config import DataConfig
from prolip.data.loader import build_loader
from prolip.data.reading.shard_index import INDEX_NAME, build_index
from training.parallel import World, from_first

NOTED = {"stat": "looked up", "open": "opened", "os.listdir": "listed", "os.scandir": "listed", "built": "built"}
RESAMPLED = {"dataset_resampled": True, "train_data_upsampling_factors": "2::1"}
SHARDS = {"indexed": {"workers": 2}, "one shard": {}, "resampled": RESAMPLED}
DATA = SHARDS | {"table": {"split": 0.4}}
#: Data that cannot be used, and its error.
WRONG = [
    ("{0..3}.tar", {}, "1 of 4 shards are missing", FileNotFoundError),
    ("0.tar", {}, "says that", ValueError),
    ("odd/*.tar", {}, "is not JSON", ValueError),
    ("bad/0.tar", {}, "is not a tar archive", ValueError),
    ("{0..2}.tar", {"shard_index": "/no.json"}, "--shard-index", OSError),
]


class Calls:
    """The files below a folder that this process and its forks look up, open or list, a line each in a file."""

    def __init__(self, folder: str, rank: int):
        self.folder, self.log = folder, os.open(f"{folder}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        sys.addaudithook(lambda event, args: self.note(event, args[0]) if event in NOTED else None)
        for name in ("stat", "lstat"):
            setattr(os, name, self.noting(getattr(os, name)))

    def note(self, event, path):
        if isinstance(path, (str, Path)) and str(path).startswith(self.folder):
            os.write(self.log, json.dumps([NOTED[event], str(path)]).encode() + b"\n")

    def noting(self, call):
        def noted(path, *args, **options):
            self.note("stat", path)
            return call(path, *args, **options)

        return noted


def calls_of(folder: Path, rank: int) -> tuple[list[list[str]], list[list[str]]]:
    """Return [call, path] of every call of a rank before its loader was built, and after."""
    lines = [json.loads(line) for line in Path(f"{folder}.{rank}").read_text().splitlines()]
    built = lines.index(["built", str(folder)])
    return lines[:built], lines[built + 1 :]


def keys_of(loader) -> list[list[str]]:
    keys = [batch["key"] for number in range(2) for batch in epoch(loader, number)]
    loader.close()
    return keys


def on_rank(rank: int, configs: dict[str, DataConfig], root: str) -> tuple[dict, list]:
    """Return the data that a rank of two reads, with its calls recorded, and its errors."""
    multiprocessing.set_start_method("fork", force=True)  # as in a run: workers note their calls, too
    place = {"rank": rank, "world_size": 2, "once": partial(from_first, world=World(rank=rank, world_size=2))}
    keys = {}
    for kind, config in configs.items():
        calls = Calls(f"{root}/{kind}", rank)
        loader = build_loader(config, plain, letters, **place)
        calls.note("built", calls.folder)
        keys[kind] = keys_of(loader)
    errors = []
    for data, settings, said, kind in WRONG:
        config = DataConfig(train_data=f"{root}/wrong/{data}", batch_size=2, workers=0, **settings)
        with pytest.raises(kind, match=said) as caught:
            build_loader(config, plain, letters, **place)
        errors.append(str(caught.value))
    return keys, errors


def write_table(folder: Path) -> str:
    """Twelve images in folders of three classes, and a table of them."""
    lines = ["filepath,title"]
    for number in range(12):
        place = folder / "in" / f"class {number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.png").write_bytes(png(number))
        lines.append(f"{place}/{number}.png,caption {number}")
    (folder / "d.csv").write_text("\n".join(lines))
    return str(folder / "d.csv")


def write_data(kind: str, folder: Path) -> str:
    """Data of a kind in a folder; its --train-data."""
    folder.mkdir()
    if kind == "table":
        return write_table(folder)
    urls = write_shards(folder, [30] if kind == "one shard" else [6, 3, 4, 5, 6, 8])
    if kind == "indexed":
        build_index(urls, str(folder / INDEX_NAME))
    return f"{folder}/{{0..2}}.tar::{folder}/{{3..5}}.tar" if kind == "resampled" else f"{folder}/*.tar"


def write_wrong(folder: Path) -> None:
    (folder / "odd").mkdir(parents=True), (folder / "bad").mkdir()
    urls = write_shards(folder, [4, 4, 4])
    build_index(urls, str(folder / INDEX_NAME))
    Path(urls[0]).write_bytes(Path(urls[0]).read_bytes() + bytes(10240))
    write_shards(folder / "odd", [4])
    (folder / "odd" / INDEX_NAME).write_text("{")
    (folder / "bad" / "0.tar").write_bytes(b"no tar")


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A folder of every kind of data, and what two ranks found there."""
    root, configs = tmp_path_factory.mktemp("start"), {}
    for kind, settings in DATA.items():
        options = {"batch_size": 2, "workers": 0, "shuffle_buffer": 5} | settings
        configs[kind] = DataConfig(train_data=write_data(kind, root / kind), **options)
    write_wrong(root / "wrong")
    return root, configs, run_ranks(2, on_rank, configs, str(root))


def test_ranks_read_what_they_would_read_if_each_looked_for_itself(started):
    _, configs, found = started
    for rank, (keys, *_) in enumerate(found):
        for kind, config in configs.items():
            assert keys[kind] == keys_of(build_loader(config, plain, letters, rank=rank, world_size=2)), (rank, kind)
    assert all(found[0][0][kind] != found[1][0][kind] for kind in configs)


@pytest.mark.parametrize("kind", SHARDS)
def test_one_rank_looks_every_shard_up_once_and_each_reads_its_own(started, kind):
    place = started[0] / kind
    shards = sorted(map(str, place.glob("*.tar")))
    before, _ = calls_of(place, 0)
    assert sorted(path for what, path in before if what == "looked up" and path in shards) == shards
    before, after = calls_of(place, 1)
    opened, looked_up = ({path for what, path in after if what == kind} for kind in ("opened", "looked up"))
    assert before == [] and set() < looked_up == opened <= set(shards) and not any("listed" in call for call in after)


def test_one_rank_reads_a_table_and_each_opens_its_own_images_and_reports_the_errors_of_the_first(started):
    place, (_, first), (_, other) = started[0] / "table", *started[2]
    assert sum(what == "looked up" for what, _ in calls_of(place, 0)[0]) >= 2
    before, after = calls_of(place, 1)
    assert before == [] and {what for what, _ in after} == {"opened"}
    assert {Path(path).suffix for _, path in after} == {".png"}
    assert first == other and len(first) == len(WRONG)  # in the same words
