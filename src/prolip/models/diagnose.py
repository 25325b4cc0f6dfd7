"""Why a file holds no weights and a folder no model, and what to give instead: one sentence each."""

from __future__ import annotations

import pickle
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from prolip.utils.documents import check_types, read_json
from prolip.utils.messages import appearance_of, explain_missing, first_few

CONFIG_NAMES = ("config.json", "open_clip_config.json")
WEIGHT_NAMES = ("model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin", "open_clip_pytorch_model.bin")
#: What a folder of OpenCLIP's model with readers has beside it.
READERS = "readers.safetensors"
SENTENCEPIECE_NAMES = ("spiece.model", "sentencepiece.model", "tokenizer.model")
FOLDER_NAMES = ("tokenizer.json", "tokenizer_config.json")
#: All files of a tokenizer that go with a model.
TOKENIZER_NAMES = (
    *FOLDER_NAMES,
    *SENTENCEPIECE_NAMES,
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
WEIGHT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
WANTED = f"local-dir: wants one with {CONFIG_NAMES[0]} and {WEIGHT_NAMES[0]}"
#: What cards and pages read of a run's configuration, and its type.
RUN_SETTINGS: dict[str, dict[str, Any]] = {
    "data": {"train_data": str | None, "batch_size": int | None, "select": str | None},
    "model": {"pretrained": str | None},
    "run": {"precision": str | None},
    "val": {"val_data": str | list | None, "val_select": str | None, "val_names": str | None, "val_tasks": list | None},
}
STEP = re.compile(r"\D*(\d+)\.pt")
GLOBAL = re.compile(r"(?:GLOBAL|Unsupported class|Unsupported global:?(?: GLOBAL)?) ([A-Za-z_][\w.]*)")


# --- files ------------------------------------------------------------------------------------------------------------
def why_no_weights(path: Path, error: Exception) -> str:
    """Why torch or safetensors could not read a file of weights, and what to do."""
    if "TorchScript" in str(error):
        return (
            f"{path} is a TorchScript archive, which holds code: if you trust its source, pass weights_only=False,"
            f" or save torch.jit.load({str(path)!r}).state_dict() with torch.save and give that file"
        )
    if foreign := foreign_objects(path, error):
        plain = path.with_suffix(".tensors.pt")
        return (
            f"{path} holds Python objects besides tensors ({foreign}), and to read these is to run code from"
            f' the file. If you trust its source, save its tensors alone: python -c "import torch; s = torch.load('
            f"'{path}', weights_only=False); torch.save(s.get('state_dict', s.get('model', s)), '{plain}')\" and give"
            f" {plain} (in Python, weights_only=False reads it as it is)"
        )
    wanted = "give a .safetensors, .pt, .pth or .bin file"
    if path.suffix == ".json":
        return f"{path} is a configuration without weights: {wanted}, or the model's folder as local-dir:FOLDER"
    seen = appearance_of(path)
    if any(kind in seen.what for kind in ("zip archive", "safetensors", "pickle")):
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0][:120]
        return f"{path} cannot be read, is it complete? ({reason}): copy or fetch it again"
    remedy = wanted if seen.remedy == "check the path" else seen.remedy
    return f"{path} cannot be read as weights, it is {seen.what}: {remedy}"


def foreign_objects(path: Path, error: Exception) -> str:
    """The classes and functions beside tensors that reading a torch file would call; "" where that is not why."""
    if not isinstance(error, pickle.UnpicklingError):
        return ""
    found: list[str] = []
    with suppress(Exception):  # only of files in torch's present format, and only of whole ones
        found = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    return first_few(found or GLOBAL.findall(str(error))[:1], 3)


# --- folders ----------------------------------------------------------------------------------------------------------
def is_run(folder: Path) -> bool:
    """Whether a folder is that of a training run, whose config.json is no model's."""
    return "method" in json_of(folder / "config.json")


def is_model(folder: Path) -> bool:
    """Whether a folder holds a configuration with weights."""
    files = [any((folder / name).is_file() for name in names) for names in (CONFIG_NAMES, WEIGHT_NAMES)]
    return all(files) and not is_run(folder)


def json_of(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none."""
    with suppress(OSError, ValueError):
        values = read_json(path)
        return values if isinstance(values, dict) else {}
    return {}


def why_no_model(folder: Path) -> str | None:
    """Why a path after local-dir: is no model's folder, and which is meant; None where nothing is known of it."""
    if folder.is_file():
        return why_a_file(folder)
    if not folder.exists():
        return f"{folder} is no folder: {WANTED}. {explain_missing(str(folder))}"
    if is_run(folder):
        return f"{folder} is the folder of a run: {model_of(folder)}"
    if is_run(folder.parent) and checkpoints_in(folder):
        return f"{folder} holds the checkpoints of a run: {model_of(folder.parent)}"
    below = [place for place in sorted(folder.glob("*")) if place.is_dir() and (is_run(place) or is_model(place))]
    if below and not any((folder / name).is_file() for name in (*CONFIG_NAMES, *WEIGHT_NAMES)):
        what = f"is the folder of a run: {model_of(below[0])}" if is_run(below[0]) else "is a model's folder: give that"
        return f"{folder} is one level too high: {below[0]} {what}"
    return None


def why_a_file(path: Path) -> str:
    """What to give in place of a file where a model's folder is wanted."""
    if is_model(path.parent):
        return f"{path} is a file: give the folder that holds it, local-dir:{path.parent}"
    run = path.parent.parent
    if is_run(run):
        return f"{path} is a checkpoint of a run: {model_of(run, path)}"
    return f"{path} is a file: {WANTED}; weights alone are --model NAME --pretrained {path}"


def model_of(run: Path, checkpoint: Path | None = None) -> str:
    """What to give to use the model of a run. checkpoint: the one of its files that was asked for."""
    folders = [run / name for name in ("model", "model_ema", "model_swa", "best") if is_model(run / name)]
    files = [checkpoint] if checkpoint else checkpoints_in(run / "checkpoints")
    ways = [f"local-dir:{folder}" for folder in folders[:1]]
    if files and (checkpoint or not folders):
        name = (json_of(run / "config.json").get("model") or {}).get("model", "NAME")
        ways.append(f"--model {name} --pretrained {files[-1]}")
    if not ways:
        return "it has left neither a model nor a checkpoint yet: train on with --resume auto"
    return f"use {' or '.join(ways)}"


def checkpoints_in(folder: Path) -> list[Path]:
    """Files of a folder that are named like checkpoints, the newest last."""
    found = [(int(match[1]), path) for path in folder.glob("*.pt") if (match := STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def why_not_in(folder: Path, names: tuple[str, ...], what: str) -> str:
    """Why a folder that holds none of the files `names` does not: an error's whole message."""
    there = first_few(sorted(place.name for place in folder.iterdir()), 8) if folder.is_dir() else ""
    return why_no_model(folder) or f"no {what} in {folder}: want one of {', '.join(names)}, found {there or 'nothing'}"


def why_no_name(name: str) -> str | None:
    """What a model's name that is none was meant to be, where it is or looks like a path; None for other names."""
    place, colon, rest = name.partition(":")
    if rest.startswith("//"):
        page = re.match(r"//(?:www\.)?huggingface\.co/([^/]+/[^/]+)", rest)
        remedy = f"give hf-hub:{page[1]}" if page else "fetch its folder, and give local-dir:FOLDER"
        return f"the model {name!r} is an address: {remedy}"
    if colon and "/" not in place:
        schema = "hf-hub" if place.lower().startswith("hf") else "local-dir"
        return f"the model {name!r} begins with no known word: did you mean {schema}:{rest}?"
    path = Path(name).expanduser()
    if path.is_dir():
        return why_no_model(path) or f"{name} is a folder: give it as local-dir:{name}"
    if path.is_file():
        return why_a_file(path)
    if path.suffix in WEIGHT_SUFFIXES or name.startswith((".", "/", "~")) or name.count("/") > 1:
        wanted = "A model is a name, local-dir:FOLDER or hf-hub:ORG/NAME"
        return f"there is no {name}: {explain_missing(str(path))} {wanted}"
    return None


def check_config(config: Any, path: object) -> dict[str, Any]:
    """A run's configuration; ValueError where what cards and pages read of it has another type."""
    check_types(config, {"method": str | None}, path)
    for section, kinds in RUN_SETTINGS.items():
        check_types(config.get(section, {}), kinds, f"{section} of {path}")
    return config
