"""The checks of search and of refusal run on an evaluation of the corpus, and say what they should."""

import dataclasses
import runpy
import sys
from pathlib import Path

import pytest
import torch
from commands import evaluate_corpus

from prolip.corpora.emoji.result import load
from prolip.gaussian import Gaussian

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(monkeypatch, capsys):
    """(script, words) -> (exit code, the rows of its table)."""

    def script(name: str, *words) -> tuple[int, list[list[str]]]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        code = 0
        try:
            runpy.run_path(str(ROOT / "scripts" / name), run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        return code, [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]

    return script


@pytest.fixture(scope="module")
def evaluation(small_model, tmp_path_factory):
    """Evaluate a random model with different traces on the food of one designer."""
    folder = tmp_path_factory.mktemp("checked")
    words = ["--data", ROOT / "data/emoji/emojione.tar", "--select", "group=food drink", "--output", folder / "eval"]
    evaluate_corpus(["--model", small_model, *words])
    return folder / "eval"


def test_search_has_the_order_of_brute_force(run, evaluation):
    code, rows = run("studies/use/search_recall.py", evaluation, "--rows", 50)
    assert code == 0
    assert [row[1] for row in rows] == [name for name in ("own", "csd", "mean", "elk") for _ in range(2)]
    for row in rows:
        asked, side = row[2].split()
        assert asked == row[4] and int(asked) > 50 and side in ("texts", "drawings")


def test_refusal_is_tried_over_splits(run, evaluation, monkeypatch):
    words = (evaluation, "--splits", 3, "--risk", 0.1)
    code, rows = run("studies/uncertainty/risk.py", *words)
    assert code == 0 and [row[4] for row in rows] == ["0.00"] * 4  # a random model cannot guarantee it
    result = load(evaluation)
    own = torch.from_numpy(result.text_relation.argmax(0))  # a text that is true of each drawing
    text = Gaussian(torch.eye(len(result.text.mean)), torch.full((len(result.text.mean),) * 2, -9.0))
    knows = dataclasses.replace(result, image=text.select(own), text=text)
    monkeypatch.setattr("prolip.corpora.emoji.result.load", lambda _: knows)
    code, rows = run("studies/uncertainty/risk.py", *words)
    (drawings,) = [row for row in rows if row[1].endswith("captions_i2t")]
    assert code == 0 and [float(x) for x in drawings[4:]] == [1.0, 1.0, 0.0, 0.0, 0.0]
