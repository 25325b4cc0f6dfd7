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


def test_files_are_jpegs_of_their_size_and_differ():
    from prolip.data.images import decode_image

    files = [bench_loader.picture(96, 64, seed) for seed in range(2)]
    assert files[0] != files[1] and files[0] == bench_loader.picture(96, 64, 0)
    assert decode_image(files[0]).size == (96, 64)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--turns", "1"], "--turns is 1: give 2 or more"),
        (["--files", "0"], "--files is 0: give 1 or more"),
        (["--sizes", "512"], "--sizes 512 is no width x height of 40 pixels or more: give e.g. 512x512"),
        (["--sizes", "512x39"], "--sizes 512x39 is no width x height"),
        (["--images", "no-such-folder"], "--images no-such-folder is no folder with a .jpg or .jpeg in it"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_it_begins(words, message, capsys):
    with pytest.raises(SystemExit):
        bench_loader.parse(words)
    assert message in capsys.readouterr().err
    assert bench_loader.parse(["--sizes", "40x40"]).sizes == ["40x40"]
