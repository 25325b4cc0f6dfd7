"""A dataclass's fields as the flags of a command line."""

from __future__ import annotations

from dataclasses import field
from typing import Any

AUTO = "auto"  # What a setting is that the run settles, when it knows its data and weights


def option(default: Any, help: str, **more: Any) -> Any:
    """A field with its help text. more: `choices`; `follows`: what else settles it, for a field that is no flag;
    `also`: pattern of the words that it takes beside values of its type, for what is settled later.
    """
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help, **more})
    return field(default=default, metadata={"help": help, **more})
