"""Checkpoints in shards: all ranks write them, any number of ranks reads them, damage is found."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from distributed_helpers import run_ranks
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from prolip.utils.flags import FlagError
from training.checkpoint.files import (
    CheckpointWriter,
    Storage,
    by_path,
    check_checkpoint,
    find_checkpoint,
    list_steps,
    load_checkpoint,
    load_shards,
    read_checkpoint,
    shards_of,
)
from training.parallel import World

SHAPES = {"weight": (5, 3), "bias": (5,)}


def values(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sharded(ranks: int) -> nn.Module:
    module = nn.Linear(3, 5)
    fully_shard(module, mesh=init_device_mesh("cpu", (ranks,)))
    return module


def fill(module: nn.Module, step: int) -> dict[str, Any]:
    with torch.no_grad():
        for name, value in values(step).items():
            own = getattr(module, name)
            own.copy_(torch.distributed.tensor.distribute_tensor(value, own.device_mesh, own.placements))
    return {"step": step, "objective": module.state_dict(), "whole": [torch.full((2,), float(step))]}


def write(rank: int, ranks: int, url: str, steps: tuple[int, ...], keep: int) -> list[str]:
    said: list[str] = []
    module, group = sharded(ranks), dist.new_group(backend="gloo")
    saver = CheckpointWriter(Storage(url), keep=keep, say=said.append, group=group)
    for step in steps:
        saver.submit(fill(module, step))
        fill(module, -step)  # changes after the copy are not in the file
    saver.settle(final=True)
    saver.close()
    return said


def read(rank: int, ranks: int, address: str) -> dict[str, Any]:
    module = sharded(ranks)
    state = read_checkpoint(address, World(rank=rank, world_size=ranks))
    patterns = by_path({"objective": module.state_dict()})
    found = load_shards(state, shards_of(address), patterns, dist.group.WORLD)["objective"]
    assert all(isinstance(part, DTensor) for part in found.values())
    return {name: part.to_local() for name, part in found.items()} | {"whole": state["whole"][0]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    first, second = run_ranks(2, write, 2, str(folder), (1, 2, 3), 2)
    assert [text.split(" (")[0] for text in first] == [f"saved {folder}/step_{step}.pt" for step in (1, 2, 3)]
    assert second == []
    return folder


def test_all_ranks_write_and_one_process_reads_the_whole(saved):
    assert sorted(Storage(str(saved)).names()) == ["step_2.pt", "step_2.shards", "step_3.pt", "step_3.shards"]
    assert {path.name for path in (saved / "step_3.shards").glob("__*")} == {"__0_0.distcp", "__1_0.distcp"}
    for step in (2, 3):
        state = load_checkpoint(saved / f"step_{step}.pt")
        assert state["step"] == step and state["whole"][0].eq(step).all()
        for name, value in values(step).items():
            assert torch.equal(state["objective"][name], value)


@pytest.mark.parametrize("ranks", [1, 3])
def test_any_number_of_ranks_reads_its_own_rows(saved, ranks):
    parts = run_ranks(ranks, read, ranks, f"{saved}/step_3.pt")
    for name, value in values(3).items():
        assert torch.equal(torch.cat([part[name] for part in parts]), value)
    assert all(part["whole"].eq(3).all() for part in parts)


def behind_a_url(rank: int) -> tuple[Any, ...]:
    """Return the content of a store after each step; the store is this process's memory."""
    fsspec.register_implementation("gs", MemoryFileSystem, clobber=True)
    write(rank, 1, "gs://far/run", (1, 2), 1)
    storage = Storage("gs://far/run")
    there = [sorted(storage.names())]
    for part in ("step_2.shards", "step_2.pt"):
        storage.rename(part, f"superseded_{part}")
    there.append(sorted(storage.names()))
    state = load_checkpoint("gs://far/run/superseded_step_2.pt")
    storage.delete("superseded_step_2.pt")
    return *there, storage.sweep(), storage.names(), state["objective"]["bias"]


def test_shards_behind_a_url_are_read_renamed_and_deleted_with_their_file():
    [(first, renamed, swept, left, bias)] = run_ranks(1, behind_a_url)
    assert first == ["step_2.pt", "step_2.shards"] and swept == ["superseded_step_2.shards"] and left == []
    assert renamed == ["superseded_step_2.pt", "superseded_step_2.shards"] and torch.equal(bias, values(2)["bias"])


DAMAGE = {
    "flipped": "step_3.shards/__1_0.distcp is damaged",
    "cut": "step_3.shards/__1_0.distcp is truncated",
    "gone": "step_3.shards/__1_0.distcp is missing",
    "index": "step_3.shards/.metadata cannot be read",
}


@pytest.mark.parametrize("what", DAMAGE)
def test_latest_passes_over_damaged_shards_and_names_them(saved, tmp_path, what):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    part = tmp_path / "step_3.shards" / ("__1_0.distcp" if what != "index" else ".metadata")
    content = bytearray(part.read_bytes())
    if what == "flipped":
        content[content.index(values(3)["weight"][3:].numpy().tobytes()[:8])] ^= 1
    part.write_bytes(content if what == "flipped" else content[: len(content) // 2])
    if what == "gone":
        part.unlink()
    address, passed_over = find_checkpoint("latest", Storage(str(tmp_path)))
    assert address == f"{tmp_path}/step_2.pt" and len(passed_over) == 1 and DAMAGE[what] in passed_over[0]


def test_a_file_without_its_shards_says_what_is_missing(saved, tmp_path):
    (tmp_path / "step_3.pt").write_bytes((saved / "step_3.pt").read_bytes())
    check_checkpoint(f"{tmp_path}/step_3.pt")
    with pytest.raises(FlagError, match=r"step_3\.shards cannot be loaded .*next to its checkpoint file"):
        load_checkpoint(f"{tmp_path}/step_3.pt")


def apart(rank: int, folder: str) -> tuple[str, list[str]]:
    """Each rank writes to a disk of its own; then both to one, where rank 1 finds no room the first time."""
    saver = CheckpointWriter(Storage(f"{folder}/{rank}"), group=dist.new_group(backend="gloo"))
    saver.submit(fill(sharded(2), 1))
    found, said = "", []
    try:
        saver.settle(final=True)
    except OSError as error:
        found = str(error)
    saver.close()
    saver, module = CheckpointWriter(Storage(folder), say=said.append, group=dist.new_group(backend="gloo")), sharded(2)
    if rank == 1:
        Path(folder, "step_1.shards/__1_0.distcp").mkdir(parents=True)
    dist.barrier()
    for step in (1, 2):
        saver.submit(fill(module, step))
        saver.settle()
    saver.close()
    return found, said


def test_ranks_that_share_no_folder_or_cannot_write_say_so_and_the_run_goes_on(tmp_path):
    (first, one), (_, other) = run_ranks(2, apart, str(tmp_path))
    assert "step_1.shards/__1_0.distcp is missing" in first and "give a shared --checkpoint-dir" in first
    assert not (tmp_path / "0/step_1.pt").exists()
    for said in (one, other):
        assert said[0].startswith("warning: a checkpoint was NOT written; the run continues: OSError: ")
        assert "on rank 1: " in said[0]
    assert list_steps(Storage(str(tmp_path))) == [2] and len(one) == 2 and len(other) == 1
