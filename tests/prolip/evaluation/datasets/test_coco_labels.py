"""COCO 5K, 1K, CxC and ECCV Caption equal the figures of eccv_caption; and PMRP by COCO's categories."""

import json
import warnings
from dataclasses import replace

import dense_ranking
import numpy as np
import pytest
import torch
from frozen_sets import write_label_files

from prolip.embedder import ModelCard
from prolip.evaluation.datasets import coco_labels as coco
from prolip.evaluation.datasets.base import Dataset
from prolip.evaluation.embed import Features
from prolip.evaluation.evaluate import evaluate_dataset
from prolip.evaluation.metrics.streaming import PairScores
from prolip.gaussian import Gaussian

KS = (1, 5, 10)
IMAGES, PER_IMAGE = 50, 5  # R@10 needs ten in each of five folds


def package_figures(matrix, image_ids, caption_ids, folder):
    """Return the metrics of eccv_caption under our names, with its annotations replaced by those of `folder`."""
    eccv_caption = pytest.importorskip("eccv_caption")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = eccv_caption.Metrics()
    for name, ours in coco.LABELS.items():
        files = [str(folder / f"{ours}_{way}.json") for way in ("image_to_caption", "caption_to_image")]
        getattr(found, f"set_{name}_gts")(*files)
    found.coco_ids = np.load(folder / "coco_test_ids.npy")
    image_ids, caption_ids = np.array(image_ids, dtype=np.int32), np.array(caption_ids, dtype=np.int32)
    orders = [np.argsort(-scores, kind="stable") for scores in (matrix, matrix.T)]
    found.set_i2t_retrieved_items(dict(zip(image_ids.tolist(), caption_ids[orders[0]])))
    found.set_t2i_retrieved_items(dict(zip(caption_ids.tolist(), image_ids[orders[1]])))
    # In two calls: with mAP@R the package drops the recalls, and it gives R-Precision only with mAP@R.
    out = {}
    recalls = found.compute_all_metrics(target_metrics=[f"{s}_recalls" for s in ("coco_1k", "coco_5k", "cxc", "eccv")])
    for name, both in recalls.items():
        task, k = name.rsplit("_r", 1)
        out |= {f"{task}/{way}/R@{k}": value for way, value in both.items()}
    rest = found.compute_all_metrics(target_metrics=["eccv_map_at_r", "eccv_rprecision"])
    for name, ours in (("eccv_map_at_r", "mAP@R"), ("eccv_rprecision", "R-Precision")):
        out |= {f"eccv/{way}/{ours}": value for way, value in rest[name].items()}
    assert len(out) == 2 * (4 * 3 + 2)
    return out


@pytest.fixture
def split(tmp_path):
    """The package's files for a tiny split, ids without order: folder, images, captions."""
    rng = np.random.default_rng(0)
    images = rng.permutation(10_000)[:IMAGES].tolist()
    captions = rng.permutation(100_000)[: IMAGES * PER_IMAGE].reshape(IMAGES, PER_IMAGE).tolist()
    return tmp_path, images, write_label_files(tmp_path, dict(zip(images, captions)), rng, 777_777)


@pytest.mark.parametrize("values", [4, 10**6])  # many ties, and none
def test_a_miniature_gives_the_packages_figures(in_blocks, split, values):
    in_blocks(900)
    folder, images, captions = split
    rng = np.random.default_rng(1)
    images, captions = rng.permutation(images).tolist(), rng.permutation(captions).tolist()
    matrix = rng.integers(0, values, (len(images), len(captions))).astype(np.float32)
    scores, labels = PairScores.from_matrix(matrix), coco.load_annotations(folder)
    got = coco.label_set_metrics(scores, images, captions, labels)
    want = package_figures(matrix, images, captions, folder)
    assert {key: got[key] for key in want} == pytest.approx(want, abs=1e-12)
    for name in ("mAP@R", "R-Precision", "R@1"):
        assert got[f"eccv/{name}"] == pytest.approx((want[f"eccv/i2t/{name}"] + want[f"eccv/t2i/{name}"]) / 2)
    six = [want[f"cxc/{way}/R@{k}"] for way in ("i2t", "t2i") for k in KS]
    assert got["cxc/rsum"] == pytest.approx(100 * sum(six))


def test_retrieval_on_cocos_test_split_has_the_figures_of_all_its_labels(split, monkeypatch):
    folder, images, captions = split
    annotations = coco.load_annotations(folder)
    monkeypatch.setattr(coco, "_packaged", lambda: annotations)
    generator = torch.Generator().manual_seed(4)
    shapes = ((IMAGES, 8), (len(captions), 8))
    image, text = (Gaussian(torch.randn(*shape, generator=generator), torch.zeros(shape)) for shape in shapes)
    info = {"image_ids": images, "caption_ids": captions}
    dataset = Dataset("coco", "retrieval", lambda share: iter(()), "0", "memory", info=info)
    owners = torch.arange(IMAGES).repeat_interleave(PER_IMAGE)
    texts = {"captions": ("a",) * len(captions), "owners": owners, "text": text}
    features = Features(dataset, ModelCard("m", ""), tuple(map(str, images)), image, **texts)
    found = evaluate_dataset(features.dataset, features).metrics
    want = coco.label_set_metrics(PairScores.from_gaussians(image, text), images, captions, annotations)
    assert {key: found[key] for key in want} == want
    assert sorted(want) == sorted(coco.names_of_labels({"caption_ids": range(25_000)}))
    assert found["coco_5k/i2t/R@5"] == found["i2t/R@5"]  # each image's own captions
    half = replace(features, dataset=replace(dataset, info={**info, "caption_ids": captions[:-1] + [10**6]}))
    assert "eccv/mAP@R" not in evaluate_dataset(half.dataset, half).metrics


def test_captions_beyond_the_split_are_left_out_of_every_gallery_and_coco_is_ranked_densely(split):
    folder, images, captions = split
    annotations = coco.load_annotations(folder)
    matrix = np.random.default_rng(3).normal(size=(len(images), len(captions))).astype(np.float32)
    want = coco.label_set_metrics(PairScores.from_matrix(matrix), images, captions, annotations)
    more = np.insert(matrix, [7, 100], 9.0, axis=1)  # nearest to every image
    ids = np.insert(captions, [7, 100], [200_001, 200_002]).tolist()
    assert coco.label_set_metrics(PairScores.from_matrix(more), images, ids, annotations) == want
    relevant = torch.arange(IMAGES).repeat_interleave(PER_IMAGE) == torch.arange(IMAGES).unsqueeze(1)
    dense = dense_ranking.retrieval(torch.from_numpy(matrix), relevant)
    for name in coco.RECALLS:
        assert want[f"coco_5k/{name}"] == pytest.approx(dense[name])


def test_what_is_missing_is_named(split, monkeypatch):
    folder, images, captions = split
    annotations = coco.load_annotations(folder)
    scores = PairScores.from_matrix(torch.zeros(IMAGES, len(captions)))
    for rows, columns, message in (
        (images, [*captions[:-1], 10**6], f"1 of 250 annotated captions are missing, {captions[-1]} first"),
        (images[:-1], captions, "49 image ids, 49 of them distinct, for 50 images"),
        (images, [*captions[:-1], captions[0]], "250 caption ids, 249 of them distinct"),
    ):
        with pytest.raises(ValueError, match=message):
            coco.label_set_metrics(scores, rows, columns, annotations)
    (folder / "cxc_image_to_caption.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no cxc_image_to_caption.json.*pip install eccv_caption"):
        coco.load_annotations(folder)
    monkeypatch.setattr(coco, "PACKAGE", "no_such_package_of_captions")
    with pytest.raises(FileNotFoundError, match="package no_such_package_of_captions is not installed"):
        coco.load_annotations()


def test_plausible_matches_come_from_cocos_categories(tmp_path):
    shown = [(11, 3), (11, 90), (11, 3), (12, 7), (99, 3)]  # image 13 shows nothing
    ids = {"categories": (90, 3, 7), "images": (11, 12, 13, 99)}
    content = {name: [{"id": i} for i in these] for name, these in ids.items()}
    content["annotations"] = [{"image_id": i, "category_id": c} for i, c in shown]
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(content))
    labels = coco.category_labels(path, [13, 11, 12])
    assert labels.tolist() == [[False] * 3, [True, False, True], [False, True, False]]
    image_of = torch.tensor([0, 1, 1, 2])
    matrix = torch.tensor([[9.0, 9, 9, 9], [5, 1, 2, 3], [5, 3, 2, 1]])
    got = coco.plausible(PairScores.from_matrix(matrix), labels, image_of)
    # Image 13 and its caption are left out. Image 11 ranks 12's caption first, its own second: R = 2, one of two.
    # Image 12 ranks its own caption last: R = 1, none. With zeta = 2 nothing changes: the labels differ in 3 places.
    assert got["i2t/PMRP@0"] == got["i2t/PMRP@2"] == pytest.approx((1 / 2 + 0) / 2)
    assert got["i2t/queries"] == 2 and got["t2i/queries"] == 3
    # Captions of 11 prefer 12 (1 < 3) and are undecided (2 = 2: the lower index, 11); 12's prefers 11.
    assert got["t2i/PMRP@0"] == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="1 of 2 images, 14 first, are not listed"):
        coco.category_labels(path, [11, 14])
    with pytest.raises(FileNotFoundError, match="PMRP needs COCO's instances_val2014.json"):
        coco.category_labels(tmp_path / "none.json", [11])
