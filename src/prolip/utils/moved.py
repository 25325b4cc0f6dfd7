"""Public names with late imports, and moved names, whose old places raise an error with the new one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import Any

#: Module that was once a command -> verb.
DOORS = {
    f"prolip.{verb}": verb for verb in ("curate", "figures", "hierarchy", "hub", "prompts", "report", "search")
} | {
    "prolip.data.index": "data index",
    "prolip.evaluation": "eval tasks",
    "prolip.evaluation.clip_benchmark": "eval clip-benchmark",
    "prolip.evaluation.corpus": "eval emoji",
    "prolip.evaluation.datacomp": "eval datacomp",
    "prolip.evaluation.datasets.emoji": "data emoji",
    "prolip.evaluation.datasets.few_shot": "data few-shot",
    "prolip.explorer": "explore",
    "prolip.export": "export graph",
    "prolip.uncertainty": "uncertainty",
}
#: Documented module, or name in one -> its new place. For an old name of an existing module, the module's `__getattr__`
#: (`late`) raises.
MOVED = {
    "prolip.hierarchy.figures": "prolip.hierarchy.levels",
    "prolip.data.emoji": "prolip.corpora.emoji.corpus",
    "prolip.evaluation.datasets.specs": "prolip.evaluation.datasets.registry",
    "prolip.data.noise": "prolip.data.noisy_captions",
    "prolip.data.pictures": "prolip.data.images",
    "prolip.data.reading.addresses": "prolip.data.reading.stream",
    "prolip.data.reading.connections": "prolip.data.reading.remote",
    "prolip.data.reading.diagnose": "prolip.data.reading.tar",
    "prolip.data.reading.entries": "prolip.data.reading.shard_index",
    "prolip.data.reading.opening": "prolip.data.reading.stream",
    "prolip.data.reading.published": "prolip.data.sets",
    "prolip.evaluation.features": "prolip.evaluation.embed",
    "prolip.evaluation.loading": "prolip.loading",
    "prolip.evaluation.model": "prolip.embedder",
    "prolip.evaluation.metrics.blockwise": "prolip.evaluation.metrics.streaming",
    "prolip.evaluation.pairs": "prolip.evaluation.ranked_pairs",
    "prolip.evaluation.task": "prolip.evaluation.evaluate",
    "prolip.evaluation.zero_shot": "prolip.prompts.templates",
    "prolip.prompts.fitting": "prolip.evaluation.prompts",
    "prolip.evaluation.suites.emoji": "prolip.corpora.emoji.evaluate",
    "prolip.curate.expressions": "prolip.curate.rules",
    "prolip.curate.figures": "prolip.curate.score",
    "prolip.curate.signals": "prolip.curate.score",
    "prolip.hub.card": "prolip.hub.sharing",
    "prolip.hub.saving": "prolip.hub.sharing",
    "prolip.models.weights": "prolip.models.checkpoint",
    "prolip.openclip_names": "prolip.prompts.templates",
    "prolip.options": "training.model_options",
    "prolip.report": "prolip.corpora.emoji.report",
    "prolip.search.answers": "prolip.search.query",
    "prolip.search.build": "prolip.search.index",
    "prolip.search.indexes": "prolip.search.ann",
    "prolip.search.risk": "prolip.search.risk_control",
    "prolip.methods.triplet": "prolip.methods.deterministic",
    "prolip.uncertainty.attach": "prolip.fitting.attach",
    "prolip.uncertainty.clip": "prolip.uncertainty.openclip",
    "prolip.uncertainty.collect": "prolip.fitting.collect",
    "prolip.uncertainty.hidden": "prolip.uncertainty.token_stats",
    "prolip.uncertainty.pairs": "prolip.embeddings",
}


def late(package: str, places: Mapping[str, str], moved: Mapping[str, str] = {}) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package or module.

    places: name -> module of the package that defines it, "" for a module itself; moved: former name -> new name.
    """

    def find(name: str) -> Any:
        if name in moved:
            raise ImportError(f"{package}.{name} is now {moved[name]}", name=package)
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        place = places[name]
        return getattr(import_module(f"{package}.{place}"), name) if place else import_module(f"{package}.{name}")

    return find


class Signpost(MetaPathFinder):
    """Finder that reports the new place of a module of `MOVED`; it finds no module."""

    def find_spec(self, fullname, path=None, target=None):
        """Return None; ImportError for a moved module."""
        if new := MOVED.get(fullname):
            raise ImportError(f"{fullname} is now {new}: import it from there", name=fullname)


def refuse() -> None:
    """Exit with an error if one of these modules is started as a program."""
    words = sys.orig_argv
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    if verb := DOORS.get(module.removesuffix(".__main__")):
        print(f"error: python -m {module} is now: prolip {verb} (prolip {verb.split()[0]} --help)", file=sys.stderr)
        raise SystemExit(2)
