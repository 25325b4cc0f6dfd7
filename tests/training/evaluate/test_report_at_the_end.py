"""A run ends with its report; training rows are ranked next to validation rows, and neither can fail a run."""

from __future__ import annotations

import dataclasses
import json
import time
from types import SimpleNamespace

import pytest
import torch
from training_runs import ROOT, metrics, start

import prolip.corpora.emoji.report.page
from prolip.corpora.emoji import corpus as emoji
from prolip.corpora.emoji.export import write_emoji
from prolip.corpora.emoji.report.runs import read
from prolip.embedder import Embedder
from prolip.evaluation.ranked_pairs import RankedPairs, chance_of_pairs, recall_of_pairs
from prolip.gaussian import Gaussian
from training.evaluate import open_validation, training_rows
from training.main import parse
from training.parallel import World
from training.state import Evaluated


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> str:
    """Drawings of a designer that the run does not train on."""
    folder = tmp_path_factory.mktemp("sets") / "mine"
    write_emoji(emoji.read([ROOT / "data/emoji/emojione.tar"]).select("group=activities"), folder)
    return f"wds:{folder}"


@pytest.fixture(scope="module")
def run(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return start(folder, "mine", "--report", "--max-steps", "4", "--val-every-steps", "2", "--val-data", task)


def test_the_run_leaves_a_page_with_its_evaluations_and_examples_and_nothing_of_the_corpus(run):
    page = (run / "report.html").read_text()
    assert (run / "figures/evaluations.png").is_file() and (run / "figures/learning_curves.png").is_file()
    ((name, shown),) = read(run).shown.items()
    assert name == "mine" and shown.images == metrics_of(run)[-1]["mine/i2t/queries"]
    assert "Examples from mine" in page
    assert not any(said in page for said in ("names find their own drawing", "prolip eval emoji", "designer"))


def metrics_of(folder):
    return [line for line in metrics(folder) if line["kind"] == "eval"]


def test_training_rows_are_ranked_as_the_saved_model_ranks_them_and_are_the_same_each_time(run, capsys):
    config = parse(["--config", str(run / "config.json")])
    embedder = Embedder.load(f"local-dir:{run / 'model'}")
    rows, again = (training_rows(config.data, embedder.preprocess, None) for _ in range(2))
    assert [row.key for row in rows] == [row.key for row in again]
    assert len({row.key for row in rows}) == len(rows) == 170  # of all that there are, up to 256
    last = metrics_of(run)[-1]
    count = int(last["mine/pairs"])
    texts = [max(row.chances, key=row.chances.get) for row in rows[:count]]
    scores = embedder.score.pairwise(
        embedder.encode_image(torch.stack([row.pixels for row in rows[:count]])), embedder.embed_texts(texts)
    )
    found = [texts[scores[i].argmax()] == texts[i] for i in range(count)]
    found += [texts[scores[:, i].argmax()] == texts[i] for i in range(count)]
    assert last["mine/train_pairs_R@1"] == pytest.approx(sum(found) / len(found), abs=1.5 / count)  # a tie or two
    assert 0 <= last["mine/pairs_R@1"] <= 1 and count == min(170, last["mine/i2t/queries"])


def test_chance_is_the_recall_of_random_scores():
    ids, points = torch.tensor([0, 0, 1, 2, 3]), Gaussian(torch.ones(5, 1), torch.zeros(5, 1))
    pairs = RankedPairs(points, points, ids)
    assert chance_of_pairs(pairs, 5) == pytest.approx((2 * 2 / 5 + 3 / 5) / 5)
    assert chance_of_pairs(pairs, 2) == 1

    class RandomScore:
        def pairwise(self, image, text):
            return torch.rand(len(image.mean), len(text.mean), generator=g)

    g = torch.Generator().manual_seed(0)
    found = torch.tensor([recall_of_pairs(RandomScore(), pairs, 5) for _ in range(2000)])
    assert found.mean().item() == pytest.approx(chance_of_pairs(pairs, 5), abs=0.02)


@pytest.mark.parametrize("changed", [{"dataset_type": "synthetic", "train_num_samples": 8}, {"captions": 0}])
def test_data_without_captions_has_no_training_rows(run, changed):
    config = parse(["--config", str(run / "config.json")]).data
    changed = changed | ({"train_data": None} if "dataset_type" in changed else {})
    assert training_rows(dataclasses.replace(config, **changed), None, None) == []


def test_training_rows_that_cannot_be_read_are_a_line_and_the_test_set_is_measured(run, task):
    config = parse(["--config", str(run / "config.json")])
    embedder = Embedder.load(f"local-dir:{run / 'model'}")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, train_data="gone.tar"))
    loader = SimpleNamespace(held_out=None, noise=None, source=None)
    validation = open_validation(config, embedder.tokenizer, embedder.preprocess, World(), loader)
    found = Evaluated()
    assert validation.training_pairs(embedder, found) is None
    assert found.headlines[0].startswith("warning: training pairs were not measured: ")


def fail(folder):
    raise MemoryError("no room")


def linger(folder):
    time.sleep(30)


LINGER = pytest.param(linger, "it took longer than 1 s", marks=pytest.mark.slow)


@pytest.mark.parametrize(("drawn", "why"), [(fail, "no room"), LINGER])
def test_a_page_that_fails_or_takes_too_long_does_not_fail_the_run(drawn, why, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prolip.corpora.emoji.report.page, "make_report", drawn)
    monkeypatch.setattr(prolip.corpora.emoji.report.page, "LIMIT", 1)
    began = time.monotonic()
    folder = start(tmp_path, "run", "--report", "--max-steps", "3")
    assert time.monotonic() - began < 25
    assert f"warning: no report ({why}). Write it with prolip report {folder}" in capsys.readouterr().out
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
