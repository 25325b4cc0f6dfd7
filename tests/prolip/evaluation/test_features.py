"""Features: computed once, in order, kept whole, and as good without the model as with it."""

import copy
import logging
import os
import shutil
import tarfile
from dataclasses import replace

import miniatures as mini
import numpy as np
import pytest
import torch
from embedding import changed

import prolip
from prolip.data.faults import FaultCounter
from prolip.evaluation import cache as feature_store
from prolip.evaluation import embed as features
from prolip.evaluation.cache import FeatureStore
from prolip.evaluation.datasets.base import DamagedData, Dataset, Sample
from prolip.evaluation.datasets.registry import open_dataset
from prolip.evaluation.datasets.webdataset import open_wds
from prolip.evaluation.evaluate import compute_features, evaluate_dataset
from prolip.evaluation.ranks import features_over_ranks
from prolip.gaussian import Gaussian
from prolip.prompts.templates import build_zero_shot_classifier, class_prompts
from prolip.uncertainty.doubt import Evidence


class Counted:
    """An embedder that counts the batches it embeds."""

    def __init__(self, embedder):
        self.images = self.texts = 0
        self.embedder = changed(embedder, encode_image=self.image, encode_text=self.text)
        self._inner = embedder

    def image(self, pixels):
        self.images += 1
        return self._inner.encode_image(pixels)

    def text(self, ids):
        self.texts += 1
        return self._inner.encode_text(ids)


def same(a: Gaussian, b: Gaussian) -> bool:
    return torch.equal(a.mean, b.mean) and torch.equal(a.log_var, b.log_var)


def datasets(root):
    """A data set of every kind."""
    return [
        open_wds(mini.wds_classification(root / "wds_groups", columns=(3, 9))),
        open_wds(mini.wds_multilabel(root / "wds_multi")),
        open_wds(mini.wds_retrieval(root / "wds_pairs")),
        open_dataset(f"winogavil:{mini.winogavil(root / 'wino')}"),
        open_dataset("cub:{},{}".format(*mini.cub(root / "cub"))),
    ]


@pytest.mark.parametrize("workers, batch_size", [(0, 5), (3, 4)])
def test_images_are_embedded_in_order_whatever_decodes_them(tmp_path, ours, workers, batch_size):
    dataset = open_wds(mini.wds_classification(tmp_path, columns=(3,)))
    found = features.image_features(dataset, ours, batch_size=batch_size, workers=workers)
    samples = list(dataset.samples())
    wanted = ours.encode_image(torch.stack([ours.preprocess(sample.open()) for sample in samples]))
    torch.testing.assert_close(found.image.mean, wanted.mean)
    torch.testing.assert_close(found.image.log_var, wanted.log_var)
    assert found.keys == tuple(sample.key for sample in samples)
    assert found.labels.tolist() == [sample.label for sample in samples]
    np.testing.assert_array_equal(found.groups, np.stack([sample.groups for sample in samples]))
    assert found.text is None and found.damaged == {}


def broken(sample: Sample, key: str) -> Sample:
    return sample._replace(image=sample.image[:200]) if sample.key == key else sample


def test_a_picture_that_cannot_be_opened_is_named_or_left_out_and_said(tmp_path, ours, caplog):
    whole = open_wds(mini.wds_classification(tmp_path / "wds"))

    def samples(share):
        return (broken(sample, "s0000004") for sample in whole.samples(share))

    with pytest.raises(DamagedData, match="sample 's0000004' of .*wds: bad image: "):
        features.image_features(replace(whole, samples=samples), ours)
    store = FeatureStore(tmp_path / "store")
    with pytest.raises(FileNotFoundError, match="no features in .*--save-features"):
        list(features.load_features(store))
    counting = replace(whole, samples=samples, damage=FaultCounter())
    for _ in range(2):  # counts are those of one pass
        found = compute_features(counting, ours, store)
        assert len(found.keys) == 12 and "s0000004" not in found.keys
        assert found.damaged["kinds"] == {"bad image": 1} and "s0000004" in found.damaged["examples"][0]
    assert not list((tmp_path / "store").glob("images/*")) and not list((tmp_path / "store").glob("tasks/*"))
    assert f"the features of wds are not saved in {tmp_path / 'store'}" in caplog.text


def test_what_was_left_out_would_shift_pairs_by_place(tmp_path, ours):
    pairs = open_wds(mini.wds_retrieval(tmp_path))

    def samples(share):
        return (broken(sample, "s0000001") for sample in pairs.samples(share))

    labelled = replace(pairs, samples=samples, damage=FaultCounter(), relevance=frozenset([("s0000005", 2)]))
    with pytest.raises(DamagedData, match="wrong if samples are left out"):
        features.image_features(labelled, ours)
    plain = replace(labelled, relevance=None, info={"caption_ids": [1, 2], "split": "test"})
    assert features.image_features(plain, ours).dataset.info == {"split": "test"}


def made(samples: list[Sample], kind="classification", **options) -> Dataset:
    return Dataset("made", kind, lambda share: iter(samples), "0", "memory", mini.CLASSES, mini.TEMPLATES, **options)


@pytest.mark.parametrize(
    "samples, options, message",
    [
        ([Sample("a", mini.picture(0), 1), Sample("b", mini.picture(1))], {}, r"the label of .*: 1 of 2 have none"),
        ([Sample("a", mini.picture(0), 1), Sample("a", mini.picture(1), 2)], {}, "samples with one key"),
        ([Sample("a", mini.picture(0), 1)], {"size": 2}, "gave 1 images, expected 2"),
        ([Sample("a", mini.picture(0), captions=())], {"kind": "retrieval"}, "has no caption"),
        ([], {}, "no image in memory"),
    ],
)
def test_samples_that_do_not_fit_together_are_refused(ours, samples, options, message):
    with pytest.raises(ValueError, match=message):
        features.image_features(made(samples, **options), ours)


def test_classes_are_the_mixtures_of_their_prompts(folder, ours, monkeypatch):
    templates = [template.replace("{c}", "{}") for template in mini.TEMPLATES]
    model, tokenizer = prolip.create_model(folder), prolip.get_tokenizer(folder)
    wanted = build_zero_shot_classifier(model, tokenizer, [[name] for name in mini.CLASSES], templates)
    for prompts in (4096, 5):  # all at once, and two classes at a time
        monkeypatch.setattr("prolip.prompts.templates.PROMPTS", prompts)
        got = features.stored_texts(*class_prompts(mini.CLASSES, mini.TEMPLATES), ours, FeatureStore())
        torch.testing.assert_close(got.mean, wanted.mean)
        torch.testing.assert_close(got.log_var, wanted.log_var)


def test_everything_is_embedded_once_per_data_set_and_model(tmp_path, ours, theirs):
    dataset, store = open_wds(mini.wds_classification(tmp_path / "wds")), FeatureStore(tmp_path / "store")
    first = Counted(ours)
    one = compute_features(dataset, first.embedder, store, batch_size=5)
    assert (first.images, first.texts) == (3, 1)
    again = compute_features(dataset, first.embedder, store)
    assert (first.images, first.texts) == (3, 1) and same(one.image, again.image) and same(one.text, again.text)
    other, half = Counted(theirs), Counted(changed(ours, precision="amp_bf16"))
    for counted in (other, half):
        compute_features(dataset, counted.embedder, store)
        assert counted.images == 1 and counted.texts == 1
    (tmp_path / "wds" / "classnames.txt").write_text("\n".join(f"kind {i}" for i in range(7)))
    compute_features(open_wds(tmp_path / "wds"), first.embedder, store)
    assert (first.images, first.texts) == (3, 2)  # other prompts, the same images


def test_a_label_corrected_in_a_shard_is_seen_though_its_size_is_the_same(tmp_path, ours, caplog):
    folder, store = tmp_path / "wds", FeatureStore(tmp_path / "store")
    mini.write_classes(folder)
    noise = np.random.default_rng(0).integers(0, 255, (40, 64, 64, 3), dtype=np.uint8)  # no sample of the mark hits it
    pictures = [mini.encoded(pixels) for pixels in noise]
    mini.write_shards(folder / "test", [(f"s{i}", {"png": data, "cls": b"1"}) for i, data in enumerate(pictures)])
    before = compute_features(open_wds(folder), ours, store)
    shard = folder / "test" / "0.tar"
    with tarfile.open(shard) as archive:
        place = archive.getmember("s10.cls").offset_data
    data = bytearray(shard.read_bytes())
    data[place] = ord("5")
    shard.write_bytes(data)
    os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))  # clocks of file systems may be coarse
    counted, corrected = Counted(ours), open_wds(folder)
    assert corrected.fingerprint == before.dataset.fingerprint
    with caplog.at_level(logging.WARNING):
        after = compute_features(corrected, counted.embedder, store)
    assert (before.labels[10], after.labels[10], counted.images) == (1, 5, 1)
    assert "has changed since its images were embedded" in caplog.text
    shutil.copytree(folder, tmp_path / "elsewhere", copy_function=shutil.copy)  # another place, another time
    compute_features(open_wds(tmp_path / "elsewhere"), counted.embedder, FeatureStore(tmp_path / "store"))
    compute_features(open_wds(folder), counted.embedder, FeatureStore(tmp_path / "store"))
    assert counted.images == 2  # the name of the data set is another one; nothing else was embedded again


@pytest.mark.parametrize("model", ["ours", "theirs"])
def test_features_of_every_kind_are_as_good_without_the_model(tmp_path, model, request):
    embedder, store = request.getfixturevalue(model), FeatureStore(tmp_path / "store")
    computed = {d.name: compute_features(d, embedder, store) for d in datasets(tmp_path)}
    loaded = {found.dataset.name: found for found in features.load_features(FeatureStore(tmp_path / "store"))}
    assert set(loaded) == set(computed) == {"groups", "multi", "pairs", "winogavil", "cub_test"}
    for name, a in computed.items():
        b = loaded[name]
        assert a.captions == tuple(caption for sample in a.dataset.samples() for caption in sample.captions or ())
        assert same(a.image, b.image) and same(a.text, b.text) and (a.keys, a.captions) == (b.keys, b.captions)
        assert replace(a.dataset, samples=b.dataset.samples) == b.dataset and a.model == b.model
        for field in ("labels", "owners", "groups"):
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
        one, other = (evaluate_dataset(found.dataset, found) for found in (a, b))
        assert one.metrics == other.metrics and one.info | {"seconds": 0} == other.info | {"seconds": 0}
        with pytest.raises(FileNotFoundError, match="the saved features of"):
            next(b.dataset.samples())


class Reading:
    """A reader that takes two columns of an image's mean for its evidence."""

    def evidence(self, mean):
        return Evidence(mean[:, 0].abs(), mean[:, 1])


def test_features_keep_the_evidence_of_their_images_and_old_ones_have_none(tmp_path, ours):
    dataset, store = open_wds(mini.wds_retrieval(tmp_path / "wds_pairs")), FeatureStore(tmp_path / "store")
    compute_features(dataset, ours, store)  # a record from before there was any
    reading = changed(ours, score=copy.deepcopy(ours.score))
    reading.score.reader = Reading()
    assert compute_features(dataset, reading, store).evidence is None
    assert next(features.load_features(store)).evidence is None
    shutil.rmtree(tmp_path / "store")
    found = compute_features(dataset, reading, store)
    loaded = next(features.load_features(FeatureStore(tmp_path / "store")))
    for one in (found, loaded, features_over_ranks(dataset, reading)):
        assert torch.equal(one.evidence.novelty, found.image.mean[:, 0].abs())
        assert torch.equal(one.evidence.nearest, found.image.mean[:, 1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def of_another_key(path):
    store, kind = FeatureStore(path.parents[1]), path.parent.name
    store.write(kind, "another key", feature_store.Record({}, {}))
    (path.parent / "another key.safetensors").replace(path)


@pytest.mark.parametrize("kind", ["images", "texts"])
@pytest.mark.parametrize("spoil", [flip, lambda path: path.write_bytes(path.read_bytes()[:-10]), of_another_key])
def test_a_damaged_file_is_said_and_computed_again(tmp_path, ours, kind, spoil, caplog):
    dataset, store = open_wds(mini.wds_classification(tmp_path / "wds")), FeatureStore(tmp_path / "store")
    one = compute_features(dataset, ours, store)
    (path,) = (tmp_path / "store" / kind).iterdir()
    spoil(path)
    with pytest.raises(DamagedData, match=f"the {kind} of wds by local-dir:.* are damaged or missing"):
        list(features.load_features(store))
    counted = Counted(ours)
    with caplog.at_level(logging.WARNING):
        again = compute_features(dataset, counted.embedder, store)
    assert f"{path} is damaged" in caplog.text and "computing it again" in caplog.text
    assert same(one.image, again.image) and same(one.text, again.text)
    assert (counted.images, counted.texts) == ((1, 0) if kind == "images" else (0, 1))
    compute_features(dataset, counted.embedder, store)
    assert counted.images + counted.texts == 1  # it was mended
