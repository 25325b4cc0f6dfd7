"""A dataclass's fields as the flags of a command line."""
from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help: str, **more: Any) -> Any:
    """A field with its help text. more: `choices`; `follows`: what else settles it, for a field that is no flag."""
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help, **more})
    return field(default=default, metadata={"help": help, **more})
