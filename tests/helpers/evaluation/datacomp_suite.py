"""All 40 datasets of DataComp in miniature, each in its true format, and what a model must get on them.

`Oracle` reads the files with tarfile and csv alone and scores with NumPy: nothing of `prolip.evaluation` is in it.
"""

from __future__ import annotations

import csv
import io
import json
import zipfile
from pathlib import Path

import miniatures as mini
import numpy as np
import torch
from frozen_sets import COLUMNS, FACES
from miniatures import picture_of
from PIL import Image

import prolip

IMAGES = 12
SIMILARITIES = ("csd", "mean")


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def lines_of(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1]


class Oracle:
    """A model's answers by the paper's formulas. similarity: csd or mean."""

    def __init__(self, model: str):
        self.model, _, self.preprocess = prolip.create_model_and_transforms(model)
        self.model.eval()
        self.tokenizer, self.kept = prolip.get_tokenizer(model), {}

    def images(self, pictures: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Means and variances (N, D)."""
        return self.embedded(self.model.encode_image, pictures, lambda: torch.stack(list(map(self.pixels, pictures))))

    def texts(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        return self.embedded(self.model.encode_text, texts, lambda: self.tokenizer(texts))

    def embedded(self, encode, given, batch) -> tuple[np.ndarray, np.ndarray]:
        if (key := tuple(given)) not in self.kept:
            with torch.no_grad():
                z = encode(batch())
            self.kept[key] = z.mean.double().numpy(), z.log_var.double().exp().numpy()
        return self.kept[key]

    def pixels(self, picture: bytes) -> torch.Tensor:
        return self.preprocess(Image.open(io.BytesIO(picture)).convert("RGB"))

    def classes(self, names, templates) -> tuple[np.ndarray, np.ndarray]:
        """N(avg mean, avg variance) of the prompts of each class, the mean brought to unit length."""
        rows = []
        for name in names:
            m, v = self.texts([template.replace("{c}", name) for template in templates])
            rows.append((m.mean(0) / np.linalg.norm(m.mean(0)), v.mean(0)))
        return np.stack([m for m, _ in rows]), np.stack([v for _, v in rows])

    def scores(self, images, texts, similarity: str) -> np.ndarray:
        (m, v), (n, w) = images, texts
        if similarity == "mean":
            return m @ n.T
        return m @ n.T - 0.5 * (v.sum(1)[:, None] + w.sum(1)[None])

    # what is expected ------------------------------------------------------------------------------------------------
    def expect(self, task, folder: Path, similarity: str) -> dict[str, float]:
        """The main metric of a task, and some others."""
        if task.kind == "retrieval":
            return self.retrieval(folder, similarity)
        if task.kind == "association":
            return self.associations(folder, similarity)
        samples = mini.read_split(folder / "test")
        images = self.images([picture_of(sample) for sample in samples])
        names = lines_of(folder / "classnames.txt")
        templates = lines_of(folder / "zeroshot_classification_templates.txt")
        groups = [np.load(io.BytesIO(sample["npy"])).tolist() for sample in samples if "npy" in sample]
        if task.kind == "faces":
            return self.faces(images, names, templates, groups, similarity)
        scores = self.scores(images, self.classes(names, templates), similarity)
        return single_label(task.key, scores, [int(sample["cls"]) for sample in samples], groups)

    def faces(self, images, names, templates, groups, similarity) -> dict[str, float]:
        predicted = {}
        for what in FACES:
            own = ([line.split(":", 1)[1] for line in x if line.startswith(f"{what}:")] for x in (names, templates))
            predicted[what] = self.scores(images, self.classes(*own), similarity).argmax(1)
        age, gender, race, binary = np.array(groups).T
        right, crime = predicted["gender"] == gender, predicted["toxic"] >= 18
        white = (predicted["race"] == 1) == (binary == 0)
        return {
            "acc_gender_avg": mean(right),
            "acc_age_avg": mean(predicted["age"] == age),
            "acc_race_avg": mean(white),
            "acc_race_wg": worst(white, binary),
            "acc_gender_x_wg": worst(right, list(zip(race, gender))),
            "toxicity_crime_avg": mean(crime),
            "toxicity_crime_max": max(by_group(crime, race).values()),
            "toxicity_nonhuman_avg": mean((predicted["toxic"] >= 14) & ~crime),
        }

    def retrieval(self, folder: Path, similarity: str) -> dict[str, float]:
        if (folder / "test").is_dir():
            samples = [(picture_of(s), s["txt"].decode().split("\n")) for s in mini.read_split(folder / "test")]
        else:
            (archive,) = folder.glob("*.zip")
            with zipfile.ZipFile(archive) as packed, open(next(folder.glob("*.csv")), newline="") as table:
                samples = [
                    (packed.read(f"{archive.stem}/{row['filename']}"), json.loads(row["raw"]))
                    for row in csv.DictReader(table)
                ]
        captions = [(i, text) for i, (_, texts) in enumerate(samples) for text in texts]
        scores = self.scores(self.images([p for p, _ in samples]), self.texts([t for _, t in captions]), similarity)
        owner = [i for i, _ in captions]
        texts_found = mean(owner[int(row.argmax())] == i for i, row in enumerate(scores))
        images_found = mean(int(column.argmax()) == i for i, column in zip(owner, scores.T))
        return {
            "text_retrieval_recall@1": texts_found,
            "image_retrieval_recall@1": images_found,
            "mean_recall@1": (texts_found + images_found) / 2,
        }

    def associations(self, folder: Path, similarity: str) -> dict[str, float]:
        rows = list(csv.DictReader((folder / "winogavil_dataset.csv").read_text().splitlines()))
        values = []
        with zipfile.ZipFile(folder / "winogavil_images.zip") as packed:
            for row in rows:
                candidates, true = json.loads(row["candidates"]), set(json.loads(row["associations"]))
                images = self.images([packed.read(f"winogavil_images/{name}.jpg") for name in candidates])
                cue = row["cue"].lower()
                text = self.texts([("An " if cue[0] in "aeiou" else "A ") + cue])
                order = np.argsort(-self.scores(images, text, similarity)[:, 0])[: len(true)]
                chosen = {candidates[i] for i in order}
                values.append((len(candidates), len(chosen & true) / len(chosen | true)))
        return {
            "avg_jaccard_score": mean(v for _, v in values),
            "jaccard_score_10-12": mean(v for n, v in values if n >= 10),
            "jaccard_score_5-6": mean(v for n, v in values if n < 10),
        }


def by_group(hits, groups) -> dict:
    return {g: mean(h for h, own in zip(hits, groups) if own == g) for g in set(groups)}


def worst(hits, groups) -> float:
    return min(by_group(hits, groups).values())


def single_label(key: str, scores: np.ndarray, labels: list[int], groups: list[list[int]]) -> dict[str, float]:
    """Compute the metrics of a task with classes."""
    predicted = scores.argmax(1).tolist()
    hits = [p == y for p, y in zip(predicted, labels)]
    five = [y in row[:5] for y, row in zip(labels, np.argsort(-scores, axis=1, kind="stable").tolist())]
    out = {"acc1": mean(hits), "mean_per_class_recall": mean(by_group(hits, labels).values())}
    columns = [list(column) for column in zip(*groups)]
    if key == "wilds/iwildcam":
        both = {c: sum(p == y == c for p, y in zip(predicted, labels)) for c in set(labels)}
        out["F1-macro_all"] = mean(2 * n / (predicted.count(c) + labels.count(c)) for c, n in both.items())
    if key == "wilds/camelyon17":
        out["acc_wg"] = worst(hits, columns[1])
    if key == "wilds/fmow":
        regions = by_group(hits, columns[0])
        out["acc_worst_region"], out["acc_worst_year"] = min(regions.values()), worst(hits, columns[1])
        out["acc_worst_region_without_other"] = min(value for region, value in regions.items() if region != 5)
    if key == "fairness/dollar_street":
        out["acc_top5_wg"] = worst(five, columns[0])
    if key == "fairness/geode":
        out["acc_wg"] = worst(hits, columns[0])
    return out


# --- the files -------------------------------------------------------------------------------------------------------
def write_suite(root: Path, tasks, oracle: Oracle) -> dict[str, Path]:
    """The folders of all tasks below `root`, by key."""
    return {task.key: write_task(root, task, number, oracle) for number, task in enumerate(tasks)}


def write_task(root: Path, task, number: int, oracle: Oracle) -> Path:
    """Write one dataset, whose images differ from those of the others."""
    folder = root / task.folders[0]
    if task.kind == "retrieval":
        if "mscoco" in task.key:  # one as DataComp has it, one in shards
            return mini.wds_retrieval(root / task.folders[1], images=8, captions=3, seed=number)
        return mini.caption_table(folder, "flickr", images=8)
    if task.kind == "association":
        return mini.winogavil(folder)
    if task.kind == "faces":
        return mini.wds_faces(folder, FACES, (3, 2, 4, 2), images=IMAGES, seed=number)
    classes = [f"{word} {number}" for word in mini.CLASSES[: min(task.classes, len(mini.CLASSES))]]
    mini.write_classes(folder, classes)
    rng = np.random.default_rng(number)
    suffix, kind = (("png", "PNG"), ("jpg", "JPEG"), ("webp", "WEBP"))[number % 3]
    pictures = [mini.picture(100 * number + i, kind, 32) for i in range(IMAGES)]
    # A model without training is right by chance alone: label most images as it sees them, so that figures differ.
    seen = oracle.scores(oracle.images(pictures), oracle.classes(classes, mini.TEMPLATES), "csd").argmax(1)
    labels = np.where(rng.random(IMAGES) < 0.6, seen, rng.integers(0, len(classes), IMAGES))
    samples = []
    for i, picture in enumerate(pictures):
        members = {suffix: picture, "cls": str(labels[i]).encode()}
        if columns := COLUMNS.get(task.folders[0]):
            members["npy"] = mini.array([rng.integers(count) for count in columns])
        samples.append((f"s{i:07d}", members))
    mini.write_shards(folder / "test", samples, shards=1 + number % 2)
    return folder
