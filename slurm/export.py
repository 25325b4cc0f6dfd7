"""The model of a checkpoint as a folder for prolip.create_model: python slurm/export.py CHECKPOINT FOLDER [--ema]

CHECKPOINT: a file or fsspec URL that a run wrote (.../step_N.pt). --ema: its averaged weights.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prolip.models.weights.checkpoint import save_pretrained
from training.checkpoint.files import check_checkpoint, load_checkpoint
from training.config import build_config
from training.flags import FlagError
from training.run import build_model, build_tokenizer

PREFIX = "model."


def weights_of(state: dict[str, Any], ema: bool) -> dict[str, Tensor]:
    """Name -> tensor of the model in a checkpoint; FlagError where it has no averaged weights."""
    if ema and state["ema"] is None:
        raise FlagError("--ema, but the checkpoint holds no averaged weights: leave it out")
    if ema:
        return state["ema"]
    return {key.removeprefix(PREFIX): value for key, value in state["objective"].items() if key.startswith(PREFIX)}


def export(address: str, folder: Path, ema: bool = False) -> Path:
    """Write config, weights and tokenizer of the model in a checkpoint; returns the folder."""
    check_checkpoint(address, flag="CHECKPOINT")
    state = load_checkpoint(address)
    values = dict(state["config"])
    config = build_config(values.pop("method"), values)
    # the checkpoint has all weights: those that the run began from may be gone
    model, _, _ = build_model(config, torch.device("cpu"), load_weights=False)
    model.load_state_dict(weights_of(state, ema))
    return save_pretrained(model, folder, tokenizer=build_tokenizer(config))


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser("python slurm/export.py", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ema", action="store_true", help="the averaged weights")
    given = parser.parse_args(arguments)
    try:
        print(export(given.checkpoint, given.folder, given.ema))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
