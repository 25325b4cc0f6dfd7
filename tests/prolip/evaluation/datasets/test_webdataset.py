"""clip_benchmark's folders and URLs: every sample as it was written, and whatever is wrong by its name."""

import functools
import json
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import miniatures as mini
import numpy as np
import pytest
from clip_benchmark.datasets.builder import build_wds_dataset
from huggingface_hub import constants

from prolip.data.faults import FaultCounter
from prolip.evaluation.datasets import sources as places
from prolip.evaluation.datasets.base import DamagedData
from prolip.evaluation.datasets.webdataset import open_wds


@pytest.fixture
def folder(tmp_path):
    return mini.wds_classification(tmp_path / "wds_birds", columns=(3, 100))


def test_samples_are_what_was_written_in_its_order(folder):
    dataset = open_wds(folder)
    assert (dataset.name, dataset.kind, dataset.relevance) == ("birds", "classification", None)
    assert dataset.classnames == mini.CLASSES and dataset.templates == mini.TEMPLATES
    samples = list(dataset.samples())
    labels = np.random.default_rng(0).permutation(np.arange(13) % 7)
    assert [sample.key for sample in samples] == [f"s{i:07d}" for i in range(13)]
    assert [sample.label for sample in samples] == labels.tolist()
    assert [sample.image for sample in samples] == [mini.picture(i) for i in range(13)]
    assert all(sample.groups.shape == (2,) and sample.groups[0] < 3 for sample in samples)
    assert samples[0].open().mode == "RGB"


def test_clip_benchmark_reads_the_same_pixels_and_labels(folder):
    theirs = build_wds_dataset("wds/birds", np.asarray, split="test", data_dir=str(folder))
    ours = list(open_wds(folder).samples())
    pairs = list(theirs)
    assert theirs.classes == list(mini.CLASSES) and theirs.templates == list(mini.TEMPLATES)
    assert [label for _, label in pairs] == [sample.label for sample in ours]
    for (pixels, _), sample in zip(pairs, ours):
        np.testing.assert_array_equal(pixels, np.asarray(sample.open()))


def test_a_multilabel_set_has_a_zero_or_one_for_every_class(tmp_path):
    dataset = open_wds(mini.wds_multilabel(tmp_path))
    labels = np.stack([sample.label for sample in dataset.samples()])
    assert dataset.kind == "multilabel" and labels.shape == (14, 7)
    assert set(np.unique(labels)) == {0, 1} and (np.diag(labels[:7]) == 1).all()


def test_a_retrieval_set_has_a_caption_per_line(tmp_path):
    mini.write_shards(tmp_path / "test", [("a", {"png": mini.picture(0), "txt": "one\n\nzwölf\n".encode()})])
    (tmp_path / "dataset_type.txt").write_text("Retrieval")
    (sample,) = open_wds(tmp_path).samples()
    assert sample.captions == ("one", "zwölf") and sample.label is None


def test_metadata_without_classes_is_read_for_sets_of_faces(tmp_path):
    mini.wds_faces(tmp_path, {"race": 2, "age": 3}, columns=(2, 3))
    samples = list(open_wds(tmp_path).samples())
    assert all(sample.label is None and sample.groups.shape == (2,) for sample in samples)


def test_keys_that_shards_share_are_told_apart(tmp_path):
    mini.write_classes(tmp_path)
    sample = {"png": mini.picture(0), "cls": b"1"}
    mini.write_shards(tmp_path / "test", [("a", sample), ("b", sample), ("a", sample), ("c", sample)], shards=2)
    assert [s.key for s in open_wds(tmp_path).samples()] == ["a", "b", "a@1", "c"]


def test_the_fingerprint_follows_the_data_and_not_its_place_or_prompts(folder, tmp_path):
    before = open_wds(folder).fingerprint
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    (copy / "classnames.txt").write_text("\n".join(f"class {i}" for i in range(7)))
    assert open_wds(copy).fingerprint == before
    shard = copy / "test" / "1.tar"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert open_wds(copy).fingerprint != before


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_the_mark_of_a_large_shard_reads_its_head_its_middle_and_its_tail(tmp_path, share):
    path, data = tmp_path / "0.tar", bytearray(10 * places.SAMPLED)
    path.write_bytes(data)
    before = places.file_mark(path)
    data[int(share * len(data))] = 1
    path.write_bytes(data)
    assert places.file_mark(path) != before


@pytest.mark.parametrize(
    "file, text, error, message",
    [
        ("test/nshards.txt", None, FileNotFoundError, "no test/nshards.txt at .*holds classnames"),
        ("test/nshards.txt", "two", DamagedData, "says 'two': want the number of shards"),
        ("test/1.tar", None, FileNotFoundError, "1 of 2 shards are missing: .*1.tar: fetch"),
        ("classnames.txt", None, FileNotFoundError, "no classnames.txt"),
        ("zeroshot_classification_templates.txt", "", FileNotFoundError, "an empty one"),
        ("zeroshot_classification_templates.txt", "a {c}\na photo of it", DamagedData, "'a photo of it' has no {c}"),
        ("dataset_type.txt", "segments", DamagedData, "'segments': want one of classification, multilabel, retrieval"),
    ],
)
def test_what_is_wrong_around_the_shards_is_known_before_they_are_read(folder, file, text, error, message):
    (folder / file).unlink() if text is None else (folder / file).write_text(text)
    with pytest.raises(error, match=message):
        open_wds(folder)


@pytest.mark.parametrize(
    "given, wanted",
    [
        ("", "it is one level too high: give {all}/wds_a"),
        ("wds_a/test", "it lies inside a data set: give {all}/wds_a."),
        ("wds_dev", "it has the split dev: give --split dev"),
        ("wds_a/test/0.tar", "is a file: give the folder of the test set"),
        ("wds_b", "no test set at .*Did you mean wds_a"),
    ],
)
def test_a_folder_one_level_off_names_the_one_that_is_meant(tmp_path, given, wanted):
    for name in ("wds_a", "wds_cars_test"):
        mini.wds_classification(tmp_path / name)
    (mini.wds_classification(tmp_path / "wds_dev") / "test").rename(tmp_path / "wds_dev" / "dev")
    with pytest.raises(FileNotFoundError, match=wanted.format(all=tmp_path)):
        open_wds(f"{tmp_path}/{given}")


IMAGE = mini.picture(0)
MEMBERS = {"classification": ("cls", b"1"), "retrieval": ("txt", b"a"), "multilabel": ("npy", mini.array([1] * 7))}
MISTAKES = {
    "dots": (lambda good: {f"v2.{name}": data for name, data in good.items()}, "the key ends at the first dot"),
    "image": (lambda good: {"image" if name == "png" else name: data for name, data in good.items()}, "suffix 'image'"),
    "no image": (lambda good: {name: data for name, data in good.items() if name != "png"}, "labels alone"),
    "image alone": (lambda good: {"png": good["png"]}, "its images have no text beside them"),
    "html": (lambda good: None, "no tar archive but an HTML page"),
}


@pytest.mark.parametrize("kind", MEMBERS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_set_of_which_nothing_can_be_used_is_refused_when_it_is_opened(tmp_path, kind, mistake):
    member, data = MEMBERS[kind]
    spoil, words = MISTAKES[mistake]
    good = {"png": IMAGE, member: data}
    bad = spoil(good)
    mini.write_classes(tmp_path)
    (tmp_path / "dataset_type.txt").write_text(kind)
    mini.write_shards(tmp_path / "test", [(key, bad or good) for key in "abc"])
    if bad is None:
        (tmp_path / "test/0.tar").write_text("<html>404</html>")
    with pytest.raises(DamagedData, match=words) as refused:
        open_wds(tmp_path, damage=FaultCounter())
    said = str(refused.value)
    assert "\n" not in said and f"{tmp_path}/test/0.tar" in said
    assert mistake not in ("dots", "image", "no image") or said.endswith(f"wanted: KEY.jpg beside KEY.{member}")
    mini.write_shards(tmp_path / "test", [*((key, bad or {"txt": b"x"}) for key in "abc"), ("d", good)])
    assert open_wds(tmp_path).kind == kind  # one that can be used is enough to begin


def cut(folder):
    shard = folder / "test" / "0.tar"
    shard.write_bytes(shard.read_bytes()[:5000])


def test_a_cut_shard_ends_the_evaluation_with_its_name(folder):
    cut(folder)
    with pytest.raises(DamagedData, match="0.tar: broken shard: .*Fetch this file again; --skip-damaged"):
        list(open_wds(folder).samples())


def test_a_cut_shard_is_counted_and_named_where_that_is_asked_for(folder):
    cut(folder)
    damage = FaultCounter()
    kept = [sample.key for sample in open_wds(folder, damage=damage).samples()]
    assert kept[-6:] == [f"s{i:07d}" for i in range(7, 13)] and len(kept) < 13
    assert damage.kinds["broken shard"] == 1 and "0.tar" in damage.examples[0]
    assert (damage.shards, damage.samples) == (2, len(kept))


@pytest.mark.parametrize(
    "members, message",
    [
        ({"cls": b"7"}, "'x' of .*0.tar: bad label: cls says '7'; classnames.txt has the classes 0 to 6"),
        ({"cls": b"cat"}, "cls says 'cat'; classnames.txt has"),
        ({"txt": b"no label"}, "missing label: members: png, txt; wanted cls"),
        ({"cls": b"1", "npy": b"nonsense"}, "bad array"),
    ],
)
def test_a_sample_that_makes_no_sense_is_named(tmp_path, members, message):
    mini.write_classes(tmp_path)
    whole = ("y", {"png": mini.picture(0), "cls": b"0"})
    mini.write_shards(tmp_path / "test", [("x", {"png": mini.picture(1), **members}), whole])
    with pytest.raises(DamagedData, match=message):
        list(open_wds(tmp_path).samples())
    damage = FaultCounter()
    assert [sample.key for sample in open_wds(tmp_path, damage=damage).samples()] == ["y"]
    assert damage.bad_samples == 1 and damage.samples == 2


def test_a_sample_without_image_and_a_doubled_key_are_damage(tmp_path):
    mini.write_classes(tmp_path)
    mini.write_shards(tmp_path / "test", [("x", {"cls": b"0"})])
    with pytest.raises(DamagedData, match="begins with x.cls: there are texts or labels alone"):
        list(open_wds(tmp_path).samples())
    sample = {"png": mini.picture(0), "cls": b"1"}
    mini.write_shards(tmp_path / "test", [("a", sample), ("b", sample), ("a", sample)])
    with pytest.raises(DamagedData, match="duplicate key"):
        list(open_wds(tmp_path).samples())


def test_labels_of_another_width_are_refused(tmp_path):
    mini.wds_multilabel(tmp_path)
    mini.write_classes(tmp_path, mini.CLASSES[:5])
    with pytest.raises(DamagedData, match=r"bad label: an array \(7,\) of int64; wanted zeros and ones \(5,\)"):
        list(open_wds(tmp_path).samples())


def test_further_pairs_are_read_and_a_list_of_another_form_is_refused(tmp_path):
    mini.wds_retrieval(tmp_path)
    (tmp_path / "test" / "relevance.json").write_text(json.dumps({"pairs": {"s0000001": [0, 5], "s0000003": [7]}}))
    assert open_wds(tmp_path).relevance == {("s0000001", 0), ("s0000001", 5), ("s0000003", 7)}
    (tmp_path / "test" / "relevance.json").write_text("[1, 2]")
    with pytest.raises(DamagedData, match='relevance.json at .* is not {"pairs"'):
        open_wds(tmp_path)


# --- elsewhere -------------------------------------------------------------------------------------------------------
@pytest.fixture
def served(tmp_path, folder, monkeypatch):
    """The address of a web server for tmp_path, where the folder also lies as the hub shows a repository."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for view in ("raw", "resolve"):
        shutil.copytree(folder, tmp_path / "datasets" / "me" / "wds_birds" / view / "main")
    (tmp_path / "datasets" / "me" / "wds_birds" / "raw" / "main" / "test" / "0.tar").write_text("a pointer")

    class Silent(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Silent, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("address", ["{}/wds_birds", "{}/datasets/me/wds_birds/tree/main", "hf-hub:me/wds_birds"])
def test_a_web_server_and_a_page_of_the_hub_give_the_samples_of_the_folder(folder, served, address, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", served)
    remote, local = open_wds(address.format(served)), open_wds(folder)
    assert remote.classnames == local.classnames and remote.kind == "classification" and remote.name == "birds"
    for a, b in zip(remote.samples(), local.samples(), strict=True):
        assert (a.key, a.image, a.label) == (b.key, b.image, b.label)


def test_an_object_store_gives_the_samples_of_the_folder(folder):
    memory = fsspec.filesystem("gs")
    for path in folder.rglob("*"):
        if path.is_file():
            memory.pipe(f"/bucket/{path.relative_to(folder)}", path.read_bytes())
    remote = open_wds("gs://bucket")
    assert [s.image for s in remote.samples()] == [s.image for s in open_wds(folder).samples()]
    assert remote.classnames == mini.CLASSES


def test_an_address_without_a_set_is_refused_before_anything_is_read(served):
    with pytest.raises(FileNotFoundError, match="no test/nshards.txt at .*the address has none"):
        open_wds(served + "/nothing")
    with pytest.raises(FileNotFoundError, match="no val/nshards.txt"):
        open_wds(served + "/wds_birds", split="val")
