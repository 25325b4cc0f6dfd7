"""Explanations of files without weights and folders without a model, each with a remedy."""

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
READERS = "readers.safetensors"  # readers and a method's parts, next to OpenCLIP's model in a folder
FIT = "fit.json"  # the data and the counts of `prolip uncertainty`, next to the model
SENTENCEPIECE_NAMES = ("spiece.model", "sentencepiece.model", "tokenizer.model")
FOLDER_NAMES = ("tokenizer.json", "tokenizer_config.json")
VOCABULARY_NAMES = ("vocab.json", "merges.txt", "vocab.txt", "special_tokens_map.json", "added_tokens.json")
#: All tokenizer files in a model's folder.
TOKENIZER_NAMES = (*FOLDER_NAMES, *SENTENCEPIECE_NAMES, *VOCABULARY_NAMES)
TRAINED = ("model", "model_ema", "model_swa", "best")  # model folders of a run
EXPECTED = f"local-dir: needs a folder with {CONFIG_NAMES[0]} and {WEIGHT_NAMES[0]}"
#: Settings in a run's configuration that cards and pages read, with their types.
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
    """Explain why torch or safetensors could not read a file of weights, with the remedy."""
    if "TorchScript" in str(error):
        return f"{path} is a TorchScript archive, which holds code: pass weights_only=False if you trust its source"
    if foreign := foreign_objects(path, error):
        plain = path.with_suffix(".tensors.pt")
        return (
            f"{path} holds Python objects other than tensors ({foreign}), and reading them runs code from the file."
            f' If you trust its source, save only its tensors: python -c "import torch; s = torch.load('
            f"'{path}', weights_only=False); torch.save(s.get('state_dict', s.get('model', s)), '{plain}')\" and give"
            f" {plain} (in Python, weights_only=False reads the original file)"
        )
    remedy = "give a .safetensors, .pt, .pth or .bin file"
    if path.suffix == ".json":
        return f"{path} is a configuration without weights: {remedy}, or the model's folder as local-dir:FOLDER"
    seen = appearance_of(path)
    if any(kind in seen.what for kind in ("zip archive", "safetensors", "pickle")):
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0][:120]
        return f"{path} cannot be read and may be incomplete ({reason}): copy or fetch it again"
    remedy = remedy if seen.remedy == "check the path" else seen.remedy
    return f"{path} holds no weights, it is {seen.what}: {remedy}"


def foreign_objects(path: Path, error: Exception) -> str:
    """List the classes and functions other than tensors that reading a torch file would call; "" for other errors."""
    if not isinstance(error, pickle.UnpicklingError):
        return ""
    found: list[str] = []
    with suppress(Exception):  # only for complete files in torch's current format
        found = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    return first_few(found or GLOBAL.findall(str(error))[:1], 3)


# --- folders ----------------------------------------------------------------------------------------------------------
def is_run(folder: Path) -> bool:
    """Return True for the folder of a training run, whose config.json is not a model's."""
    return "method" in json_of(folder / "config.json")


def is_model(folder: Path) -> bool:
    """Return True if a folder holds a configuration with weights."""
    return not is_run(folder) and all(
        any((folder / name).is_file() for name in names) for names in (CONFIG_NAMES, WEIGHT_NAMES)
    )


def json_of(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none."""
    values: Any = None
    with suppress(OSError, ValueError):
        values = read_json(path)
    return values if isinstance(values, dict) else {}


def why_no_model(path: Path) -> str | None:
    """Explain why a path after local-dir: is not a model's folder, and what to give; None if the path looks right."""
    for run in (path, path.parent, path.parent.parent):
        if is_run(run) and (run == path or path.suffix == ".pt" or path.name == "checkpoints"):
            what = {run: "is the folder of a run", run / "checkpoints": "holds the checkpoints of a run"}
            chosen = path if path.suffix == ".pt" and path.is_file() else None
            return f"{path} {what.get(path, 'is a checkpoint of a run')}: {model_of(run, chosen)}"
    if not path.exists():
        return f"{path} does not exist: {EXPECTED}. {explain_missing(str(path))}"
    if path.is_file():
        own = f"give its folder, local-dir:{path.parent}" if is_model(path.parent) else EXPECTED
        return f"{path} is a file: {own}; for weights alone: --model NAME --pretrained {path}"
    return None


def model_of(run: Path, checkpoint: Path | None = None) -> str:
    """Describe how to use the model of a run. checkpoint: the requested file, if any."""
    folders = [run / name for name in TRAINED if is_model(run / name)]
    files = [checkpoint] if checkpoint else checkpoints_in(run / "checkpoints")
    ways = [f"local-dir:{folder}" for folder in folders[:1]]
    if files and (checkpoint or not folders):
        name = (json_of(run / "config.json").get("model") or {}).get("model", "NAME")
        ways.append(f"--model {name} --pretrained {files[-1]}")
    return f"use {' or '.join(ways)}" if ways else "it has no model or checkpoint yet: resume it with --resume auto"


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the files of a folder that have names of checkpoints, the newest last."""
    found = [(int(match[1]), path) for path in folder.glob("*.pt") if (match := STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def why_no_name(name: str) -> str | None:
    """Return the message for a model name that is an address or looks like a path; None for other names."""
    if "://" in name:
        page = re.match(r"https?://(?:www\.)?huggingface\.co/([^/]+/[^/]+)", name)
        remedy = f"give hf-hub:{page[1]}" if page else "download its folder, and give local-dir:FOLDER"
        return f"the model {name!r} is an address: {remedy}"
    path = Path(name).expanduser()
    if path.exists():
        return why_no_model(path) or f"{name} is a folder: give it as local-dir:{name}"
    is_file = path.suffix in (".pt", ".pth", ".bin", ".safetensors")
    if not (is_file or name.startswith((".", "/", "~")) or name.count("/") > 1):
        return None
    expected = "Give a name, local-dir:FOLDER or hf-hub:ORG/NAME"
    return f"{name} does not exist: {explain_missing(str(path))} {expected}"


def check_config(config: Any, path: object) -> dict[str, Any]:
    """Return a run's configuration; ValueError if a setting of RUN_SETTINGS has another type."""
    check_types(config, {"method": str | None}, path)
    for section, kinds in RUN_SETTINGS.items():
        check_types(config.get(section, {}), kinds, f"{section} of {path}")
    return config
