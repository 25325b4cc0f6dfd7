"""Few-shot tasks: which classes are base, how many images of each, none on both sides; a model is trained on them."""

from __future__ import annotations

import json
import statistics
import tarfile
from collections import Counter
from dataclasses import replace

import miniatures as mini
import pytest
from commands import evaluate

from prolip.cli.main import main
from prolip.evaluation.datasets.few_shot import draw, parts_of
from prolip.evaluation.datasets.registry import open_dataset
from prolip.evaluation.datasets.webdataset import open_wds

#: Images of each class, in no order; one more class than half of them is base.
SIZES = {"red car": 9, "green tree": 4, "blue sea": 2, "small dog": 5, "old house": 3}


def write_set(root, sizes=SIZES, first=0, split="test", copies=()):
    """Write images numbered from `first`; copies: pairs of rows, of which the second has the image of the first."""
    mini.write_classes(root, list(sizes))
    labels = [label for label, count in enumerate(sizes.values()) for _ in range(count)]
    order = sorted(range(len(labels)), key=lambda i: (7 * i) % 11)
    same = {second: one for one, second in copies}
    members = [{"png": mini.picture(first + same.get(i, i)), "cls": str(labels[i]).encode()} for i in order]
    mini.write_shards(root / split, [(f"p{first}_{i}", parts) for i, parts in zip(order, members)], 2)
    return root


def read(tar):
    """Key -> suffix -> bytes."""
    found: dict[str, dict[str, bytes]] = {}
    with tarfile.open(tar) as file:
        for member in file:
            key, suffix = member.name.split(".")
            found.setdefault(key, {})[suffix] = file.extractfile(member).read()
    return found


def run(root, out, *more):
    return main(["data", "few-shot", "--data", f"wds:{root}", "--output", str(out), *more])


def test_the_first_half_of_the_classes_is_base_and_has_the_odd_one():
    for number, base, novel in ((4, 2, 2), (5, 3, 2), (102, 51, 51)):
        assert parts_of(number) == {"base": range(base), "novel": range(base, base + novel)}
        assert parts_of(number, together=True) == {"all": range(number)}


def test_what_is_written_is_the_draw_and_no_picture_is_on_both_sides(tmp_path, capsys):
    root, names = write_set(tmp_path / "wds_things"), list(SIZES)
    assert run(root, tmp_path / "few", "--shots", "3", "--template", "a {c} here") == 0
    printed = capsys.readouterr().out
    assert "6 images of 3 classes" in printed and "green tree 2, blue sea 1" in printed and "red car" not in printed
    trained = read(tmp_path / "few/train.tar")
    records = [json.loads(members["json"]) for members in trained.values()]
    # at most half of a class's images: the rest is for the test
    assert Counter(record["class"] for record in records) == {"red car": 3, "green tree": 2, "blue sea": 1}
    assert [members["txt"].decode() for members in trained.values()] == [f"a {x['class']} here" for x in records]
    whole = {sample.key: sample for sample in open_wds(root).samples()}
    seen = [mini.picture_of(members) for members in trained.values()]
    assert [whole[record["key"]].image for record in records] == seen
    label_of = {sample.image: names[sample.label] for sample in whole.values()}
    assert [label_of[image] for image in seen] == [record["class"] for record in records]
    for name, classes in (("base", names[:3]), ("novel", names[3:])):
        test = open_wds(tmp_path / "few" / name)
        assert test.classnames == tuple(classes) and test.templates == ("a {c} here",)
        found = list(test.samples())
        assert [classes[sample.label] for sample in found] == [label_of[sample.image] for sample in found]
        seen += [sample.image for sample in found]
    assert Counter(seen) == Counter(sample.image for sample in whole.values())  # every image once


def test_a_seed_is_a_draw_whatever_the_order_of_the_files(tmp_path):
    root = write_set(tmp_path / "one")
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert run(root, tmp_path / name, "--shots", "3", "--seed", seed) == 0
    assert (tmp_path / "a/train.tar").read_bytes() != (tmp_path / "c/train.tar").read_bytes()
    for file in ("train.tar", "base/test/0.tar", "novel/test/0.tar"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    whole = open_wds(root)
    turned = replace(whole, samples=lambda: reversed(list(whole.samples())))
    assert draw(turned, shots=3, seed=1).train == draw(whole, shots=3, seed=1).train


def test_a_split_of_its_own_is_tested_whole_and_training_takes_all_it_may(tmp_path):
    root = write_set(tmp_path / "things", split="train")
    write_set(root, dict.fromkeys(SIZES, 2), first=100)
    words = ["--split", "train", "--test-split", "test", "--shots", "4"]
    assert run(root, tmp_path / "few", *words) == run(root, tmp_path / "whole", *words, "--train-on", "all") == 0
    found = draw(open_dataset(f"wds:{root}", "train"), open_dataset(f"wds:{root}", "test"), 4)
    assert Counter(found.train.values()) == {0: 4, 1: 4, 2: 2}
    assert {name: len(rows) for name, rows in found.test.items()} == {"base": 6, "novel": 4}
    pictures = sorted(sample.image for sample in open_wds(root).samples())
    for folder, names in (("few", ("base", "novel")), ("whole", ("all",))):
        assert sorted(s.image for name in names for s in open_wds(tmp_path / folder / name).samples()) == pictures
    texts = Counter(members["txt"].decode() for members in read(tmp_path / "whole/train.tar").values())
    assert texts == {f"a photo of a {name}": min(4, count) for name, count in SIZES.items()}


def test_all_classes_of_a_domain_and_copies_of_what_is_drawn(tmp_path):
    root = write_set(tmp_path / "things", copies=[(0, i) for i in range(1, 9)])  # one image of a car, nine times
    with pytest.raises(ValueError, match="1 of 5 classes .* no test image .'red car'."):
        draw(open_wds(root), together=True)
    root = write_set(tmp_path / "more", copies=[(0, 1)])
    for seed in range(4):
        found = draw(open_wds(root), shots=2, seed=seed, together=True)
        assert Counter(found.train.values()) == {0: 2, 1: 2, 2: 1, 3: 2, 4: 1}
        drawn = {sample.image for sample in open_wds(root).samples() if sample.key in found.train}
        rest = {row.key for row in found.test["all"]}
        assert not drawn & {sample.image for sample in open_wds(root).samples() if sample.key in rest}


def test_what_cannot_be_a_few_shot_task_is_refused(tmp_path, capsys):
    root = write_set(tmp_path / "things")

    def refused(*words, address=root):
        assert run(address, tmp_path / "out", *words) == 2 and not (tmp_path / "out/train.tar").exists()
        return capsys.readouterr().err

    assert "among the training images (p0_" in refused("--test-data", f"wds:{root}")
    few = write_set(tmp_path / "few", {"red car": 3, "green tree": 1, "blue sea": 2, "snow": 1})
    assert "no second image, one to train on and one to test on ('green tree')" in refused(address=few)
    empty = write_set(tmp_path / "empty", {"red car": 3, "green tree": 2, "blue sea": 0, "snow": 1})
    assert "have no test image ('blue sea')" in refused(address=empty)
    three = write_set(tmp_path / "three", {"red car": 3, "green tree": 2, "snow": 2})
    assert "give 4 or more" in refused(address=three)
    assert "has other classes" in refused("--test-data", f"wds:{three}")
    assert "one class per image" in refused(address=mini.wds_retrieval(tmp_path / "wds_pairs"))
    assert "--shots 0" in refused("--shots", "0") and "no {c}" in refused("--template", "a photo")
    assert run(root, tmp_path / "out") == 0
    assert run(root, tmp_path / "out") == 2
    assert "train.tar exists already" in capsys.readouterr().err


def test_a_model_is_evaluated_on_both_parts_with_their_harmonic_mean(tmp_path, folder, capsys):
    run(write_set(tmp_path / "wds_things"), tmp_path / "few", "--shots", "4", "--template", "{c}")
    sets, out = f"wds:{tmp_path}/few/base wds:{tmp_path}/few/novel", tmp_path / "results.json"
    capsys.readouterr()
    words = f"--model {folder} --data {sets} --output {out} --similarity csd mean --intervals 50"
    base, _, novel, _ = evaluate(words.split())
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("base and novel classes, harmonic mean")
    want = statistics.harmonic_mean([base.value, novel.value])
    figures = f"  base {100 * base.value:5.2f}  novel {100 * novel.value:5.2f}  H {100 * want:5.2f} ["
    assert f"  {'acc1':<21}{figures}" in lines[start + 1]
    assert all("  csd  " in line for line in lines[start + 1 : start + 3])
    assert all("  mean  " in line for line in lines[start + 3 : start + 5]) and not lines[start + 5]
    first, _, second, _ = (x["info"]["harmonic_mean"] for x in json.loads(out.read_text()))
    value, low, high = first["acc1"]
    assert first == second and value == pytest.approx(want) and low <= value <= high and low < high
    by_class = [result.metrics["mean_per_class_recall"] for result in (base, novel)]
    assert first["mean_per_class_recall"][0] == pytest.approx(statistics.harmonic_mean(by_class))
