"""Dataclass fields that become command-line flags."""

from __future__ import annotations

from dataclasses import field
from typing import Any

AUTO = "auto"  # value of a setting that the run resolves once data and weights are known


def option(default: Any, help: str, **more: Any) -> Any:
    """Return a field with its help text. more: `choices`; `follows`: the setting that determines a field without a
    flag; `also`: pattern of further accepted words, resolved later.
    """
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help, **more})
    return field(default=default, metadata={"help": help, **more})
