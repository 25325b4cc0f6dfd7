"""Public names of a package that are imported when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def late(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package. places: name -> module of the package that has it, "" where it is one itself."""

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        place = places[name]
        return getattr(import_module(f"{package}.{place}"), name) if place else import_module(f"{package}.{name}")

    return find
