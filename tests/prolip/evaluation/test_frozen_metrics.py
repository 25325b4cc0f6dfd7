"""Every metric of the miniature test sets is what it was: tests/fixtures/frozen, a file for each kind of evaluation.

    REFREEZE=1 python -m pytest tests/prolip/evaluation/test_frozen_metrics.py     write the files again

Most evaluate stored features (tests/fixtures/before/features.zip), so that no tower runs; the others embed miniatures
with a saved model. Everything here runs commands or names of `import prolip`.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import frozen_sets
import miniatures as mini
import numpy as np
import pytest
import torch

import before
import prolip

FROZEN = Path(__file__).parents[2] / "fixtures/frozen"
SOURCE = Path(__file__).parents[3] / "src"
SCORES = "csd mean wasserstein2 match_probability kl js elk bhattacharyya log_inclusion inclusion_test".split()  # noqa: SIM905
#: Measures that are the first two.
SYNONYMS = ("csd_similarity", "mean_cosine")
METHODS = ("openclip", "likelihood", "pcme", "pcmepp", "vacsr", "siglip")
# Not with the lowest versions: their kernels round otherwise, and older transformers cannot read the tokenizer.
pytestmark = pytest.mark.rounding
#: On the machine that froze the metrics they are the same bit for bit. The kernels of another CPU sum in another order,
#: so metrics of stored features may differ by 1e-6 of their value there. Where towers run it is 1e-3, as two near pairs
#: may change places.
FEATURES, TOWERS = 1e-6, 1e-3
Values = dict[str, dict[str, Any]]


def results(path: Path, intervals: bool = True) -> Values:
    """The metrics of `prolip eval tasks --output`, with their intervals, by data set, score and prompts."""
    found: Values = {}
    for result in json.loads(path.read_text()):
        info = result["info"]
        name = " ".join(filter(None, (result["key"], info["similarity"], info.get("prompts"))))
        assert name not in found
        found[name] = result["metrics"] | {"images": info["images"]}
        if intervals:
            found[name] |= {f"{key}/95%": value for key, value in info.get("intervals", {}).items()}
        for extra in ("confusion", "too_small_for"):
            if extra in info:
                found[name][extra] = info[extra]
    return found


def evaluate(*words: object, output: str = "out.json") -> Values:
    before.command("eval", "tasks", *words, "--output", output)
    return results(Path(output))


def scores() -> Values:
    """Every score of a fitted model on every kind of test set."""
    found = evaluate("--features", "features/fitted", "--similarity", *SCORES)
    same = evaluate("--features", "features/fitted", "--similarity", *SYNONYMS)
    assert same.keys() <= found.keys() and all(value == found[key] for key, value in same.items())
    return found


def uncertainty() -> Values:
    """Refusal, calibration and intervals of every kind of test set by the model's own score; base and novel classes."""
    words = "--features features/fitted --uncertainty --intervals 25 --confusion --output out.json"
    out, _ = before.command("eval", "tasks", *words.split())
    found = results(Path("out.json"))
    harmonic = [line for line in out.splitlines() if " base " in line and " novel " in line]
    return found | {"harmonic means": {str(row): before.numbers(line) for row, line in enumerate(harmonic)}}


def methods() -> Values:
    """The scores of the other methods, in addition to those of any method."""
    found: Values = {}
    for name in METHODS:
        more = evaluate("--features", f"features/{name}", "--uncertainty")
        if name != "siglip":
            more |= evaluate("--features", f"features/{name}", "--similarity", "csd", "mean")
        found |= {f"{name} {key}": value for key, value in more.items()}
    return found


def coco() -> Values:
    """COCO 5K and 1K, CxC, ECCV Caption and PMRP; in a process of its own, where labels of the package are ours."""
    folder = frozen_sets.write_labels(Path("labels"))
    words = f"--features features/coco5k --instances {folder}/instances.json --output out.json"
    path = os.pathsep.join([str(folder.resolve()), str(SOURCE)])
    how = "--similarity csd mean --uncertainty"
    command = [sys.executable, "-m", "prolip", "eval", "tasks", *words.split(), *how.split()]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": path})
    return results(Path("out.json"))


def prompts() -> Values:
    """Prompts that images choose or weigh, and weights of a file."""
    classes = mini.wds_classification(Path("sets/wds_classes"), templates=frozen_sets.TEMPLATES, images=42)
    pool = mini.wds_classification(Path("sets/wds_pool"), templates=frozen_sets.TEMPLATES, images=35, seed=3)
    given = ["--data", f"wds:{classes}", *before.FITTED, "--workers", "0"]
    found: Values = {}
    rules = ("best", "bprw", "bprw:3,alpha=1.5", "bprw:2,prior=trace", "prompts.json")
    for rule in rules:
        (found[rule],) = evaluate(*given, "--prompts", rule).values()
    pooled = ["--prompts", "bprw:3,alpha=1.5", "--prompts-fit", f"wds:{pool}"]
    (found["fitted to a pool"],) = evaluate(*given, *pooled).values()
    fit = ["--data", f"wds:{pool}", "--rule", "bprw:3,alpha=1.5", *before.FITTED, "--output", "again.json"]
    before.command("prompts", "fit", *fit)
    found["weights"] = {x["name"]: x["weights"] for x in json.loads(Path("again.json").read_text())["classes"]}
    return found


def emoji() -> Values:
    """The corpus, by two scores, with intervals and uncertainty."""
    found: Values = {}
    for score in ("csd", "mean"):
        words = ["--data", "drawings.tar", "--select", "group=animals nature|food drink", "--similarity", score]
        before.command("eval", "emoji", *words, "--intervals", "20", *before.FITTED, "--output", f"corpus-{score}")
        found[score] = flat(json.loads(Path(f"corpus-{score}/metrics.json").read_text()))
    return found


def datacomp() -> Values:
    """Lines and tables of DataComp's tasks, faces among them."""
    frozen_sets.write_datacomp(Path("datacomp"))
    words = ["--data", "datacomp", "--similarity", "csd", "mean", "--workers", "0"]
    before.command("eval", "datacomp", *words, *before.FITTED, "--output", "lines")
    rows = [json.loads(line) for line in Path("lines/results.jsonl").read_text().splitlines()]
    found = {f"{row['key']} {row['info']['similarity']}": row["metrics"] for row in rows}
    for name, metrics in found.items():  # uncertainty of some kinds is enough
        if not name.startswith(("fairness", "misc", "wilds")):
            found[name] = {key: x for key, x in metrics.items() if "refusal/" not in key and "calibration/" not in key}
    assert len(found) == 2 * 40
    table = json.loads(Path("lines/tables.json").read_text())
    return found | {"averages": flat({str(row): line["averages"] for row, line in enumerate(rows_of(table))})}


def rows_of(table: Any) -> list[dict[str, Any]]:
    """The rows of a JSON table that have averages, wherever they are."""
    if isinstance(table, list):
        return [row for value in table for row in rows_of(value)]
    if isinstance(table, dict):
        return [table] if "averages" in table else [row for value in table.values() for row in rows_of(value)]
    return []


def hierarchy() -> Values:
    """Entailment, and HierarCaps by both protocols."""
    words = ["--data", "drawings.tar", "--intervals", "20", *before.FITTED, "--output", "entailment.json"]
    before.command("hierarchy", "entailment", *words)
    (found,) = json.loads(Path("entailment.json").read_text())["models"]
    captions, images = frozen_sets.write_hierarcaps(Path("hierarcaps"))
    words = ["--captions", captions, "--images", images, *before.FITTED, "--output", "hierarcaps.json"]
    before.command("hierarchy", "hierarcaps", *words)
    parts = json.loads(Path("hierarcaps.json").read_text()).values()
    return {"entailment": flat(found)} | {f"hierarcaps {row}": flat(part) for row, part in enumerate(parts)}


def clip_benchmark() -> Values:
    """clip_benchmark's JSON of each of its tasks."""
    pytest.importorskip("clip_benchmark")
    root = Path("benchmark").resolve()
    made = {"single": mini.wds_classification, "multi": mini.wds_multilabel, "pairs": mini.wds_retrieval}
    sets = [make(root / name) for name, make in made.items()]
    found: Values = {}
    for folder in sets:
        words = ["--dataset", f"wds/{folder.name}", "--dataset_root", folder, "--output", "out.json", "--quiet"]
        more = ["--batch_size", "5", "--num_workers", "0", "--model", before.FITTED[1], "--model_type", "prolip"]
        for score in ("csd", "mean"):
            before.command("eval", "clip-benchmark", "eval", *words, *more, "--similarity", score)
            found[f"{folder.name} {score}"] = flat(json.loads(Path("out.json").read_text())["metrics"])
    return found


def classifiers() -> Values:
    """Probabilities and confidences of both classifiers, without and with labels, and what a risk refuses."""
    rows = range(24)
    labels = [mini.CLASSES[row % 4] for row in rows]
    Path("shown").mkdir()
    pictures = [Path(f"shown/{row}.png") for row in rows]
    for row, path in enumerate(pictures):
        path.write_bytes(mini.picture(800 + 7 * (row % 4) + row // 12))
    model, names = before.FITTED[1], list(mini.CLASSES[:4])
    made = {
        "names": prolip.ZeroShotClassifier(model, names).fit(),
        "names, by the mean": prolip.ZeroShotClassifier(model, names, similarity="mean").fit(),
        "names and labels": prolip.ZeroShotClassifier(model, names).fit(pictures[:12], labels[:12]),
        "shots": prolip.FewShotClassifier(model, text=False).fit(pictures[:12], labels[:12]),
        "shots and names": prolip.FewShotClassifier(model).fit(pictures[:12], labels[:12]),
    }
    found: Values = {}
    for name, classifier in made.items():
        asked = [str(path) for path in pictures[12:]]
        found[name] = {
            "probabilities": np.asarray(classifier.predict_proba(asked), dtype=float).tolist(),
            "confidence": np.asarray(classifier.confidence(asked), dtype=float).tolist(),
        }
        classifier.calibrate_risk(asked, labels[12:])
        found[name]["refused"] = np.asarray(classifier.refuse(asked, risk=0.5)).tolist()
    return found


def flat(value: Any, place: str = "") -> dict[str, Any]:
    """Nested dicts as one, without what a run took and where it lay."""
    if not isinstance(value, dict):
        return {place: value} if isinstance(value, (int, float, list)) else {}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        if not any(word in key for word in ("second", "model", "source")):
            found |= flat(inner, f"{place}/{key}" if place else key)
    return found


#: What is frozen -> the files of tests/fixtures/before that it takes.
CASES: dict[Callable[[], Values], tuple[str, ...]] = {
    scores: ("features",),
    uncertainty: ("features",),
    methods: ("features",),
    coco: ("features",),
    prompts: ("models", "prompts.json"),
    emoji: ("models", "drawings.tar"),
    datacomp: ("models",),
    hierarchy: ("models", "drawings.tar"),
    clip_benchmark: ("models",),
    classifiers: ("models",),
}


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_metrics_are_what_they_were(case, tmp_path, monkeypatch):
    before.unpack(tmp_path, *CASES[case])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = before.with_recorded_names(json.loads(json.dumps(case())))
    path = FROZEN / f"{case.__name__}.json"
    if os.environ.get("REFREEZE"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(dumped(found | {"kernels": kernels()}))
    wanted = json.loads(path.read_text())
    elsewhere = FEATURES if "features" in CASES[case] else TOWERS
    tolerance = 0.0 if wanted.pop("kernels") == kernels() else elsewhere
    assert not list(before.differences(found, wanted, tolerance=tolerance))


def kernels() -> dict[str, str]:
    """Return the settings that change the last bits of float32."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    own = {"torch": torch.__version__, "numpy": np.__version__}
    versions = own | {"capability": torch.backends.cpu.get_cpu_capability()}
    return versions | {"cpu": next(iter(names), platform.processor())}


def dumped(found: Values) -> str:
    """A line for each metric, in float64."""
    parts = []
    for name, metrics in found.items():
        rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in metrics.items())
        parts.append(f" {json.dumps(name)}: {{\n{rows}\n }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
