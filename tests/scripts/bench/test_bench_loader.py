"""The loader's benchmark runs and prints what it promises; how fast things are is no test's business."""

import re
from pathlib import Path

import pytest

from bench.train import loader as bench_loader

ROOT = Path(__file__).resolve().parents[3]

NUMBER = r"\d+\.\d+"


@pytest.fixture(scope="module")
def printed(forked):
    words = ["--sizes", "96x64", "--files", "2", "--turns", "3", "--image-size", "32", "--rows", "4", "--device", "cpu"]
    assert forked.script(ROOT / "scripts/bench/train/loader.py", *words) == 0, forked.err[-2000:]
    return forked.out


def test_all_ways_are_compared_with_both_of_openclips(printed):
    spread = rf"{NUMBER} \({NUMBER} to {NUMBER}\)"
    for name in ("openclip", "openclip + jitter", "ours", "ours, dct-scaled"):
        assert re.search(rf"^\| {re.escape(name)} \| \d+ \| \d+ \| {NUMBER} \| {spread} \| {spread} \|$", printed, re.M)


def test_errors_and_the_devices_share_are_reported(printed):
    assert re.search(rf"^\| ours \| [01] \| {NUMBER} \|", printed, re.M)
    assert re.search(rf"^\| ours, dct-scaled \| \d+ \| {NUMBER} \|", printed, re.M)
    assert re.search(rf"^jitter, grey, normalise: {NUMBER} ms per image$", printed, re.M)


def test_decoders_are_compared_with_pillow(capsys):
    files = [bench_loader.picture(64, 48, 0)]
    bench_loader.report_decoders("64x48", files, 3)
    text = capsys.readouterr().out
    for name in ("pillow", "simplejpeg", "torchvision"):
        assert re.search(rf"^\| {name} \| {NUMBER} \| {NUMBER} \(", text, re.M), text
    sizes = {tuple(sorted(decode(files[0], 0).shape)) for decode in bench_loader.decoders().values()}
    assert sizes == {(3, 48, 64)}
