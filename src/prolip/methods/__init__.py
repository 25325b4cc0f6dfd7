"""Methods by name, in one table: what each of them is stands in `Method`, how to add one in docs/adding_a_method.md."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from prolip.measures import MEASURES
from prolip.methods.base import FITTED, Method, Objective
from prolip.methods.deterministic import (
    CLIPConfig,
    CLIPObjective,
    InfoNCEConfig,
    InfoNCEObjective,
    SigLIPConfig,
    SigLIPObjective,
)
from prolip.methods.likelihood import LikelihoodConfig, LikelihoodObjective, LikelihoodScore, extend
from prolip.methods.pcme import PCMEConfig, PCMEObjective, PCMEScore
from prolip.methods.pcme import extend as extend_pcme
from prolip.methods.pcmepp import PCMEppConfig, PCMEppObjective
from prolip.methods.pcmepp import extend as extend_pcmepp
from prolip.methods.prolip import ProLIPConfig, ProLIPObjective
from prolip.methods.source_free import SourceFreeConfig, SourceFreeObjective
from prolip.methods.triplet import CosineScore, TripletConfig, TripletObjective, VSEConfig, VSEObjective
from prolip.methods.vacsr import OF_PAIRS, VACSRConfig, VACSRObjective, VACSRScore
from prolip.methods.vacsr import extend as extend_vacsr
from prolip.scores import SCORES, CSDScore, MeanScore, Score, measure_score
from prolip.uncertainty.readings import reader_of
from prolip.utils.flags import did_you_mean

METHODS: dict[str, Method] = {
    "prolip": Method(ProLIPConfig, ProLIPObjective, CSDScore),
    "likelihood": Method(LikelihoodConfig, LikelihoodObjective, LikelihoodScore, extend=extend, variances=FITTED),
    "pcme": Method(PCMEConfig, PCMEObjective, PCMEScore, extend=extend_pcme),
    "pcmepp": Method(PCMEppConfig, PCMEppObjective, CSDScore, extend=extend_pcmepp),
    "vacsr": Method(VACSRConfig, VACSRObjective, VACSRScore, False, extend_vacsr, variances=OF_PAIRS),
    "siglip": Method(SigLIPConfig, SigLIPObjective, MeanScore, probabilistic=False),
    "clip": Method(CLIPConfig, CLIPObjective, MeanScore, probabilistic=False),
    "infonce": Method(InfoNCEConfig, InfoNCEObjective, MeanScore, probabilistic=False),
    "vse": Method(VSEConfig, VSEObjective, CosineScore, probabilistic=False),
    "triplet-sum": Method(TripletConfig, TripletObjective, CosineScore, probabilistic=False),
    "source-free": Method(SourceFreeConfig, SourceFreeObjective, MeanScore, adapts=True),
}
#: What is trained where nothing is said.
DEFAULT_METHOD = "prolip"
#: An environment variable with modules of further methods, comma between them, each with a table METHODS of its own. A
#: saved model names its method and never a module: whose code runs is for its user to say.
FURTHER = "PROLIP_METHODS"

#: The measures that are these scores.
ALIASES = {"csd_similarity": "csd", "mean_cosine": "mean"}


def all_methods() -> dict[str, Method]:
    """METHODS and those of the modules that PROLIP_METHODS names. ValueError where one of these cannot be used."""
    found = dict(METHODS)
    for module in filter(None, os.environ.get(FURTHER, "").split(",")):
        try:
            found |= import_module(module.strip()).METHODS
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"{FURTHER} names {module!r}, which gives no methods ({error}): name an importable module with a table"
                " METHODS"
            ) from error
    return found


def find_method(name: str) -> Method:
    """A method by name. ValueError with the near ones for an unknown name."""
    known = all_methods()
    if name not in known:
        hint = did_you_mean(str(name), known, f"there are {', '.join(known)}")
        raise ValueError(
            f"method {name!r} is unknown: {hint} (one of your own is in a module that {FURTHER}=<module> names)"
        )
    return known[name]


def retired_flags() -> dict[str, str]:
    """Flags of other programs that are settings of a method here, without their dashes -> what to type."""
    known = all_methods()
    found = {name: f"use --method {name}" for name in known}
    for method in known.values():
        found |= getattr(method.config, "retired", {})
    return found


def find_score(name: str) -> type[Score]:
    """A score of `prolip.scores` or of a method by its name, or that of a measure; `NAME:setting=1` is that of NAME.

    ValueError with the near ones for an unknown name.
    """
    scores = SCORES | {method.score.name: method.score for method in all_methods().values()}
    name = name.partition(":")[0]  # what follows are settings
    if name in scores or name in ALIASES:
        return scores[ALIASES.get(name, name)]
    if name in MEASURES:
        return measure_score(name)
    known = list(dict.fromkeys([*scores, *MEASURES]))
    raise ValueError(f"the score {name!r} is unknown: " + did_you_mean(name, known, f"known are {', '.join(known)}"))


def score_of(model: Any) -> Score:
    """How a trained model compares images with texts: the score of its method, with what was learned for it.

    `.pairwise(images, texts)`, `.probability(images, texts)`, and `.units` where its traces count something. Of a
    network that is neither ours nor fitted csd, which is the cosine of points.
    """
    own, config = getattr(model, "score", None), getattr(model, "config", None)
    if not isinstance(own, Score):  # which an OpenCLIP model with fitted variances has
        method = config.get("method_cfg") if isinstance(config, dict) else None
        own = (CSDScore if method is None else find_method(method["name"]).score).of(model)
    own.reader = reader_of(model)
    return own


def score_from_dict(values: Mapping[str, Any]) -> Score:
    """What `Score.to_dict` wrote, by the class that its name means."""
    return find_score(values["name"]).from_dict(values)


__all__ = [
    "DEFAULT_METHOD",
    "FURTHER",
    "METHODS",
    "CLIPConfig",
    "CLIPObjective",
    "LikelihoodConfig",
    "LikelihoodObjective",
    "Method",
    "Objective",
    "ProLIPConfig",
    "ProLIPObjective",
    "SigLIPConfig",
    "SigLIPObjective",
    "all_methods",
    "find_method",
    "find_score",
    "retired_flags",
    "score_from_dict",
    "score_of",
]
