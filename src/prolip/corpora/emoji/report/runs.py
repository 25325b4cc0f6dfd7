"""The contents of a run folder: config, learning curves, evaluation; any of them may be missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from pydantic import ValidationError

from prolip.corpora.emoji.report.examples import KEPT, SetExamples
from prolip.corpora.emoji.result import CorpusResult, load
from prolip.models.diagnose import check_config, is_model, is_run
from prolip.utils.documents import check_types, loads, read_json, shown
from prolip.utils.secrecy import redacted

#: The file with the examples of a run's test sets.
EXAMPLES = "examples.json"


@dataclass(frozen=True)
class RunFolder:
    """config: the resolved config or None; train, evals: the objects of metrics.jsonl by kind, the last eval from
    eval.json; result: of the corpus, or None; shown: examples of the other test sets.
    """

    folder: Path
    config: dict[str, Any] | None = None
    train: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    result: CorpusResult | None = None
    shown: dict[str, SetExamples] = field(default_factory=dict)


def read(folder: str | Path, evaluation: str = "eval") -> RunFolder:
    """Read a run; evaluation: the name of its evaluation's folder.

    FileNotFoundError for a folder that is not a run, ValueError naming an unreadable file.
    """
    folder = Path(str(folder).removeprefix("local-dir:"))  # as in the name of a model
    path, there = folder / "config.json", folder / evaluation
    run = next((place for place in (*folder.absolute().parents[:2], *sorted(folder.glob("*"))) if is_run(place)), None)
    found = any(file.exists() for file in (path, folder / "metrics.jsonl", there / "metrics.json"))
    if is_model(folder) or not found or (run is not None and not is_run(folder)):
        nearest = "give one that training wrote, such as runs/demo" if run is None else f"give the run's folder, {run}"
        raise FileNotFoundError(f"{folder} is not a run folder with config.json and metrics.jsonl: {nearest}")
    lines = read_lines(folder / "metrics.jsonl")
    try:
        result = load(there) if (there / "metrics.json").exists() else None
    except (ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
        again = f"delete that folder, or write it again with prolip eval emoji --output {there}"
        raise ValueError(f"the evaluation in {there} cannot be read ({error}): {again}") from error
    try:
        config = check_config(redacted(read_json(path)), path) if path.exists() else None
    except ValueError as error:
        raise ValueError(f"{error}; or delete it for a page without settings") from error
    path = folder / EXAMPLES
    try:
        kept = KEPT.validate_json(path.read_bytes()) if path.exists() else {}
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise ValueError(f"{path} cannot be read ({why}). Delete it for a page without examples") from error
    train = [line for line in lines if line.get("kind", "train") == "train"]
    evals = [line for line in lines if line.get("kind") == "eval"]
    last = read_json(folder / "eval.json") if (folder / "eval.json").exists() else {}
    if last and not any(line["step"] == last.get("step") for line in evals):
        evals.append(check_types(last, {"step": int}, folder / "eval.json", int | float | None))
    return RunFolder(folder, config, train, evals, result, kept)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a .jsonl file, [] if missing, without an incomplete line. ValueError for other lines."""
    out: list[dict[str, Any]] = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else [], 1):
        try:
            line = loads(text)
        except ValueError:
            continue
        place = f"line {number} of {path}"
        out.append(check_types(line, {"kind": str, "step": int}, place, int | float | dict | None))
        if line.get("step", -1) < 0:
            step = shown(line.get("step"))
            raise ValueError(f"{place} has the step {step}: expected a whole number. Correct or remove the line")
    return out


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to `section.name`, without unset ones."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            out |= flatten(value, f"{prefix}{key}.")
        elif value is not None:
            out[f"{prefix}{key}"] = value
    return out
