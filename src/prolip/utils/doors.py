"""The modules that were commands before there was `prolip`, and what to type in their place."""

from __future__ import annotations

import sys

#: Module -> verb.
DOORS = {
    "prolip.curate": "curate",
    "prolip.data.index": "data index",
    "prolip.evaluation": "eval tasks",
    "prolip.evaluation.clip_benchmark": "eval clip-benchmark",
    "prolip.evaluation.corpus": "eval emoji",
    "prolip.evaluation.datacomp": "eval datacomp",
    "prolip.evaluation.datasets.emoji": "data emoji",
    "prolip.evaluation.datasets.few_shot": "data few-shot",
    "prolip.explorer": "explore",
    "prolip.export": "export graph",
    "prolip.figures": "figures",
    "prolip.hierarchy": "hierarchy",
    "prolip.hub": "hub",
    "prolip.prompts": "prompts",
    "prolip.report": "report",
    "prolip.search": "search",
    "prolip.uncertainty": "uncertainty",
}


def refuse() -> None:
    """End the process where one of these modules is started as a program."""
    words = sys.orig_argv
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    if verb := DOORS.get(module.removesuffix(".__main__")):
        print(f"error: python -m {module} is now: prolip {verb} (prolip {verb.split()[0]} --help)", file=sys.stderr)
        raise SystemExit(2)
