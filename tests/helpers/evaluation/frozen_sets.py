"""Miniature test sets whose metrics are frozen, and those of suites that have their own folders."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import miniatures as mini
import numpy as np

from prolip.cli.main import main

#: Prompt rules that stored features keep, as no image chooses.
TEMPLATES = (*mini.TEMPLATES, "{c} picture")
#: DataComp's classification tasks.
PLAIN = (
    "vtab/caltech101 cifar10 vtab/cifar100 vtab/clevr_count_all vtab/clevr_closest_object_distance country211 vtab/dtd"
    " vtab/eurosat fgvc_aircraft food101 gtsrb imagenet1k imagenet_sketch imagenetv2 imagenet-a imagenet-o imagenet-r"
    " vtab/kitti_closest_vehicle_distance mnist objectnet vtab/flowers vtab/pets voc2007 vtab/pcam renderedsst2"
    " vtab/resisc45 cars stl10 sun397 vtab/svhn"
)
#: Those with metadata: how many values each column has.
COLUMNS = {
    "wds_wilds-iwildcam_test": (3, 9, 9, 9, 9, 9, 9, 9, 7),
    "wds_wilds-camelyon17_test": (2, 3, 2),
    "wds_wilds-fmow_test": (6, 3, 7),
    "wds_dollar_street_test": (3, 4, 4),
    "wds_geode_test": (3, 5),
}
FACES = {"race": 4, "gender": 2, "age": 3, "toxic": 21}
COCO_IMAGES, COCO_CAPTIONS = 50, 5


def write(root: Path) -> dict[str, str]:
    """A set of every kind that --data takes: name -> source."""
    file, pictures = mini.karpathy(root / "coco", images=12)
    flickr, flickr_pictures = mini.karpathy(root / "flickr", images=12, dataset="flickr")
    captions, birds = mini.cub(root / "cub")
    own = write_tables(root / "own")
    return own | {
        "classes": f"wds:{mini.wds_classification(root / 'wds_classes', templates=TEMPLATES, images=42)}",
        "pool": f"wds:{mini.wds_classification(root / 'wds_pool', templates=TEMPLATES, images=35, seed=3)}",
        "many": f"wds:{mini.wds_multilabel(root / 'wds_many', images=20)}",
        "pairs": f"wds:{mini.wds_retrieval(root / 'wds_pairs', images=24)}",
        "coco": f"coco:{file},{pictures}",
        "flickr": f"flickr:{flickr},{flickr_pictures}",
        "table": f"captions:{mini.caption_table(root / 'table', images=12)}",
        "cub": f"cub:{captions},{birds}",
        "iapr": f"iapr:{mini.iapr(root / 'iapr')}",
        "wino": f"winogavil:{mini.winogavil(root / 'wino')}",
        "folders": f"imagenet:{mini.class_folders(root / 'folders', ['cat', 'dog', 'fish'], images=6)}",
        **write_drawn(root / "drawn"),
    }


def write_tables(root: Path) -> dict[str, str]:
    """A table of captions and a folder of classes, as a user has them."""
    rng = np.random.default_rng(8)
    (root / "pictures").mkdir(parents=True)
    with open(root / "captions.csv", "w", newline="", encoding="utf-8") as table:
        rows = csv.writer(table)
        rows.writerow(["path", "caption"])
        for number in range(15):
            (root / "pictures" / f"{number}.png").write_bytes(mini.picture(500 + number))
            rows.writerows([f"pictures/{number}.png", text] for text in mini.sentences(rng, number % 9, 1 + number % 2))
    for number, name in enumerate(("car", "dog", "tree", "house")):
        (root / "kinds" / name).mkdir(parents=True)
        for i in range(5):
            (root / "kinds" / name / f"{i}.png").write_bytes(mini.picture(600 + 9 * number + i))
    return {"csv": f"csv:{root}/captions.csv", "kinds": f"images:{root}/kinds"}


def write_drawn(root: Path) -> dict[str, str]:
    """Drawings by `prolip data`: with matches of all levels, by subgroup, and the base and novel classes of few shots.

    The working directory holds drawings.tar.
    """

    emoji = "emoji --data drawings.tar --output"
    few = f"few-shot --data wds:{root}/wds_groups --shots 2 --template {{c}} --output {root}/few"
    for words in (f"{emoji} {root}/wds_emoji", f"{emoji} {root}/wds_groups --classes subgroup", few):
        assert main(["data", *words.split()]) == 0
    names = {"emoji": "wds_emoji", "groups": "wds_groups", "base": "few/base", "novel": "few/novel"}
    return {name: f"wds:{root}/{folder}" for name, folder in names.items()}


# --- COCO's further labels -------------------------------------------------------------------------------------------
def write_coco(root: Path) -> str:
    """The source of COCO's miniature whose captions are all of `write_labels`."""
    file, pictures = mini.karpathy(root, images=COCO_IMAGES, captions=COCO_CAPTIONS)
    return f"coco:{file},{pictures}"


def write_labels(root: Path) -> Path:
    """A package eccv_caption with labels of these captions, and instances.json; the folder that holds both."""
    rng = np.random.default_rng(0)
    (root / "eccv_caption" / "data").mkdir(parents=True)
    (root / "eccv_caption" / "__init__.py").write_text("")
    rows = [row for row in range(COCO_IMAGES + 1) if row != 2]  # one is of the training split
    own = {400 - row: list(range(row * COCO_CAPTIONS, (row + 1) * COCO_CAPTIONS)) for row in rows}
    write_label_files(root / "eccv_caption" / "data", own, rng)
    shown = [{"image_id": image, "category_id": int(kind)} for image in own for kind in rng.choice(6, 2, replace=False)]
    kinds = [{"id": kind, "name": f"kind {kind}"} for kind in range(80)]
    instances = {"images": [{"id": image} for image in own], "annotations": shown, "categories": kinds}
    (root / "instances.json").write_text(json.dumps(instances))
    return root


def write_label_files(folder: Path, own: dict[int, list[int]], rng: np.random.Generator, *beyond: int) -> list[int]:
    """The package's files by the captions of each image: CxC beyond COCO, ECCV for some queries, one-sided.

    beyond: matches that are in no split. The captions, in the order of the split.
    """
    captions = [caption for some in own.values() for caption in some]
    cxc = {image: sorted({*some, *rng.choice(captions, 3).tolist()}) for image, some in own.items()}
    eccv = {image: sorted({*own[image], *rng.choice(captions, 12).tolist()}) for image in list(own)[::3]}
    eccv[next(iter(own))].extend(beyond)
    back = {caption: sorted(set(rng.choice(list(own), 4).tolist())) for caption in captions[::7]}
    tables = {"original": (own, inverted(own)), "cxc": (cxc, inverted(cxc)), "eccv": (eccv, back)}
    for name, (i2t, t2i) in tables.items():
        (folder / f"{name}_image_to_caption.json").write_text(json.dumps(i2t))
        (folder / f"{name}_caption_to_image.json").write_text(json.dumps(t2i))
    np.save(folder / "coco_test_ids.npy", np.array(captions))
    return captions


def inverted(table: dict[int, list[int]]) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    for key, values in table.items():
        for value in values:
            out.setdefault(value, []).append(key)
    return out


# --- suites ----------------------------------------------------------------------------------------------------------
def write_datacomp(root: Path) -> Path:
    """All of DataComp's tasks, with its two sets of faces."""
    folders: dict[str, tuple[int, ...]] = {f"wds_{key.replace('/', '-')}_test": () for key in PLAIN.split()}
    for number, (folder, columns) in enumerate((folders | COLUMNS).items()):
        classes = mini.CLASSES[: 2 if "pcam" in folder or "sst2" in folder or "camelyon" in folder else 7]
        mini.wds_classification(root / folder, classes, images=16, columns=columns, seed=100 + number)
    for number, name in enumerate(("fairface", "utkface")):
        mini.wds_faces(root / f"wds_{name}_test", FACES, (3, 2, 4, 2), images=14, seed=50 + number)
    mini.caption_table(root / "flickr_1k_test_image_text_retrieval", images=8)
    mini.wds_retrieval(root / "wds_mscoco_captions", images=8, seed=9)
    mini.winogavil(root / "winogavil")
    return root


def write_hierarcaps(root: Path) -> tuple[Path, Path]:
    """(captions, images) in HierarCaps' format."""
    root.mkdir(parents=True)
    chains = {
        "a": [("thing", "bird", "blue bird", "blue bird on a house"), ("thing", "sky", "blue sky", "night sky")],
        "b": [("person", "man", "man sits", "man sits on the bench")],
        "c": [("thing", "dog", "small dog", "small dog runs on the grass")],
    }
    with open(root / "captions.csv", "w", newline="", encoding="utf-8") as table:
        rows = csv.writer(table)
        rows.writerow(["id", "captions", "image_url"])
        for number, (image, chain) in enumerate((image, chain) for image, some in chains.items() for chain in some):
            rows.writerow([number, " => ".join(chain), f"http://images.cocodataset.org/val2014/{image}.png"])
    for number, image in enumerate(chains):
        (root / f"{image}.png").write_bytes(mini.picture(700 + number))
    return root / "captions.csv", root
