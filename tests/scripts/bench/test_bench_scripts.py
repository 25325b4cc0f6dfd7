"""The benchmark scripts run and print what they promise; how fast things are is no test's business."""

import re
from pathlib import Path

import pytest

from prolip.methods import METHODS

ROOT = Path(__file__).resolve().parents[3]
NUMBER = r"-?\d+\.\d+"


def run(forked, script: str, *words: str) -> str:
    assert forked.script(ROOT / "scripts" / script, *words) == 0, forked.err[-2000:]
    return forked.out


def test_the_step_is_compared_with_siglips_and_with_the_released_views(forked):
    tiny = ("--model", "ProLIP-ViT-test", "--batch-size", "8", "--rounds", "2", "--threads", "1")
    text = run(forked, "bench/train/step.py", *tiny)
    profiled = run(forked, "bench/train/step.py", *tiny, "--only", "likelihood", "--profile", "2")
    assert re.findall(r"^\| ([a-z ]+) \|", profiled, re.M) == ["step", "siglip", "likelihood"]
    assert re.findall(r"^([a-z]+), two steps$", profiled, re.M) == ["siglip", "likelihood"]
    assert len(re.findall(r"^ .*\d%", profiled, re.M)) == 4  # rows of two tables, whatever operations they name
    for name in ("siglip", "prolip", "no views", "released views"):
        assert re.search(rf"^\| {name} \| {NUMBER} \| {NUMBER} \| {NUMBER} \(", text, re.M), text
    assert re.search(rf"^masked views: {NUMBER} ms, in the released shape {NUMBER} ms: {NUMBER}$", text, re.M), text


@pytest.mark.slow
def test_ways_to_wait_are_compared_beside_busy_processes(forked):
    tiny = ("--batch-size", "4", "--rounds", "2", "--steps", "1", "--busy", "0", "1", "--ways", "passive", "one thread")
    text = run(forked, "bench/use/threads.py", *tiny)
    for busy in (0, 1):
        for name in ("default", "passive", "one thread"):
            row = rf"^\| {busy} busy processes \| {name} \| {NUMBER} \| {NUMBER} \| {NUMBER} \("
            assert re.search(row, text, re.M), text


@pytest.mark.slow
def test_every_method_is_compared_with_clip(forked):
    text = run(forked, "bench/train/methods.py", "--model", "ProLIP-ViT-test", "--batch-size", "8", "--rounds", "2")
    for name in (name for name, method in METHODS.items() if not method.adapts):
        assert re.search(rf"^\| {name} \| {NUMBER} \| {NUMBER} \(", text, re.M), text


def test_a_method_is_compared_with_clip_and_pcmes_memory_with_all_pairs(forked):
    words = ("--model", "ProLIP-ViT-test", "--batch-size", "8", "--rounds", "2", "--methods", "pcmepp")
    text = run(forked, "bench/train/methods.py", *words, "--processor-time")
    assert "processor time" in text and re.search(rf"^\| pcmepp \| {NUMBER} \| {NUMBER} \(", text, re.M), text
    words = ("--memory", "--batch-size", "16", "--match-samples", "2", "--dim", "32")
    text = run(forked, "bench/train/methods.py", *words)
    for name in ("tiles", "all pairs at once"):
        assert re.search(rf"^\| {name} \| \d+ \| {NUMBER} \|$", text, re.M), text
    assert "| differences of coordinates (not run) | 0 | |" in text


@pytest.mark.slow
def test_vacsrs_memory_is_compared_with_all_pairs_and_its_ranking_timed(forked):
    tiny = ("--dim", "16", "--hidden", "8", "--threads", "1")
    text = run(forked, "bench/train/methods.py", "--memory", "vacsr", "--batch-size", "16", *tiny)
    for name in ("tiles", "all pairs at once"):
        assert re.search(rf"^\| {name} \| \d+ \| {NUMBER} \|$", text, re.M), text
    assert re.search(r"^\| what all pairs at once keep, computed \| \d+ \| \|$", text, re.M), text
    text = run(
        forked, "bench/train/methods.py", "--rank", "40", "80", "--shortlist", "5", "--exact-images", "20", *tiny
    )
    for name, images in (("exact", 20), ("the best 5 again", 40)):
        assert re.search(rf"^\| {name} \| {images} \| {NUMBER} \| {NUMBER} \| \d+ \|$", text, re.M), text


def test_neighbours_in_blocks_are_compared_with_whole_rows(forked):
    words = ("--neighbours", "40", "80", "--dim", "16", "--rounds", "2", "--threads", "1", "--block", "16")
    text = run(forked, "bench/train/methods.py", *words)
    for name in ("blocks", "whole rows", "products alone"):
        assert re.search(rf"^\| {name} \| {NUMBER} \({NUMBER} to {NUMBER}\) \| \d+ \|$", text, re.M), text
    assert "the same rows: 100.0000%" in text


def test_the_ring_is_compared_with_siglips_exchange_and_with_none(forked):
    tiny = ("--model", "ProLIP-ViT-test", "--step-batch-size", "8", "--batch-size", "16", "--dim", "8", "--rounds", "2")
    text = run(forked, "bench/train/ring.py", *tiny)
    for name in ("ring", "gather", "bidirectional", "no exchange"):
        assert re.search(rf"^\| {name} \| {NUMBER} \| {NUMBER} \(", text, re.M), text
    assert re.search(rf"2 ranks have {NUMBER} \(.*\) times the throughput of one", text), text


def test_curation_is_compared_with_the_loader_and_its_memory_printed_step_by_step(forked):
    tiny = ("--samples", "200", "--shard-samples", "50", "--turn-shards", "1", "--rounds", "2")
    text = run(forked, "bench/use/curate.py", *tiny)
    ratio = rf"{NUMBER} \({NUMBER} to {NUMBER}\)"
    assert re.search(rf"^loader \d+ samples/s, scoring \d+ samples/s: {ratio}$", text, re.M), text
    for name in ("score, 50", "score, 200", "select", "write, 140 kept"):
        assert re.search(rf"^\| {name} \| {NUMBER} \| \d+ \| \d+ \|$", text, re.M), text


def test_classifiers_are_compared_by_shots_and_at_risks(forked):
    corpus = ("--select", "subgroup=plant flower|food vegetable", "--risks", "0.5", "--shots", "4")
    small = ("--model", "ProLIP-ViT-test", "--pretrained", "random", "--repeats", "1")
    text = run(forked, "bench/use/classifiers.py", *small, *corpus)
    for name in ("zero-shot, fitted", " 4 shots, names and shots", " 4 shots, logistic regression"):
        assert re.search(rf"^{name} +acc +{NUMBER}%  nats +{NUMBER}  ECE {NUMBER}$", text, re.M), text
    answers = r"^  at most 50% wrong: +[\d.]+% answered, (none|[\d.]+% of them wrong, more)"
    assert len(re.findall(answers, text, re.M)) == 2
