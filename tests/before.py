"""Files that an earlier commit wrote (tests/fixtures/before), and what commands make of them.

`scripts/dev/write_fixtures.py` writes the files and calls `record`. Everything here runs commands, or the names of
`import prolip`, so that it does not depend on the names of modules.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import prolip
from prolip.cli.main import main as prolip_main

BEFORE = Path(__file__).parent / "fixtures/before"
#: Below this, differences are of the order of what was summed.
SMALL = 1e-2
#: Keys of JSON files and names of metrics that were renamed since: the new name -> the recorded one.
RENAMED: dict[str, str] = {}
MODELS = ("prolip", "fitted", "likelihood", "pcme", "pcmepp", "vacsr")
TEXTS = ["red bird", "fish", "a small airplane", "sweet food"]
CPU = ["--device", "cpu"]
FITTED = ["--model", "local-dir:models/fitted", *CPU]
DRAWINGS = ["--data", "shards:drawings.tar"]
ADDED = {"share_of"}  # keys of answers that the record lacks


def unpack(folder: Path, *names: str, source: Path = BEFORE) -> None:
    """Unpack the named zipped folders and files into a folder."""
    for name in names:
        if (source / f"{name}.zip").is_file():
            shutil.unpack_archive(source / f"{name}.zip", folder)
        else:
            shutil.copyfile(source / name, folder / name)


def said(work: Callable[[list[str]], int | None], *words: object) -> tuple[str, str]:
    """Return a command's output on both streams. AssertionError if it fails."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = work([str(word) for word in words])
    assert not code, f"{words}\n{out.getvalue()}\n{error.getvalue()}"
    return out.getvalue(), error.getvalue()


def command(*words: object) -> tuple[str, str]:
    """Return the output of `prolip WORDS`."""
    return said(prolip_main, *words)


# --- what each kind of file says, in a working directory that holds it -----------------------------------------------
def models() -> dict[str, Any]:
    """Embeddings and scores of random images and a few texts by the saved models."""
    return {name: model(f"local-dir:models/{name}") for name in MODELS}


def model(name: str) -> dict[str, Any]:
    """Return the outputs of a model, as lists."""
    pixels = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(7))
    made, _, _ = prolip.create_model_and_transforms(name)
    made.eval()
    with torch.no_grad():
        image, text = made.encode_image(pixels), made.encode_text(prolip.get_tokenizer(name)(TEXTS))
        score = prolip.score_of(made)
        found = {
            "image_mean": image.mean,
            "image_log_var": image.log_var,
            "text_mean": text.mean,
            "text_log_var": text.log_var,
            "score": score.pairwise(image, text),
            "probability": score.probability(image, text),
            "uncertainty": score.uncertainty(image),
        }
    return {key: x.double().tolist() for key, x in found.items() if x is not None}


def openclip() -> dict[str, Any]:
    """Metrics of an OpenCLIP model with fitted variances."""
    words = ["--model", "local-dir:models/openclip", *CPU, "--workers", "0", "--uncertainty"]
    command("data", "emoji", "--data", "drawings.tar", "--classes", "subgroup", "--output", "groups")
    command("eval", "tasks", "--data", "wds:groups", *words, "--output", "openclip.json")
    return json.loads(Path("openclip.json").read_text())[0]["metrics"]


def resumed() -> dict[str, Any]:
    """The losses of the step that follows the checkpoint's."""
    from training.main import main

    said(main, "--name", "run", "--output", ".", "--resume", "latest", "--max-steps", "5")
    return losses(Path("run/metrics.jsonl"), 5)


def card() -> dict[str, Any]:
    """The files and the configuration of a run's model, as it is shared."""
    command("hub", "save", "run", "--output", "shared", "--license", "mit")
    config = json.loads(Path("shared/config.json").read_text())
    return {"files": sorted(path.name for path in Path("shared").iterdir()), "config": config}


def losses(path: Path, step: int) -> dict[str, Any]:
    """Return the logged values of a step, without times and memory."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    (row,) = [row for row in rows if row.get("step") == step and row["kind"] == "train"]
    unsteady = ("second", "wait", "memory")
    return {key: value for key, value in row.items() if not any(word in key for word in unsteady)}


def searches() -> dict[str, Any]:
    """Answers of every kind of index, and what a second build adds."""
    Path("fish.webp").write_bytes(member("drawings.tar", "noto-1f983.webp"))
    asked = [*(word for text in TEXTS[:2] for word in ("--text", text)), "--image", "fish.webp"]
    answers = {}
    for kind in ("flat", "ivf", "hnsw", "pq"):
        lines, _ = command("search", "query", f"indexes/{kind}", *asked, "--top", "4", "--json", *FITTED)
        own = ["--index-type", kind, *(["--lists", "4"] if kind in ("ivf", "pq") else [])]
        _, again = command("search", "build", f"indexes/{kind}", *DRAWINGS, *own, *FITTED)
        answers[kind] = {
            "again": numbers(next(line for line in again.splitlines() if "added" in line)),
            "answers": [json.loads(line)["answers"] for line in lines.splitlines()],
        }
    return answers


def member(tar: str, name: str) -> bytes:
    with tarfile.open(tar) as file:
        return file.extractfile(name).read()  # type: ignore[union-attr]


def curated() -> dict[str, Any]:
    """Return the selected samples of a scored set, and their new shards."""
    rules = ["--duplicates", "0.9998", "--drop", "weak: score < quantile(score, 0.2)", "--keep", "0.6", "--yes"]
    rules += ["--rank-by", "normalised_score"]
    table, _ = command("curate", "select", "curated", *rules)
    command("curate", "write", "curated", "--output", "kept", "--processes", "1")
    keys: list[str] = []
    for path in sorted(Path("kept").glob("*.tar")):
        with tarfile.open(path) as tar:
            keys += [name for name in tar.getnames() if name.endswith(".json")]
    return {"counts": numbers(table), "written": keys}


def weights() -> dict[str, Any]:
    """Weights of prompts as the command shows them."""
    return {"shown": numbers(command("prompts", "show", "prompts.json")[0])}


def numbers(text: str) -> list[float]:
    """The numbers of a text, whose words may change."""
    return [float(word) for word in re.findall(r"(?<![\w.:=])\d+(?:\.\d+)?(?![\w:=])", text)]


def with_recorded_names(value: Any) -> Any:
    """A JSON value with the keys that it had when it was recorded."""
    if isinstance(value, dict):
        return {RENAMED.get(key, key): with_recorded_names(x) for key, x in value.items() if key not in ADDED}
    return [with_recorded_names(x) for x in value] if isinstance(value, list) else value


#: What is asked -> the files that it takes.
QUESTIONS: dict[Callable[[], Any], tuple[str, ...]] = {
    models: ("models",),
    openclip: ("models", "drawings.tar"),
    resumed: ("run", "models", "drawings.tar"),
    card: ("run",),
    searches: ("models", "indexes", "drawings.tar"),
    curated: ("curated", "drawings.tar"),
    weights: ("prompts.json",),
}


def answer(question: Callable[[], Any], folder: Path, source: Path = BEFORE) -> Any:
    """Return the current answer from the files, in a new folder."""
    here = Path.cwd()
    unpack(folder, *QUESTIONS[question], source=source)
    os.chdir(folder)
    try:
        return question()
    finally:
        os.chdir(here)


def record(source: Path) -> None:
    """Write the answers next to the files; for the resumed run, those of the uninterrupted one."""
    answers = {}
    for question in QUESTIONS:
        folder = Path(f"recorded/{question.__name__}").resolve()
        folder.mkdir(parents=True)
        answers[question.__name__] = answer(question, folder, source)
    answers["resumed"] = losses(Path("whole/run/metrics.jsonl"), 5)
    (source / "answers.json").write_text(json.dumps(answers, indent=0, allow_nan=False) + "\n")


def differences(found: Any, wanted: Any, place: str = "", tolerance: float = 0.0) -> Iterable[str]:
    """Yield where two JSON values differ by more than a share of the larger one, or of SMALL if both are small."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in sorted(wanted.keys() | found.keys()):
            if key in wanted and key in found:
                yield from differences(found[key], wanted[key], f"{place}/{key}", tolerance)
            else:
                yield f"{place}/{key} is {'new' if key in found else 'missing'}"
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for number, (a, b) in enumerate(zip(found, wanted)):
            yield from differences(a, b, f"{place}/{number}", tolerance)
    elif found != wanted:
        numbers = all(isinstance(x, (int, float)) for x in (found, wanted))
        if not numbers or abs(found - wanted) > tolerance * max(abs(found), abs(wanted), SMALL):
            yield f"{place}: {found}, was {wanted}"
