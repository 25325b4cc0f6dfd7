"""Every benchmark runs once, tiny, and prints its rows; the tests do not check speed."""

import re
from pathlib import Path

import numpy as np
import pytest

from bench.train import loader as bench_loader
from bench.use import retrieval as bench_retrieval
from prolip.methods import METHODS

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts/bench"
N = r"-?\d+\.\d+"
SPREAD = rf"{N} \({N} to {N}\)"
TINY = "--model ProLIP-ViT-test --rounds 2"


def rows(names: str, cells: str) -> list[str]:
    """A pattern for each row of a table; names are divided by commas."""
    return [rf"^\| {re.escape(name)} \| {cells}" for name in names.split(", ")]


#: What is run -> (script, words, patterns of lines).
RUNS = {
    "loader": (
        "train/loader.py",
        "--sizes 96x64 --files 2 --turns 2 --image-size 32 --rows 4 --device cpu",
        [
            *rows("openclip, openclip + jitter, ours", rf"\d+ \| \d+ \| {N} \| {SPREAD} \| {SPREAD} \|$"),
            rf"^\| ours, dct-scaled \| \d+ \| \d+ \| {N} \| {SPREAD}",
            rf"^\| ours \| [01] \| {N} \|",
            rf"^jitter, grey, normalise: {N} ms per image$",
        ],
    ),
    "step": (
        "train/step.py",
        f"{TINY} --batch-size 8 --threads 1",
        [
            *rows("siglip, prolip, no views, released views", rf"{N} \| {N} \| {N} \("),
            rf"^masked views: {N} ms, in the released shape {N} ms: {N}$",
        ],
    ),
    "curation": (
        "use/curate.py",
        "--samples 100 --shard-samples 50 --turn-shards 1 --rounds 2",
        [
            rf"^loader \d+ samples/s, scoring \d+ samples/s: {SPREAD}$",
            *(
                rf"^\| {name} \| {N} \| \d+ \| \d+ \|$"
                for name in ("score, 50", "score, 100", "select", r"write, \d+ kept")
            ),
        ],
    ),
    "retrieval": (
        "use/retrieval.py",
        "--large 300 --dim 8",
        [rf"^300 x 300, D=8: {N} s, peak \d+ MB", rf"^i2t/R@1 {N}  i2t/median_rank {N}  t2i/R@1"],
    ),
}
SLOW = {
    "ring": (
        "train/ring.py",
        f"{TINY} --step-batch-size 8 --batch-size 16 --dim 8",
        [
            *rows("ring, gather, bidirectional, no exchange", rf"{N} \| {N} \("),
            rf"2 ranks have {N} \(.*\) times the throughput of one",
        ],
    ),
    "PCME's memory": (
        "train/methods.py",
        "--memory --batch-size 16 --match-samples 2 --dim 32",
        [
            *rows("tiles, all pairs at once", rf"\d+ \| {N} \|$"),
            r"^\| differences of coordinates \(not run\) \| 0 \| \|",
        ],
    ),
    "every method": (
        "train/methods.py",
        f"{TINY} --batch-size 8",
        rows(", ".join(name for name, method in METHODS.items() if not method.adapts), rf"{N} \| {N} \("),
    ),
    "VACSR's memory": (
        "train/methods.py",
        "--memory vacsr --batch-size 16 --dim 16 --hidden 8 --threads 1",
        [
            *rows("tiles, all pairs at once", rf"\d+ \| {N} \|$"),
            r"^\| memory of all pairs at once, computed \| \d+ \| \|$",
        ],
    ),
}


@pytest.mark.parametrize("run", [*RUNS, *(pytest.param(run, marks=pytest.mark.slow) for run in SLOW)])
def test_a_benchmark_prints_its_rows(forked, run):
    script, words, lines = (RUNS | SLOW)[run]
    assert forked.script(SCRIPTS / script, *words.split()) == 0, forked.err[-2000:]
    for line in lines:
        assert re.search(line, forked.out, re.M), f"{line}\n{forked.out}"


def test_classifiers_are_compared_by_shots_and_at_risks(forked):
    words = "--model ProLIP-ViT-test --pretrained random --repeats 1 --risks 0.5 --shots 4 --select"
    corpus = "subgroup=plant flower|food vegetable"
    assert forked.script(SCRIPTS / "use/classifiers.py", *words.split(), corpus) == 0, forked.err[-2000:]
    for name in ("zero-shot, fitted", " 4 shots, names and shots", " 4 shots, logistic regression"):
        assert re.search(rf"^{name} +acc +{N}%  nats +{N}  ECE {N}$", forked.out, re.M), forked.out
    assert len(re.findall(r"^  at most 50% wrong: +[\d.]+% answered", forked.out, re.M)) == 2


def test_decoders_are_compared_with_pillow(capsys):
    files = [bench_loader.picture(64, 48, 0)]
    bench_loader.report_decoders("64x48", files, 3)
    text = capsys.readouterr().out
    assert all(re.search(rf"^\| {name} \| {N}", text, re.M) for name in ("pillow", "simplejpeg", "torchvision")), text
    assert {tuple(sorted(decode(files[0], 0).shape)) for decode in bench_loader.decoders().values()} == {(3, 48, 64)}


def test_the_packages_rankings_are_ids_best_first_ties_by_place():
    scores = np.array([[0.1, 0.5, 0.5], [0.9, 0.0, 0.2]], dtype=np.float32)
    got = bench_retrieval.order_of(scores, np.array([30, 10, 20], dtype=np.int32), block=1)
    assert got.tolist() == [[10, 20, 30], [30, 20, 10]] and got.dtype == np.int32
