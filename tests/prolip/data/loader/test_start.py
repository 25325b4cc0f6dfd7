"""The start of a run on several ranks: one of them looks at the files, and all have the data, or the same error."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from distributed_helpers import run_ranks
from tiny_tars import letters, plain, png, write_shards

from prolip.data.config import DataConfig
from prolip.data.loader import build_loader
from prolip.data.reading.shard_index import INDEX_NAME, build_index
from training.config import build_config
from training.evaluate import open_validation
from training.parallel.distributed import World, from_first

NOTED = {"stat": "looked up", "open": "opened", "os.listdir": "listed", "os.scandir": "listed", "built": "built"}


class Calls:
    """Which files below a folder this process and those it forks look up, open or list, a line each in a file."""

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
    """[what, path] of every call of a rank before its loader was built, and after."""
    lines = [json.loads(line) for line in Path(f"{folder}.{rank}").read_text().splitlines()]
    built = lines.index(["built", str(folder)])
    return lines[:built], lines[built + 1 :]


def keys_of(loader, epochs: int = 2) -> list[list[str]]:
    keys = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        keys += [batch["key"] for batch in loader]
    loader.close()
    return keys


def read_on_rank(rank: int, configs: dict[str, DataConfig], folder: str) -> dict[str, list[list[str]]]:
    """What a rank of two reads of each data, its calls noted."""
    multiprocessing.set_start_method("fork", force=True)  # as in a run: workers note their calls, too
    once, keys = partial(from_first, world=World(rank=rank, world_size=2)), {}
    for kind, config in configs.items():
        calls = Calls(f"{folder}/{kind}", rank)
        loader = build_loader(config, plain, letters, rank=rank, world_size=2, once=once)
        calls.note("built", calls.folder)
        keys[kind] = keys_of(loader)
    return keys


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


SHARDS = {
    "indexed": {},
    "by two workers": {"workers": 2},
    "counted": {},
    "one shard": {},
    "resampled": {"dataset_resampled": True, "train_data_upsampling_factors": "2::1"},
}
ROWS = {"table": {}, "folder": {}, "split": {"split": 0.4}}


def shards_of(kind: str, folder: Path) -> str:
    """Shards of a kind in a folder; what --train-data calls them."""
    urls = write_shards(folder, [30] if kind == "one shard" else [6, 3, 4, 5, 6, 8])
    if kind in ("indexed", "by two workers"):
        build_index(urls, str(folder / INDEX_NAME))
    return f"{folder}/{{0..2}}.tar::{folder}/{{3..5}}.tar" if kind == "resampled" else f"{folder}/*.tar"


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    """A folder of every kind of data, read by two ranks, which read what they read where each looks for itself."""
    root, configs = tmp_path_factory.mktemp("start"), {}
    for kind, settings in (SHARDS | ROWS).items():
        (folder := root / kind).mkdir()
        table = "" if kind in SHARDS else write_table(folder)
        data = shards_of(kind, folder) if kind in SHARDS else table if kind == "table" else f"images:{folder}/in"
        configs[kind] = DataConfig(train_data=data, **{"batch_size": 2, "workers": 0, "shuffle_buffer": 5} | settings)
    found = run_ranks(2, read_on_rank, configs, str(root))
    for rank in range(2):
        for kind, config in configs.items():
            want = keys_of(build_loader(config, plain, letters, rank=rank, world_size=2))
            assert found[rank][kind] == want, (rank, kind)
    assert all(found[0][kind] != found[1][kind] for kind in configs)
    return root


@pytest.mark.parametrize("kind", SHARDS)
def test_one_rank_looks_every_shard_up_once_and_each_reads_its_own(places, kind):
    shards = sorted(map(str, (places / kind).glob("*.tar")))
    before, _ = calls_of(places / kind, 0)
    assert sorted(path for what, path in before if what == "looked up" and path in shards) == shards
    before, after = calls_of(places / kind, 1)
    opened, looked_up = ({path for what, path in after if what == kind} for kind in ("opened", "looked up"))
    assert before == [] and set() < looked_up == opened <= set(shards) and not any("listed" in call for call in after)


@pytest.mark.parametrize("kind", ROWS)
def test_one_rank_reads_a_table_or_a_folder_and_each_opens_its_own_images(places, kind):
    before, _ = calls_of(places / kind, 0)
    assert Counter(what for what, _ in before)["looked up"] >= 2
    before, after = calls_of(places / kind, 1)
    assert before == [] and {what for what, _ in after} == {"opened"}
    assert {Path(path).suffix for _, path in after} == {".png"}


def failure(rank: int, data: str, settings: dict) -> tuple[str, str]:
    config = DataConfig(train_data=data, batch_size=2, workers=0, **settings)
    once = partial(from_first, world=World(rank=rank, world_size=2))
    with pytest.raises(Exception) as caught:  # noqa: PT011, B017
        build_loader(config, plain, letters, rank=rank, world_size=2, once=once)
    return type(caught.value).__name__, str(caught.value)


def failures(rank: int, folder: str) -> list[tuple[str, str]]:
    """What a rank says of data that cannot be used, one after the other: none is left behind by an error."""
    cases = [
        (f"{folder}/{{0..3}}.tar", {}),
        (f"{folder}/0.tar", {}),
        (f"{folder}/odd/*.tar", {}),
        (f"{folder}/{{1..2}}.tar", {"select": "group=none"}),
        (f"{folder}/bad/0.tar", {}),
        (f"{folder}/no.csv", {}),
        ("nosuch://x/0.tar", {}),
        (f"{folder}/{{0..2}}.tar", {"shard_index": f"{folder}/no.json"}),
    ]
    return [failure(rank, *case) for case in cases]


def test_what_the_first_rank_finds_wrong_every_rank_says_in_the_same_words(tmp_path):
    urls = write_shards(tmp_path, [4, 4, 4])
    build_index(urls, str(tmp_path / INDEX_NAME))
    Path(urls[0]).write_bytes(Path(urls[0]).read_bytes() + bytes(10240))
    for name in ("odd", "bad"):
        (tmp_path / name).mkdir()
        write_shards(tmp_path / name, [4])
    (tmp_path / "odd" / INDEX_NAME).write_text("{")
    (tmp_path / "bad" / "0.tar").write_bytes(b"no tar")
    first, other = run_ranks(2, failures, str(tmp_path))
    assert first == other
    wanted = [
        "1 of 4 shards are missing",
        "says that",
        "is no JSON",
        "that fits --select",
        "is no tar archive",
        "is missing",
        "is not opened",
        "--shard-index",
    ]
    for (_, said), part in zip(first, wanted, strict=True):
        assert part in said, (part, said)
    assert [kind for kind, _ in first] == [
        "FileNotFoundError",
        "ValueError",
        "ValueError",
        "ValueError",
        "ValueError",
        "FileNotFoundError",
        "ValueError",
        "OSError",
    ]


def open_sets(rank: int, folder: str, ranks: int = 2) -> list[tuple]:
    """What is known of the test sets of a run, and their samples."""
    calls = Calls(folder, rank) if ranks > 1 else None
    config = build_config(
        "prolip",
        {
            "model": {"model": "ProLIP-ViT-test"},
            "data": {"train_data": f"{folder}/*.tar", "batch_size": 2},
            "val": {
                "val_data": (f"shards:{folder}/{{0..1}}.tar", f"csv:{folder}/d.csv", f"images:{folder}/in"),
                "val_split": "0.5",
            },
        },
    )
    tasks = open_validation(config, None, None, World(rank=rank, world_size=ranks)).tasks
    if calls is not None:
        calls.note("built", folder)
    samples = [[(one.key, one.captions, one.label, one.content) for one in task.samples()] for task in tasks]
    return [(task.name, task.fingerprint, task.kind, task.classnames, part) for task, part in zip(tasks, samples)]


def test_one_rank_opens_the_test_sets(tmp_path):
    (folder := tmp_path / "data").mkdir()
    write_shards(folder, [5, 7])
    write_table(folder)
    want = open_sets(0, str(folder), ranks=1)
    assert run_ranks(2, open_sets, str(folder)) == [want, want] and all(samples for *_, samples in want)
    assert calls_of(folder, 0)[0] and calls_of(folder, 1)[0] == []
