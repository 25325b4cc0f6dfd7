"""The model of a checkpoint as a folder for prolip.create_model: python slurm/export.py CHECKPOINT FOLDER [--ema]

CHECKPOINT: a file or fsspec URL that a run wrote (.../step_N.pt). --ema, --swa: its averaged weights.
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
from prolip.utils.flags import FlagError
from training.run import build_model, build_tokenizer

PREFIX = "model."


def weights_of(state: dict[str, Any], average: str | None) -> dict[str, Tensor]:
    """Name -> tensor of the model in a checkpoint, or of an average by name; FlagError where it has no such weights."""
    if average and state.get(average) is None:
        raise FlagError(f"--{average}, but the checkpoint holds no averaged weights: leave it out")
    if average:
        return state[average]
    return {key.removeprefix(PREFIX): value for key, value in state["objective"].items() if key.startswith(PREFIX)}


def export(address: str, folder: Path, average: str | None = None) -> Path:
    """Write config, weights and tokenizer of the model in a checkpoint; returns the folder."""
    check_checkpoint(address, flag="CHECKPOINT")
    state = load_checkpoint(address)
    values = dict(state["config"])
    config = build_config(values.pop("method"), values)
    # the checkpoint has all weights: those that the run began from may be gone
    model, _, _ = build_model(config, torch.device("cpu"), load_weights=False)
    model.load_state_dict(weights_of(state, average))
    return save_pretrained(model, folder, tokenizer=build_tokenizer(config))


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser("python slurm/export.py", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("folder", type=Path)
    averages = parser.add_mutually_exclusive_group()
    averages.add_argument("--ema", dest="average", action="store_const", const="ema", help="the averaged weights")
    averages.add_argument("--swa", dest="average", action="store_const", const="swa", help="those of the last epochs")
    given = parser.parse_args(arguments)
    try:
        print(export(given.checkpoint, given.folder, given.average))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
