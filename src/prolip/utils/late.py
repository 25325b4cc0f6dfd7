"""Public names of a package that are imported when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def late(package: str, places: Mapping[str, str], moved: Mapping[str, str] = {}) -> Callable[[str], Any]:
    """The `__getattr__` of a package or module.

    places: name -> module of the package that has it, "" for a module itself; moved: former name -> its new one, which
    ImportError gives.
    """

    def find(name: str) -> Any:
        if name in moved:
            raise ImportError(f"{package}.{name} is now {moved[name]}", name=package)
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        place = places[name]
        return getattr(import_module(f"{package}.{place}"), name) if place else import_module(f"{package}.{name}")

    return find
