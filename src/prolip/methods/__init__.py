"""Methods by name, in one table: `Method` has their parts, docs/developing/add_a_method.md says how to add one.

Nothing here imports a method before it is asked for.
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

#: Method -> the module of this package with a table METHODS that has it, and the name of its score.
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
#: An environment variable with modules of further methods, separated by commas, each with a table METHODS. A saved
#: model names its method and never a module: whose code runs is for its user to say.
FURTHER = "PROLIP_METHODS"
ALIASES = {"csd_similarity": "csd", "mean_cosine": "mean"}  # the measures that are these scores


class LazyMethods(Mapping[str, Method]):
    """The methods of this package; a method is imported when it is read."""

    def __getitem__(self, name: str) -> Method:
        return import_module(f"{__name__}.{MODULES[name][0]}").METHODS[name]

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


METHODS = LazyMethods()


def further_methods() -> dict[str, Method]:
    """The methods of the modules that PROLIP_METHODS names. ValueError for an unusable module."""
    found: dict[str, Method] = {}
    for module in filter(None, os.environ.get(FURTHER, "").split(",")):
        try:
            found |= import_module(module.strip()).METHODS
        except (ImportError, AttributeError) as error:
            what = f"{FURTHER} names {module!r}, which gives no methods ({error})"
            raise ValueError(f"{what}: name an importable module with a table METHODS") from error
    return found


def all_methods() -> dict[str, Method]:
    """METHODS and `further_methods`."""
    return {**METHODS, **further_methods()}


def find_method(name: str) -> Method:
    """A method by name. ValueError with similar names for an unknown one."""
    further = further_methods()
    if name not in further and name not in METHODS:
        known = [*METHODS, *further]
        hint = did_you_mean(str(name), known, f"there are {', '.join(known)}")
        own = f"one of your own is in a module that {FURTHER}=<module> names"
        raise ValueError(f"method {name!r} is unknown: {hint} ({own})")
    return further[name] if name in further else METHODS[name]


def retired_flags() -> dict[str, str]:
    """Flags of other programs that are settings of a method here, without their dashes -> what to type."""
    known = all_methods()
    found = {name: f"use --method {name}" for name in known}
    for method in known.values():
        found |= getattr(method.config, "retired", {})
    return found


def find_score(name: str) -> type[Score]:
    """A score of `prolip.scores`, of a method or of a measure by its name, or `NAME:setting=1`."""
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
    """The score by which a trained model compares images with texts: that of its method, with its trained numbers."""
    own, config = getattr(model, "score", None), getattr(model, "config", None)
    if not isinstance(own, Score):  # which an OpenCLIP model with fitted variances has
        method = config.get("method_cfg") if isinstance(config, dict) else None
        own = (CSDScore if method is None else find_method(method["name"]).score).of(model)
    own.reader = reader_of(model)
    return own


def score_from_dict(values: Mapping[str, Any]) -> Score:
    """Read what `Score.to_dict` wrote, by the class of its name."""
    return find_score(values["name"]).from_dict(values)


__all__ = ["DEFAULT_METHOD", "FURTHER", "METHODS", "Method", "Objective", "all_methods", "find_method", "find_score"]
__all__ += ["retired_flags", "score_from_dict", "score_of"]
