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
