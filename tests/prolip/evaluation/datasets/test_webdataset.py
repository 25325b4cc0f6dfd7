"""clip_benchmark's folders and URLs: every sample as it was written, and whatever is wrong by its name."""

import json
import shutil

import miniatures as mini
import numpy as np
import pytest
from clip_benchmark.datasets.builder import build_wds_dataset
from faulty_servers import FaultyServer
from huggingface_hub import constants

from prolip.data.faults import FaultCounter
from prolip.evaluation.datasets import sources
from prolip.evaluation.datasets.base import DamagedData
from prolip.evaluation.datasets.webdataset import open_wds

IMAGE = mini.picture(0)


@pytest.fixture
def folder(tmp_path):
    return mini.wds_classification(tmp_path / "wds_birds", columns=(3, 100))


def test_samples_are_what_was_written_in_its_order_as_clip_benchmark_reads_them(folder):
    dataset = open_wds(folder)
    assert (dataset.name, dataset.kind, dataset.relevance) == ("birds", "classification", None)
    assert dataset.classnames == mini.CLASSES and dataset.templates == mini.TEMPLATES
    samples = list(dataset.samples())
    labels = np.random.default_rng(0).permutation(np.arange(13) % 7)
    assert [sample.key for sample in samples] == [f"s{i:07d}" for i in range(13)]
    assert [sample.label for sample in samples] == labels.tolist()
    assert [sample.image for sample in samples] == [mini.picture(i) for i in range(13)]
    assert all(sample.groups.shape == (2,) and sample.groups[0] < 3 for sample in samples)
    theirs = build_wds_dataset("wds/birds", np.asarray, split="test", data_dir=str(folder))
    assert theirs.classes == list(mini.CLASSES) and theirs.templates == list(mini.TEMPLATES)
    for (pixels, label), sample in zip(theirs, samples, strict=True):
        assert label == sample.label and np.array_equal(pixels, np.asarray(sample.open()))


def test_sets_of_labels_captions_and_faces_have_what_is_beside_their_images(tmp_path):
    many = open_wds(mini.wds_multilabel(tmp_path / "many"))
    labels = np.stack([sample.label for sample in many.samples()])
    assert many.kind == "multilabel" and labels.shape == (14, 7)
    assert set(np.unique(labels)) == {0, 1} and (np.diag(labels[:7]) == 1).all()
    mini.write_shards(tmp_path / "pairs/test", [("a", {"png": IMAGE, "txt": "one\n\nzwölf\n".encode()})])
    (tmp_path / "pairs/dataset_type.txt").write_text("Retrieval")
    (sample,) = open_wds(tmp_path / "pairs").samples()
    assert sample.captions == ("one", "zwölf") and sample.label is None
    faces = open_wds(mini.wds_faces(tmp_path / "faces", {"race": 2, "age": 3}, columns=(2, 3)))
    assert all(sample.label is None and sample.groups.shape == (2,) for sample in faces.samples())


def test_keys_that_shards_share_are_told_apart_and_in_one_shard_are_damage(tmp_path):
    mini.write_classes(tmp_path)
    samples = [(key, {"png": IMAGE, "cls": b"1"}) for key in "abac"]
    mini.write_shards(tmp_path / "test", samples, shards=2)
    assert [s.key for s in open_wds(tmp_path).samples()] == ["a", "b", "a@1", "c"]
    mini.write_shards(tmp_path / "test", samples)
    with pytest.raises(DamagedData, match="duplicate key"):
        list(open_wds(tmp_path).samples())


def test_the_fingerprint_follows_the_data_and_not_its_place_or_prompts(folder, tmp_path):
    before = open_wds(folder).fingerprint
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    (copy / "classnames.txt").write_text("\n".join(f"class {i}" for i in range(7)))
    assert open_wds(copy).fingerprint == before
    path, data = tmp_path / "0.tar", bytearray(10 * sources.SAMPLED)
    marks = {sources.file_mark(copy / "test/0.tar")}
    for share in (0.0, 0.5, 0.999):  # the head, the middle and the tail of a large shard
        data[int(share * len(data))] = 1
        path.write_bytes(data)
        marks.add(sources.file_mark(path))
    assert len(marks) == 4


@pytest.mark.parametrize(
    "file, text, error, message",
    [
        ("test/nshards.txt", None, FileNotFoundError, "no test/nshards.txt at .*has classnames"),
        ("test/nshards.txt", "two", DamagedData, "has 'two': write the number of shards"),
        ("test/1.tar", None, FileNotFoundError, "1 of 2 shards are missing: .*1.tar: fetch"),
        ("zeroshot_classification_templates.txt", "", FileNotFoundError, "an empty one"),
        ("zeroshot_classification_templates.txt", "a {c}\na photo of it", DamagedData, "'a photo of it' has no {c}"),
        ("dataset_type.txt", "segments", DamagedData, "'segments': use one of classification, multilabel, retrieval"),
    ],
)
def test_what_is_wrong_around_the_shards_is_known_before_they_are_read(folder, file, text, error, message):
    (folder / file).unlink() if text is None else (folder / file).write_text(text)
    with pytest.raises(error, match=message):
        open_wds(folder)


def test_a_folder_one_level_off_names_the_one_that_is_meant(tmp_path):
    for name in ("wds_a", "wds_cars_test", "wds_dev"):
        mini.wds_classification(tmp_path / name, images=7)
    (tmp_path / "wds_dev/test").rename(tmp_path / "wds_dev/dev")
    for given, wanted in (
        ("", f"it is one level too high: give {tmp_path}/wds_a"),
        ("wds_a/test", f"it is inside a data set: give {tmp_path}/wds_a."),
        ("wds_dev", "it has the split dev: give --split dev"),
        ("wds_a/test/0.tar", "is a file: give the folder of the test set"),
        ("wds_b", "no test set at .*Did you mean wds_a"),
    ):
        with pytest.raises(FileNotFoundError, match=wanted):
            open_wds(f"{tmp_path}/{given}")


@pytest.mark.parametrize(
    "kind, members, words",
    [
        ("classification", {"v2.png": IMAGE, "v2.cls": b"1"}, "a key ends at the first dot.*KEY.jpg next to KEY.cls$"),
        (
            "multilabel",
            {"image": IMAGE, "npy": mini.array([1] * 7)},
            "not an image suffix.*next to KEY.npy$",
        ),
        ("retrieval", {"png": IMAGE}, "its images have no text with the same key"),
        ("retrieval", None, "not a tar archive but an HTML page"),
    ],
)
def test_a_set_of_which_nothing_can_be_used_is_refused_when_it_is_opened(tmp_path, kind, members, words):
    mini.write_classes(tmp_path)
    (tmp_path / "dataset_type.txt").write_text(kind)
    mini.write_shards(tmp_path / "test", [(key, members or {"png": IMAGE}) for key in "abc"])
    if members is None:
        (tmp_path / "test/0.tar").write_text("<html>404</html>")
    with pytest.raises(DamagedData, match=words) as refused:
        open_wds(tmp_path, damage=FaultCounter())
    assert "\n" not in str(refused.value) and f"{tmp_path}/test/0.tar" in str(refused.value)
    good = {"png": IMAGE, "cls": b"1", "npy": mini.array([1] * 7), "txt": b"a"}
    mini.write_shards(tmp_path / "test", [*((key, members or {"txt": b"x"}) for key in "abc"), ("d", good)])
    assert open_wds(tmp_path).kind == kind  # one that can be used is enough to begin


def test_a_cut_shard_ends_the_evaluation_or_is_counted_with_its_name(folder):
    shard = folder / "test" / "0.tar"
    shard.write_bytes(shard.read_bytes()[:5000])
    with pytest.raises(DamagedData, match="0.tar: broken shard: .*Fetch this file again, or use --skip-damaged"):
        list(open_wds(folder).samples())
    damage = FaultCounter()
    kept = [sample.key for sample in open_wds(folder, damage=damage).samples()]
    assert kept[-6:] == [f"s{i:07d}" for i in range(7, 13)] and len(kept) < 13
    assert damage.kinds["broken shard"] == 1 and "0.tar" in damage.examples[0]
    assert (damage.shards, damage.samples) == (2, len(kept))


@pytest.mark.parametrize(
    "members, message",
    [
        ({"cls": b"7"}, "'x' of .*0.tar: bad label: cls has '7'; classnames.txt has the classes 0 to 6"),
        ({"cls": b"cat"}, "cls has 'cat'; classnames.txt has"),
        ({"txt": b"no label"}, "missing label: members: png, txt; expected cls"),
        ({"cls": b"1", "npy": b"nonsense"}, "bad array"),
    ],
)
def test_a_sample_that_makes_no_sense_is_named(tmp_path, members, message):
    mini.write_classes(tmp_path)
    whole = ("y", {"png": IMAGE, "cls": b"0"})
    mini.write_shards(tmp_path / "test", [("x", {"png": mini.picture(1), **members}), whole])
    with pytest.raises(DamagedData, match=message):
        list(open_wds(tmp_path).samples())
    damage = FaultCounter()
    assert [sample.key for sample in open_wds(tmp_path, damage=damage).samples()] == ["y"]
    assert damage.bad_samples == 1 and damage.samples == 2


def test_labels_of_another_width_and_pairs_of_another_form_are_refused(tmp_path):
    many = mini.wds_multilabel(tmp_path / "many")
    mini.write_classes(many, mini.CLASSES[:5])
    with pytest.raises(DamagedData, match=r"bad label: an array \(7,\) of int64; expected zeros and ones \(5,\)"):
        list(open_wds(many).samples())
    pairs = mini.wds_retrieval(tmp_path / "pairs")
    (pairs / "test/relevance.json").write_text(json.dumps({"pairs": {"s0000001": [0, 5], "s0000003": [7]}}))
    assert open_wds(pairs).relevance == {("s0000001", 0), ("s0000001", 5), ("s0000003", 7)}
    (pairs / "test/relevance.json").write_text("[1, 2]")
    with pytest.raises(DamagedData, match='relevance.json at .* is not {"pairs"'):
        open_wds(pairs)


# --- elsewhere -------------------------------------------------------------------------------------------------------
def test_a_web_server_and_pages_of_the_hub_give_the_samples_of_the_folder(folder, tmp_path, monkeypatch):
    for view in ("raw", "resolve"):  # as the hub shows a repository
        shutil.copytree(folder, tmp_path / "datasets/me/wds_birds" / view / "main")
    (tmp_path / "datasets/me/wds_birds/raw/main/test/0.tar").write_text("a pointer")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    local = open_wds(folder)
    with FaultyServer.of_folder(tmp_path) as server:
        monkeypatch.setattr(constants, "ENDPOINT", at := server.root)
        for address in (f"{at}/wds_birds", f"{at}/datasets/me/wds_birds/tree/main", "hf-hub:me/wds_birds"):
            remote = open_wds(address)
            assert (remote.classnames, remote.kind, remote.name) == (local.classnames, "classification", "birds")
            for a, b in zip(remote.samples(), local.samples(), strict=True):
                assert (a.key, a.image, a.label) == (b.key, b.image, b.label)
        with pytest.raises(FileNotFoundError, match="no test/nshards.txt at .*the address has none"):
            open_wds(f"{at}/nothing")
