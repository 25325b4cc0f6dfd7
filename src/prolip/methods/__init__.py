"""Methods by name, in one table. `Method` has their parts; docs/developing/add_a_method.md explains how to add one.

A method is imported when it is first used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from prolip.measures import MEASURES
from prolip.methods.base import Method, Objective
from prolip.scores import SCORES, CSDScore, Score, measure_score
from prolip.uncertainty.readings import reader_of
from prolip.utils.flags import did_you_mean

#: Method -> the module of this package with a table METHODS with the method, and the name of its score.
MODULES = {
    "prolip": ("prolip", "csd"),
    "likelihood": ("likelihood", "true_match"),
    "pcme": ("pcme", "pcme"),
    "pcmepp": ("pcmepp", "csd"),
    "vacsr": ("vacsr", "vacsr"),
    "siglip": ("deterministic", "mean"),
    "clip": ("deterministic", "mean"),
    "infonce": ("deterministic", "mean"),
    "vse": ("deterministic", "cosine"),
    "triplet-sum": ("deterministic", "cosine"),
    "source-free": ("source_free", "mean"),
}
DEFAULT_METHOD = "prolip"
#: An environment variable: modules of additional methods, separated by commas, each with a table METHODS. A saved
#: model names its method and never a module, so only the user decides which code runs.
FURTHER = "PROLIP_METHODS"
ALIASES = {"csd_similarity": "csd", "mean_cosine": "mean"}  # the measures that are these scores


class LazyMethods(Mapping[str, Method]):
    """Methods of this package, imported on first use."""

    def __getitem__(self, name: str) -> Method:
        return import_module(f"{__name__}.{MODULES[name][0]}").METHODS[name]

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


METHODS = LazyMethods()


def further_methods() -> dict[str, Method]:
    """Return the methods of the modules in PROLIP_METHODS. ValueError for an unusable module."""
    found: dict[str, Method] = {}
    for module in filter(None, os.environ.get(FURTHER, "").split(",")):
        try:
            found |= import_module(module.strip()).METHODS
        except (ImportError, AttributeError) as error:
            what = f"{FURTHER} names {module!r}, which gives no methods ({error})"
            raise ValueError(f"{what}: name an importable module with a table METHODS") from error
    return found


def all_methods() -> dict[str, Method]:
    """Return METHODS and `further_methods`."""
    return {**METHODS, **further_methods()}


def find_method(name: str) -> Method:
    """Return a method by name. ValueError with similar names for an unknown one."""
    further = further_methods()
    if name not in further and name not in METHODS:
        known = [*METHODS, *further]
        hint = did_you_mean(str(name), known, f"there are {', '.join(known)}")
        own = f"for a method of your own, set {FURTHER}=<module>"
        raise ValueError(f"method {name!r} is unknown: {hint} ({own})")
    return further[name] if name in further else METHODS[name]


def retired_flags() -> dict[str, str]:
    """Return flags of other programs that are settings of a method here, without their dashes -> what to type."""
    known = all_methods()
    found = {name: f"use --method {name}" for name in known}
    for method in known.values():
        found |= getattr(method.config, "retired", {})
    return found


def find_score(name: str) -> type[Score]:
    """Return a score of `prolip.scores`, of a method or of a measure by its name, or `NAME:setting=1`."""
    name = name.partition(":")[0]
    name = ALIASES.get(name, name)
    if name in SCORES:
        return SCORES[name]
    if own := next((method for method, (_, score) in MODULES.items() if score == name), None):
        return METHODS[own].score
    further = {method.score.name: method.score for method in further_methods().values()}
    if name in further:
        return further[name]
    if name in MEASURES:
        return measure_score(name)
    known = list(dict.fromkeys([*SCORES, *(score for _, score in MODULES.values()), *further, *MEASURES]))
    raise ValueError(f"the score {name!r} is unknown: " + did_you_mean(name, known, f"known are {', '.join(known)}"))


def score_of(model: Any) -> Score:
    """Return the score by which a trained model ranks: its method's score, with its trained numbers."""
    own, config = getattr(model, "score", None), getattr(model, "config", None)
    if not isinstance(own, Score):  # an OpenCLIP model with fitted variances has one
        method = config.get("method_cfg") if isinstance(config, dict) else None
        own = (CSDScore if method is None else find_method(method["name"]).score).of(model)
    own.reader = reader_of(model)
    return own


def score_from_dict(values: Mapping[str, Any]) -> Score:
    """Read a score that `Score.to_dict` wrote, by the class of its name."""
    return find_score(values["name"]).from_dict(values)


__all__ = ["DEFAULT_METHOD", "FURTHER", "METHODS", "Method", "Objective", "all_methods", "find_method", "find_score"]
__all__ += ["retired_flags", "score_from_dict", "score_of"]
