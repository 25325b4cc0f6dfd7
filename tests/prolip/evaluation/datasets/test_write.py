"""Shards of `prolip data shards`: training reads them, and their metrics equal those of the source."""

import json
import tarfile

import pytest
import torch
from commands import refusal, run

import own_data
from prolip.data.config import DataConfig
from prolip.data.sources import captioned_samples
from prolip.evaluation.datasets.registry import open_dataset
from prolip.evaluation.evaluate import evaluate_dataset


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return own_data.write(tmp_path_factory.mktemp("own"))


def members(path):
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def drawn(address):
    """The captions that training draws of each image."""
    rows = captioned_samples(DataConfig(train_data=address), lambda image: torch.tensor(image.getpixel((0, 0))), 100)
    return sorted((tuple(row.pixels.tolist()), tuple(row.chances.items())) for row in rows)


@pytest.mark.parametrize("kind", ["csv", "shards"])
def test_training_draws_from_written_shards_as_from_the_source(made, kind, tmp_path, ours):
    run("data", "shards", made[kind], "--output", tmp_path / "s", "--shard-size", 5)
    shards = {f"00000{number}.tar": count for number, count in enumerate((5, 5, 2))}
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [*shards, "index.json"]
    assert drawn(f"{tmp_path}/s") == drawn(made[kind]) and len(drawn(made[kind])) == 12
    index = json.loads((tmp_path / "s/index.json").read_text())
    assert {name: entry["samples"] for name, entry in index["shards"].items()} == shards
    for task in ("retrieval", "classification"):
        found, source = (open_dataset(x, task=task) for x in (f"shards:{tmp_path}/s", made[kind]))
        assert evaluate_dataset(found, ours).metrics == evaluate_dataset(source, ours).metrics


def test_images_are_written_byte_for_byte_and_a_single_caption_as_text(made, tmp_path):
    rows = [{name: row[name] for name in ("image", "caption", "label")} for row in own_data.records()[:12]]
    table = own_data.write_csv(tmp_path / "one.csv", rows)
    (tmp_path / "photos").symlink_to(made["csv"].removeprefix("csv:").removesuffix("own.csv") + "photos")
    run("data", "shards", table, "--output", tmp_path / "s")
    found = members(tmp_path / "s/000000.tar")
    assert found["photos/03.png"] == own_data.image(3) and found["photos/03.txt"] == own_data.captions(3)[0].encode()
    assert json.loads(found["photos/03.json"]) == {"label": own_data.label(3)}


@pytest.mark.parametrize("kind, task", [("csv", "retrieval"), *((x, "classification") for x in ("shards", "classes"))])
def test_a_written_test_set_gives_the_metrics_of_its_source(made, kind, task, tmp_path, ours):
    run("data", "shards", made[kind], "--layout", "wds", "--task", task, "--output", tmp_path / "w", "--shard-size", 5)
    found, source = open_dataset(f"wds:{tmp_path}/w"), open_dataset(made[kind], task=task)
    assert found.kind == source.kind and found.classnames == source.classnames and found.info["shards"] == 3
    assert evaluate_dataset(found, ours).metrics == evaluate_dataset(source, ours).metrics


def test_matches_beyond_own_captions_are_written(tmp_path, ours):
    from prolip.corpora.emoji import corpus as emoji
    from prolip.corpora.emoji.export import write_emoji

    corpus = emoji.read("data/emoji/emojione.tar").select("subgroup=animal bug|animal bird")
    source = open_dataset(f"wds:{write_emoji(corpus, tmp_path / 'e')}")
    run("data", "shards", f"wds:{tmp_path}/e", "--layout", "wds", "--output", tmp_path / "w")
    found = open_dataset(f"wds:{tmp_path}/w")
    assert found.relevance and len(found.relevance) == len(source.relevance)
    assert evaluate_dataset(found, ours).metrics == evaluate_dataset(source, ours).metrics


def test_a_held_out_share_is_written_and_mistakes_write_nothing(made, tmp_path, capsys):
    run("data", "shards", made["csv"], "--split", "0.5", "--output", tmp_path / "s")
    part = {sample.content for sample in open_dataset(made["csv"], "0.5").samples()}
    assert {sample.content for sample in open_dataset(f"shards:{tmp_path}/s").samples()} == part
    words = ("data", "shards", made["csv"], "--output", tmp_path / "s")
    assert "has files already" in refusal(capsys, lambda given: run(*given), *words)


def test_an_image_that_cannot_be_read_ends_the_writing_or_is_left_out(tmp_path, capsys):
    made = own_data.write(tmp_path / "d")
    words = ("data", "shards", made["shards"], "--output", tmp_path / "s")
    path = tmp_path / "d/tars/1.tar"
    path.write_bytes(path.read_bytes()[:9000])
    assert "1.tar" in refusal(capsys, lambda given: run(*given), *words) and not (tmp_path / "s").exists()
    run(*words, "--skip-damaged")
    assert "skipped: " in capsys.readouterr().err and (tmp_path / "s/index.json").exists()


def test_a_table_that_names_a_deleted_image_is_refused_or_written_without_it(tmp_path, capsys):
    made = own_data.write(tmp_path / "d")
    (tmp_path / "d/photos/03.png").unlink()
    words = ("data", "shards", made["csv"], "--output", tmp_path / "s")
    assert "delete these rows, or add --skip-damaged" in refusal(capsys, lambda given: run(*given), *words)
    run(*words, "--skip-damaged")
    assert "skipped: 1 missing image" in capsys.readouterr().err
    assert len(drawn(f"{tmp_path}/s")) == 11
