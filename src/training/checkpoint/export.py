"""The model of a checkpoint as a folder for prolip.create_model."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prolip.models.weights.checkpoint import save_pretrained
from prolip.utils.flags import FlagError
from training.checkpoint.files import check_checkpoint, load_checkpoint
from training.config import build_config
from training.run import build_model, build_tokenizer

PREFIX = "model."


def weights_of(state: dict[str, Any], average: str | None) -> dict[str, Tensor]:
    """Name -> tensor of the model in a checkpoint, or of an average by name; FlagError where it has no such weights."""
    if average and state.get(average) is None:
        raise FlagError(f"--{average}, but the checkpoint holds no averaged weights: leave it out")
    if average:
        return state[average]
    return {key.removeprefix(PREFIX): value for key, value in state["objective"].items() if key.startswith(PREFIX)}


def export_checkpoint(address: str, folder: Path, average: str | None = None) -> Path:
    """Write config, weights and tokenizer of the model in a checkpoint; returns the folder.

    address: a file or fsspec URL that a run wrote (.../step_N.pt). average: ema or swa for its averaged weights.
    """
    check_checkpoint(address, flag="CHECKPOINT")
    state = load_checkpoint(address)
    values = dict(state["config"])
    config = build_config(values.pop("method"), values)
    # the checkpoint has all weights: those that the run began from may be gone
    model, _, _ = build_model(config, torch.device("cpu"), load_weights=False)
    model.load_state_dict(weights_of(state, average))
    return save_pretrained(model, folder, tokenizer=build_tokenizer(config))
