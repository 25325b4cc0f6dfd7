"""Shards without a usable sample: the line says what was found, why it is none, and what to do."""

import gzip
import io
import json
import random
import tarfile

import pytest
from tiny_loaders import build
from tiny_tars import png, write_tar

from prolip.cli.main import main
from prolip.data.faults import SampleFault, TooManyBadSamples
from prolip.data.reading.tar import read_shard, survey
from prolip.data.samples import image_bytes


def archive(members):
    """A tar of (name, bytes), None for a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.type, info.size = (tarfile.DIRTYPE, 0) if data is None else (tarfile.REGTYPE, len(data))
            tar.addfile(info, None if data is None else io.BytesIO(data))
    return buffer.getvalue()


def pairs(image_suffix, text_suffix, text=b"a"):
    parts = ((image_suffix, png()), (text_suffix, text))
    return archive([(f"a.b/k{i}.{suffix}", data) for i in range(3) for suffix, data in parts])


PAGE = b"<!DOCTYPE html><title>404</title>"
RECORD = {"id": 7, "ok": True, "tags": [], "box": {"x": 1}, "alt_text": "a red square"}
MISTAKES = {
    "dots in names": (pairs("v2.001.jpg", "v2.001.txt"), "a key ends at the first dot .*_v2_001.jpg"),
    "folders alone": (archive([("d", None)]), "contains no file; expected: KEY.jpg"),
    "keys apart": (archive([("images/a.jpg", png()), ("texts/a.txt", b"a")]), "no text with the same key"),
    "images alone": (archive([("a.jpg", png())]), "its images have no text"),
    "no suffix": (archive([("img0", png())]), "is not named KEY.SUFFIX"),
    "fields": (pairs("jpg", "json", json.dumps(RECORD).encode()), "fields are id, ok, .*--caption-sampling alt_text"),
    "no text field": (pairs("png", "json", b'{"id": 7}'), "the fields are id, none of which is a text"),
    "no JSON": (pairs("png", "json", b"{"), "its json has no captions either"),
    "misnamed text": (pairs("jpg", "caption"), "write 'caption' as txt"),
    "HTML": (PAGE, "it is not a tar archive but an HTML page .*fetch it again"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha", "Git LFS .*git lfs pull"),
    "packed HTML": (gzip.compress(PAGE), "gzip-compressed data with an HTML page"),
    "noise": (b"\xcd\x07" + random.Random(0).randbytes(2000), r"data of unknown format \(cd 07"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_shard_without_a_usable_sample_is_reported_for_what_it_is(tmp_path, mistake):
    data, words = MISTAKES[mistake]
    path = tmp_path / "0.tar"
    path.write_bytes(data)
    refusal = f"^--train-data: none of the first samples is usable: .*{path}.*{words}"
    with pytest.raises(ValueError, match=refusal) as refused:
        build(path, train_num_samples=8)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 900
    good = write_tar(tmp_path / "good.tar", [(f"s{i}", {"png": png(i), "txt": b"a"}) for i in range(8)])
    build(f"{path}::{good}", train_num_samples=8)  # the run's limits decide


def test_shards_with_samples_are_taken_whatever_else_they_hold(tmp_path):
    for seed in range(6):
        rng = random.Random(seed)
        members = [("README.md", b"x"), ("d", None), ("._s.jpg", b"x"), ("bare", b"x"), ("lone.jpg", png())]
        members, folder = rng.sample(members, rng.randint(0, len(members))), rng.choice(["", "a.b/", "x/y/"])
        for i in range(8):
            members += [(f"{folder}s{i}.{rng.choice(['JPG', 'Png', 'webp'])}", png(i)), (f"{folder}s{i}.TXT", b"a")]
        (tmp_path / "0.tar").write_bytes(archive(members))
        assert build(tmp_path / "0.tar").num_batches >= 2


def test_shards_that_are_not_opened_beforehand_are_reported_by_the_stream(tmp_path):
    (tmp_path / "0.tar").write_bytes(archive([("d", None)]))
    loader = build(f"pipe:cat {tmp_path}/0.tar", train_num_samples=8)
    with pytest.raises(TooManyBadSamples, match=r"found no sample in 10 passes .*0.tar contains no file"):
        next(iter(loader))
    (tmp_path / "0.tar").write_bytes(archive([("a.txt", b"a")]))  # with any loss tolerated the first decide nothing
    assert build(tmp_path / "0.tar", train_num_samples=8, max_bad_fraction=1.0).num_batches > 0


def test_an_index_and_a_sample_say_why_there_is_no_image(tmp_path, capsys):
    (tmp_path / "0.tar").write_bytes(archive([("d.e/img.v2.jpg", png()), ("d.e/img.v2.txt", b"a")]))
    assert main(["data", "index", str(tmp_path), "--processes", "0"]) == 0
    assert "0 samples: " in (said := capsys.readouterr().err) and "name it 'img_v2.jpg'" in said
    (raw,) = read_shard(f"{tmp_path}/0.tar")
    with pytest.raises(SampleFault, match=r"members: v2.jpg, v2.txt; expected one of jpg, .*: name it 'img_v2.jpg'"):
        image_bytes(raw)


def test_a_survey_reads_no_more_than_the_first_members(tmp_path):
    data = archive([(f"k{i}.txt", b"a") for i in range(400)])
    (tmp_path / "0.tar").write_bytes(data[:-9000])  # a cut after the members that are read
    assert "only texts or labels" in survey([f"{tmp_path}/0.tar"])
    assert survey([]) == "no shards"


def test_rows_without_a_caption_name_the_fields_and_flags(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(png(i))
        (tmp_path / f"{i}.json").write_text('{"n": 1, "caption": "a cat"}')
    with pytest.raises(ValueError, match=r"^--train-data: none of the 4 .* n, caption: --caption-sampling caption$"):
        build(tmp_path)
    assert build(tmp_path, caption_sampling="caption").num_batches == 1
