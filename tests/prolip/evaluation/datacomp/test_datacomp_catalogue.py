"""The table of tasks against the numbers that DataComp and the paper state, and the choice of tasks by name."""

import pytest

from prolip.evaluation.suites.datacomp.catalogue import AGGREGATES, BY_KEY, COUNTED, TASKS, select_tasks, shard

VTAB = """Caltech-101, CIFAR-100, CLEVR Counts, CLEVR Distance, Describable Textures, EuroSAT, KITTI Vehicle Distance,
Oxford Flowers-102, Oxford-IIIT Pet, PatchCamelyon, RESISC45, SVHN, SUN397"""
SHIFTS = "ImageNet-A, ImageNet-O, ImageNet-R, ImageNet v2, ImageNet Sketch, ObjectNet"
"""As the paper's B.2 names them."""


def test_entries_aggregates_metrics_and_sizes_are_those_of_datacomp_and_the_paper():
    assert len(TASKS) == len(BY_KEY) == 40 and len(AGGREGATES["Average"]) == len(COUNTED) == 38
    assert [task.name for task in TASKS if not task.counted] == ["FairFace", "UTKFace"]
    names = {aggregate: {BY_KEY[key].name for key in keys} for aggregate, keys in AGGREGATES.items()}
    assert names["VTAB"] == {name.strip() for name in VTAB.replace("\n", " ").split(",")}
    assert names["IN dist. shifts"] == set(SHIFTS.split(", ")) and names["ImageNet"] == {"ImageNet 1k"}
    assert names["Retrieval"] == {"Flickr", "MSCOCO", "WinoGAViL"}
    special = {task.key: task.main_metric for task in COUNTED if task.main_metric != "acc1"}
    recall = dict.fromkeys(("vtab/caltech101", "fgvc_aircraft", "vtab/flowers", "vtab/pets"), "mean_per_class_recall")
    assert special == recall | {
        "wilds/iwildcam": "F1-macro_all",
        "wilds/fmow": "acc_worst_region",
        "retrieval/flickr_1k_test_image_text_retrieval": "mean_recall@1",
        "retrieval/mscoco_2014_5k_test_image_text_retrieval": "mean_recall@1",
        "misc/winogavil": "jaccard_score_10-12",
        "fairness/dollar_street": "acc_top5_wg",
        "fairness/geode": "acc_wg",
    }
    many = 5 * 10 + 3 * 1000 + 3 * 200  # CIFAR-10, EuroSAT, MNIST, STL-10, SVHN; ImageNets
    others = (100, 8, 6, 211, 47, 101, 43, 113, 4, 20, 2, 2, 45, 196, 397, 2, 102, 100, 102, 37, 182, 62, 58, 40)
    assert sum(task.classes or 0 for task in TASKS) == many + sum(others)
    assert BY_KEY["imagenet1k"].size == 50_000
    assert BY_KEY["wilds/fmow"].size == 4963 + 5858 + 2593 + 8024 + 666 + 4  # WILDS: its regions, "Other" the last
    assert BY_KEY["wilds/fmow"].repository == "djghosh/wds_wilds-fmow_test"
    assert BY_KEY["fairness/dollar_street"].folders == ("wds_dollar_street_test",)


def test_tasks_are_selected_by_keys_names_folders_and_tags_in_the_order_of_the_table():
    assert select_tasks(None) == TASKS and select_tasks(["counted"]) == COUNTED
    for name in ("cars", "Stanford Cars", "stanford cars", "wds_cars_test"):
        assert [task.key for task in select_tasks([name])] == ["cars"]
    assert [task.key for task in select_tasks(["fmow", "cifar10"])] == ["cifar10", "wilds/fmow"]
    assert len(select_tasks(["vtab", "shift"])) == 19 and select_tasks(["imagenet"])[0].key == "imagenet1k"
    assert select_tasks(["VTAB", "Shift"]) == select_tasks(["vtab", "shift"])
    for wrong, meant in (("imagenet-b", "imagenet-a"), ("retreival", "retrieval")):
        with pytest.raises(ValueError, match=f"no task '{wrong}'.*{meant}"):
            select_tasks([wrong])


@pytest.mark.parametrize("count", [1, 3, 50])
def test_shards_hold_every_task_once_and_about_as_many_images_each(count):
    parts = [shard(TASKS, i, count) for i in range(count)]
    assert sorted(task.key for part in parts for task in part) == sorted(task.key for task in TASKS)
    if count <= 3:
        loads = [sum(task.size for task in part) for part in parts]
        assert max(loads) < 1.1 * min(loads)
