"""Training methods by name: the dataclass that the command line shows, and the objective that it configures."""
from __future__ import annotations

from prolip.methods.base import Objective
from prolip.methods.deterministic import CLIPConfig, CLIPObjective, SigLIPConfig, SigLIPObjective
from prolip.methods.prolip import ProLIPConfig, ProLIPObjective

METHODS: dict[str, tuple[type, type[Objective]]] = {
    "prolip": (ProLIPConfig, ProLIPObjective),
    "siglip": (SigLIPConfig, SigLIPObjective),
    "clip": (CLIPConfig, CLIPObjective),
}
DEFAULT_METHOD = "prolip"


def retired_flags() -> dict[str, str]:
    """Flags of other programs that are settings of a method here, without their dashes -> what to type."""
    found = {name: f"use --method {name}" for name in METHODS}
    for config, _ in METHODS.values():
        found |= getattr(config, "retired", {})
    return found
