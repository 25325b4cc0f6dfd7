"""The data module on the bundled corpus."""

from pathlib import Path

import pytest
from open_clip.transform import image_transform
from tiny_tars import letters

from drawings import SHARDS
from prolip.data.captions import Selector
from prolip.data.images import decode_image
from prolip.data.loader import DataConfig, build_loader
from prolip.data.reading.shards import count_samples, expand_shards
from prolip.data.reading.tar import read_shard
from prolip.data.samples import image_bytes, is_selected, json_record, plain_text

CORPUS = Path(__file__).parents[4] / "data" / "emoji"
TRAINING = f"{CORPUS}/{{noto,noto-v1,twemoji,fluent-emoji-flat,fluent-emoji}}.tar"
FIELDS = "name,keywords,subgroup,group"


def build(workers=0, batch_size=32, rank=0, world_size=1, train_data=TRAINING, **settings):
    config = DataConfig(
        train_data=train_data,
        batch_size=batch_size,
        workers=workers,
        caption_sampling=FIELDS,
        known_matches=True,
        **settings,
    )
    transform = image_transform(32, is_train=True)
    return build_loader(config, transform, letters, rank=rank, world_size=world_size)


def food_of(style):
    selector = Selector.parse("group=food drink")
    return [raw for raw in read_shard(f"{CORPUS}/{style}.tar") if is_selected(raw, selector)]


def test_the_shards_hold_what_their_readme_says():
    sizes = {
        "noto": 1644,
        "noto-v1": 1212,
        "twemoji": 1644,
        "fluent-emoji-flat": 1587,
        "fluent-emoji": 1555,
        "emojione": 1076,
        "fluent-emoji-high-contrast": 1587,
    }
    assert {Path(s.url).stem: count_samples([s.url]) for s in expand_shards(str(CORPUS))} == sizes
    assert count_samples([s.url for s in expand_shards(TRAINING)]) == 7642


def test_the_unseen_designer_is_read_with_image_name_and_record():
    samples = food_of("emojione")
    assert len(samples) == count_samples([f"{CORPUS}/emojione.tar"], "group=food drink") > 50
    for sample in samples:
        image, record = decode_image(image_bytes(sample)), json_record(sample)
        assert image.size == (64, 64) and image.mode == "RGB"
        assert plain_text(sample).strip() == record["name"] and record["group"] == "food drink"


def test_more_streams_than_shards_still_read_every_sample_once():
    settings = {"world_size": 3, "batch_size": 16, "train_data": SHARDS}
    keys = [key for rank in range(3) for batch in build(rank=rank, **settings) for key in batch["key"]]
    assert len(set(keys)) == 170 and len(keys) == 192  # rounded up to global batches of 48


def test_a_misspelt_shard_of_the_corpus_is_answered_with_the_right_one():
    with pytest.raises(FileNotFoundError, match=r"Did you mean .*fluent-emoji-flat.tar"):
        expand_shards(f"{CORPUS}/fluent-emoji-flta.tar")
