"""Commits that tests/faults.py interrupts: models, graphs, embeddings and checkpoints that a person keeps.

The graphs are stand-ins: these commits test only the writing.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fitted_models import CONFIG, openclip_model

import prolip
from prolip import export
from prolip.embeddings import Pairs
from prolip.fitting.attach import attach
from prolip.hub import sharing as saving
from prolip.hub.sharing import CardInfo, find_source
from prolip.models.checkpoint import save_pretrained
from training.checkpoint.files import CheckpointWriter, Storage, find_checkpoint, load_checkpoint

made: dict[Any, Any] = {}


def content(folder: Path) -> dict[str, int]:
    """Files by name, but for the hidden ones of writers that were killed."""
    return {path.name: hash(path.read_bytes()) for path in folder.iterdir() if path.name[0] != "."}


def _model(folder: Path) -> dict[str, int]:
    return content(folder / "model")


def random_pairs(seed: int, width: int) -> Pairs:
    """Return random pairs of a model of this width."""
    generator = torch.Generator().manual_seed(seed)
    image, text = (torch.nn.functional.normalize(torch.randn(64, width, generator=generator), dim=1) for _ in range(2))
    return Pairs.in_rows(image, text, 10.0, text_ids=torch.randint(1, 99, (64, 8), generator=generator))


# --- a model of OpenCLIP's with fitted variances ----------------------------------------------------------------------
def _prepare_fitted(former: bool, folder: Path) -> None:
    made["openclip"] = openclip_model(folder / "plain")
    (folder / "model").mkdir()
    (folder / "model/notes.txt").write_text("a person's")
    if former:
        _fit(0, folder)


def _fit(seed: int, folder: Path) -> None:
    attach(*made["openclip"], None, random_pairs(seed, 16), CONFIG, folder / "model")


fitted_new, fitted_again = (
    SimpleNamespace(prepare=partial(_prepare_fitted, former), commit=partial(_fit, 1), state=_model)
    for former in (False, True)
)


# --- one of ours ------------------------------------------------------------------------------------------------------
def _save_ours(seed: int, folder: Path) -> None:
    torch.manual_seed(seed)
    save_pretrained(prolip.create_model("ProLIP-ViT-test"), folder / "model")


ours = SimpleNamespace(prepare=partial(_save_ours, 0), commit=partial(_save_ours, 1), state=_model)


# --- a model with its card --------------------------------------------------------------------------------------------
def _prepare_hub(folder: Path) -> None:
    for number in range(2):
        place = folder / str(number)
        _save_ours(number, place)
        (place / "eval.json").write_text(json.dumps({"names/i2t/R@1": 0.25 + number / 2}))
        made[number] = find_source(str(place / "model"), str(place / "eval.json"))
    cards = [
        saving.make_card(made[number], CardInfo(f"model {number}", None, None), "local-dir:demo") for number in (0, 1)
    ]
    saving.make_card = lambda source, said, address: cards[source is made[1]]
    _commit_hub(0, folder)


def _commit_hub(number: int, folder: Path) -> None:
    saving.save(made[number], folder / "shared", CardInfo("demo", None, None), "local-dir:demo")


hub = SimpleNamespace(
    prepare=_prepare_hub, commit=partial(_commit_hub, 1), state=lambda folder: content(folder / "shared")
)


# --- graphs -----------------------------------------------------------------------------------------------------------
def _prepare_graphs(folder: Path) -> None:
    made["graphs"] = prolip.create_model("ProLIP-ViT-test").eval()
    export.export_program = lambda encoder: encoder.name.encode()
    torch.export.save = lambda program, file, extra_files: file.write(100 * program)
    (folder / "graphs").mkdir()
    for name in ("image.pt2", "text.pt2", "text.onnx"):
        (folder / "graphs" / name).write_text("former")


graphs = SimpleNamespace(
    prepare=_prepare_graphs,
    commit=lambda folder: export.export_pt2(made["graphs"], folder / "graphs"),
    state=lambda folder: content(folder / "graphs"),
)


# --- embeddings -------------------------------------------------------------------------------------------------------
def _save_pairs(seed: int, folder: Path) -> None:
    random_pairs(seed, 16).save(folder / "pairs.safetensors")


pairs = SimpleNamespace(prepare=partial(_save_pairs, 0), commit=partial(_save_pairs, 1), state=content)


# --- a checkpoint -----------------------------------------------------------------------------------------------------
def _save_checkpoint(step: int, folder: Path) -> None:
    said: list[str] = []
    saver = CheckpointWriter(Storage(str(folder / "checkpoints")), keep=2, say=said.append)
    saver.submit({"step": step, "weights": torch.full((1000,), float(step))})
    saver.settle(final=True)
    saver.close()
    if any(text.startswith("warning") for text in said):
        raise OSError(said)


def _prepare_checkpoints(folder: Path) -> None:
    for step in (1, 2):
        _save_checkpoint(step, folder)


def _latest(folder: Path) -> tuple[int, list[str]]:
    address, passed_over = find_checkpoint("latest", Storage(str(folder / "checkpoints")))
    assert address is not None
    return load_checkpoint(address)["step"], passed_over


checkpoint = SimpleNamespace(prepare=_prepare_checkpoints, commit=partial(_save_checkpoint, 3), state=_latest)
