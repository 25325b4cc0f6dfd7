"""Shards without a usable sample, made at random: the line says what was found, why it is none, and what to do.

Every shard is of one class of mistake, under random keys, folders, counts and orders; what its line must say is known
from how it was made. A good shard among them must be taken.
"""

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
import zipfile

import pytest
from tiny_loaders import build
from tiny_tars import png, write_tar

from prolip.cli.main import main
from prolip.data.faults import FaultCounter, TooManyBadSamples
from prolip.data.reading.diagnose import refuse_unusable, survey
from prolip.data.reading.tar import read_shard
from prolip.data.samples import IMAGE_SUFFIXES, SampleFault


# --- shards of each class ---------------------------------------------------------------------------------------------
def archive(members):
    """A tar of (name, bytes), None for a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.type, info.size = (tarfile.DIRTYPE, 0) if data is None else (tarfile.REGTYPE, len(data))
            tar.addfile(info, None if data is None else io.BytesIO(data))
    return buffer.getvalue()


def keys(rng):
    """Between one and five keys of files, some in folders whose names may have dots."""
    folder = rng.choice(["", "", "images/", "a.b/c/", "./train/"])
    return [f"{folder}{rng.choice('kxyz')}{rng.randrange(1000)}-{i}" for i in range(rng.randint(1, 5))]


def pairs(rng, image, text, image_suffix, text_suffix):
    """A tar with an image and a text for each key, either of them first."""
    members = []
    for key in keys(rng):
        two = [(f"{key}.{image_suffix}", image), (f"{key}.{text_suffix}", text)]
        members += two if rng.random() < 0.5 else two[::-1]
    return archive(members)


def dots(rng):
    middle = rng.choice(["v2", "v2.001", "2024-01", "thumb.small"])
    return pairs(rng, png(), b"a", f"{middle}.{rng.choice(IMAGE_SUFFIXES)}", f"{middle}.txt"), [
        f"_{middle.replace('.', '_')}.",
        "the key ends at the first dot",
    ]


def folders(rng):
    count = rng.randint(1, 6)
    return archive([(f"d{i}", None) for i in range(count)]), [f"holds {count} folders and no file"]


def apart(rng):
    return archive([(f"images/{k}.jpg", png()) for k in keys(rng)] + [(f"texts/{k}.txt", b"a") for k in keys(rng)]), [
        "its images and texts have different keys"
    ]


def of_macos(rng):
    return archive([(f"{rng.choice(['', 'd/'])}._{i}.{s}", b"x") for i in range(3) for s in ("jpg", "txt")]), [
        "is what macOS keeps beside a file",
        "COPYFILE_DISABLE=1",
    ]


def unknown(rng):
    suffix = rng.choice(["image", "heic", "avif", "jfif", "img", "bin", "pyd", "npz"])
    return pairs(rng, png(), b"a", suffix, "txt"), [f"no image is known by the suffix {suffix!r}"]


def texts_alone(rng):
    return archive([(f"{k}.{rng.choice(['txt', 'json', 'cls'])}", b"{}") for k in keys(rng)]), ["texts or labels alone"]


def images_alone(rng):
    return archive([(f"{k}.{rng.choice(IMAGE_SUFFIXES)}", png()) for k in keys(rng)]), ["its images have no text"]


def bare(rng):
    return archive([(f"img{i}", png()) for i in range(rng.randint(1, 5))]), ["is not named KEY.SUFFIX"]


def nested(rng):
    inner = archive([("a.jpg", png()), ("a.txt", b"a")])
    suffix = rng.choice(["tar", "tar.gz", "zip", "tgz"])
    return archive([(f"{k}.{suffix}", inner) for k in keys(rng)]), ["are archives of their own"]


def in_json(rng):
    """Captions in a field of the JSON, whose name and place among the others vary."""
    name = rng.choice(["caption", "captions", "text", "title", "alt_text", "Description"])
    value = ["red", "blue"] if name == "captions" else "a red square"
    fields = [("id", 7), ("width", 1.5), ("ok", True), ("tags", []), ("box", {"x": 1}), ("hash", None), (name, value)]
    record = dict(rng.sample(fields, len(fields)))
    kind = "2 texts" if name == "captions" else "a text"
    return pairs(rng, png(), json.dumps(record).encode(), "jpg", "json"), [
        f"--caption-sampling {name}",
        "id (a number)",
        f"{name} ({kind})",
    ]


def no_field(rng):
    return pairs(rng, png(), b'{"id": 7, "ok": false}', "png", "json"), ["id (a number), ok (true or false), none of"]


def no_json(rng):
    return pairs(rng, png(), rng.choice([b"[1]", b"{", b"\xff"]), "png", "json"), ["its json is no help"]


def misnamed(rng):
    suffix = rng.choice(["caption", "text", "v1.txt"])
    return pairs(rng, png(), b"a", "jpg", suffix), [f"write {suffix!r} as txt"]


def empty_archive(rng):
    return bytes(512 * 20 * rng.randint(1, 3)), ["an empty archive"]


def no_tar(rng):
    """What is no archive of tar at all."""
    rest = " ".join(str(rng.random()) for _ in range(rng.randint(0, 200)))
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as file:
        file.writestr("a.jpg", png())
    page, answer = f"<!DOCTYPE html><title>404</title>{rest}", json.dumps({"error": "denied", "x": rest})
    xml, pointer = f'<?xml version="1.0"?><Error>{rest}</Error>', "version https://git-lfs.github.com/spec/v1\noid sha"
    data, words = rng.choice(
        [
            (page, ["an HTML page", "<!DOCTYPE html>", "fetch it again"]),
            (f"\n\n  <HTML>{rest}", ["an HTML page"]),
            (answer, ["JSON", '"error": "denied"']),
            (xml, ["XML", "Error"]),
            (pointer, ["Git LFS", "git lfs pull"]),
            (f"url\tcaption\n{rest}", ["text ('url\\tcaption')"]),
            (zipped.getvalue(), ["a zip archive", "unpack it"]),
            (b"PAR1" + rng.randbytes(900), ["a Parquet table"]),
            (png(), ["a PNG image"]),
            (b"", ["an empty file"]),
            (gzip.compress(page.encode()), ["gzip-compressed data with an HTML page"]),
            (bz2.compress(answer.encode()), ["bzip2-compressed data with JSON"]),
            (lzma.compress(rest.encode() + b"x"), ["xz-compressed data with"]),
            (b"\xcd\x07" + rng.randbytes(2000), ["bytes of no known format (cd 07"]),
            (b"\x28\xb5\x2f\xfd" + rng.randbytes(99), ["zstd-compressed data"]),
        ]
    )
    return data.encode() if isinstance(data, str) else data, ["it is no tar archive but", *words]


MISTAKES = (
    dots,
    folders,
    apart,
    of_macos,
    unknown,
    texts_alone,
    images_alone,
    bare,
    nested,
    in_json,
    no_field,
    no_json,
    misnamed,
    empty_archive,
    no_tar,
    no_tar,
    no_tar,
)


def check(tmp_path, seed):
    """One generated shard, at the start of training with its size known or counted, and in an index."""
    rng = random.Random(seed)
    mistake = MISTAKES[seed % len(MISTAKES)]
    data, words = mistake(rng)
    path = tmp_path / f"{seed}.tar"
    path.write_bytes(data)
    settings = {"train_num_samples": 8} if rng.random() < 0.5 else {}
    with pytest.raises(ValueError) as refused:
        build(path, **settings)
    line = str(refused.value)
    assert line.startswith("--train-data: none of the first samples can be used: ") and "\n" not in line, line
    assert str(path) in line and len(line) < 900, line
    assert all(word in line for word in words), (mistake.__name__, words, line)
    (tmp_path / "good").mkdir(exist_ok=True)
    good = write_tar(tmp_path / "good" / f"{seed}.tar", [(f"s{i}", {"png": png(i), "txt": b"a"}) for i in range(8)])
    if mistake not in (in_json, no_field, no_json, misnamed):
        build(f"{path}::{good}", train_num_samples=8)  # another shard has what is wanted: the run's limits decide


@pytest.mark.parametrize("seed", range(68))
def test_a_shard_without_a_usable_sample_is_reported_for_what_it_is(tmp_path, seed):
    check(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_many_shards_without_a_usable_sample_are_reported_for_what_they_are(tmp_path, part):
    for seed in range(1000 + 60 * part, 1060 + 60 * part):
        check(tmp_path, seed)


# --- what is no mistake -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(20))
def test_shards_with_samples_are_taken_whatever_else_they_hold(tmp_path, seed):
    """Upper-case suffixes, folders with dots, a README, macOS's records, a few samples without a text."""
    rng = random.Random(seed)
    members = [("README.md", b"x"), ("d", None), ("._s.jpg", b"x"), ("bare", b"x"), ("lone.jpg", png())]
    members = rng.sample(members, rng.randint(0, len(members)))
    folder = rng.choice(["", "a.b/", "x/y/"])
    for i in range(8):
        members += [(f"{folder}s{i}.{rng.choice(['JPG', 'Png', 'webp'])}", png(i)), (f"{folder}s{i}.TXT", b"a")]
    (tmp_path / "0.tar").write_bytes(archive(members))
    assert build(tmp_path / "0.tar").num_batches >= 2


def test_where_any_loss_is_tolerated_the_first_samples_settle_nothing(tmp_path):
    (tmp_path / "0.tar").write_bytes(archive([("a.txt", b"a")]))
    assert build(tmp_path / "0.tar", train_num_samples=8, max_bad_fraction=1.0).num_batches > 0


def test_shards_that_cannot_be_looked_at_beforehand_are_reported_by_the_stream(tmp_path, monkeypatch):
    (tmp_path / "0.tar").write_bytes(archive([("d", None)]))
    loader = build(f"pipe:cat {tmp_path}/0.tar", train_num_samples=8)
    with pytest.raises(TooManyBadSamples, match=r"found no sample in 10 passes .*0.tar holds 1 folders and no file"):
        next(iter(loader))


def test_a_fault_that_comes_back_is_an_example_once():
    counter = FaultCounter()
    for _ in range(9):
        counter.lose_sample(SampleFault("missing image", "members: b.jpg"), "a", "0.tar")
    assert counter.examples == ["sample 'a' of 0.tar: missing image: members: b.jpg"]


def test_only_so_many_shards_are_opened_before_all_are_held_to_be_unusable(tmp_path, monkeypatch):
    monkeypatch.setattr("prolip.data.reading.diagnose.SHARDS", 3)
    opened = []

    def refuse(raw):
        opened.append(raw["__url__"])
        raise SampleFault("missing text", "none")

    urls = [write_tar(tmp_path / f"{i}.tar", [("a", {"jpg": png(), "json": b"{}"})]) for i in range(9)]
    with pytest.raises(ValueError, match="sample 'a' of .*0.tar: missing text: none"):
        refuse_unusable(urls, refuse)
    assert opened == urls[:3]


def test_an_index_tells_of_a_shard_without_a_sample(tmp_path, capsys):
    (tmp_path / "0.tar").write_bytes(archive([("img.v2.jpg", png())]))
    assert main(["data", "index", str(tmp_path), "--processes", "0"]) == 0
    assert "0 samples: " in (said := capsys.readouterr().err) and "name it 'img_v2.jpg'" in said


def test_a_survey_reads_no_more_than_the_first_members(tmp_path):
    data = archive([(f"k{i}.txt", b"a") for i in range(400)])
    (tmp_path / "0.tar").write_bytes(data[:-9000])  # a cut behind what is looked at
    assert "texts or labels alone" in survey([f"{tmp_path}/0.tar"])
    assert survey([]) == "there is no shard"


def test_a_sample_says_why_it_has_no_image(tmp_path):
    (tmp_path / "0.tar").write_bytes(archive([("d.e/img.v2.jpg", png()), ("d.e/img.v2.txt", b"a")]))
    (raw,) = read_shard(f"{tmp_path}/0.tar")
    from prolip.data.samples import image_bytes

    with pytest.raises(SampleFault, match=r"members: v2.jpg, v2.txt; wanted one of jpg, .*: name it 'img_v2.jpg'"):
        image_bytes(raw)


@pytest.mark.parametrize("kind", ["csv", "folder"])
def test_rows_without_a_caption_name_the_fields_there_are(tmp_path, kind):
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(png(i))
        (tmp_path / f"{i}.json").write_text('{"n": 1, "caption": "a cat"}')
    if kind == "folder":
        with pytest.raises(
            ValueError,
            match=r"^--train-data: none of the 4 images has a caption .*n \(a number\), "
            r"caption \(a text\): --caption-sampling caption$",
        ):
            build(tmp_path)
        assert build(tmp_path, caption_sampling="caption").num_batches == 1
        return
    table = tmp_path / "d.csv"
    table.write_text("image\tcaption\n" + "".join(f"{i}.png\ta cat\n" for i in range(4)))
    with pytest.raises(ValueError, match=r"^--train-data: .*csv-img-key \(did you mean 'image'\?\)"):
        build(table, csv_img_key="filepath")
    with pytest.raises(ValueError, match=r"^--train-data: .*--csv-caption-key \(did you mean 'caption'\?\)"):
        build(table, csv_caption_key="title")
    assert build(table).num_batches == build(table, csv_img_key="image", csv_caption_key="caption").num_batches == 1
