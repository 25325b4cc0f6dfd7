"""The data module on the bundled corpus."""

from pathlib import Path

import pytest
from tiny_loaders import build

from drawings import SHARDS
from prolip.data.captions import Selector
from prolip.data.images import decode_image
from prolip.data.reading.shards import count_samples, expand_shards
from prolip.data.reading.tar import read_shard
from prolip.data.samples import image_bytes, is_selected, json_record, plain_text

CORPUS = Path(__file__).parents[4] / "data" / "emoji"
SIZES = {"noto": 1644, "noto-v1": 1212, "twemoji": 1644, "fluent-emoji-flat": 1587, "fluent-emoji": 1555}
SIZES |= {"emojione": 1076, "fluent-emoji-high-contrast": 1587}


def test_the_shards_hold_what_their_readme_says():
    assert {Path(s.url).stem: count_samples([s.url]) for s in expand_shards(str(CORPUS))} == SIZES
    with pytest.raises(FileNotFoundError, match=r"Did you mean .*fluent-emoji-flat.tar"):
        expand_shards(f"{CORPUS}/fluent-emoji-flta.tar")
    food = Selector.parse("group=food drink")
    samples = [raw for raw in read_shard(f"{CORPUS}/emojione.tar") if is_selected(raw, food)]
    assert len(samples) == count_samples([f"{CORPUS}/emojione.tar"], "group=food drink") > 50
    for sample in samples[::5]:
        image, record = decode_image(image_bytes(sample)), json_record(sample)
        assert image.size == (64, 64) and image.mode == "RGB"
        assert plain_text(sample).strip() == record["name"] and record["group"] == "food drink"


def test_more_streams_than_shards_still_read_every_sample_once():
    settings = {"batch_size": 16, "caption_sampling": "name,keywords,subgroup,group", "known_matches": True}
    keys = [key for rank in range(3) for x in build(SHARDS, rank=rank, world_size=3, **settings) for key in x["key"]]
    assert len(set(keys)) == 170 and len(keys) == 192  # rounded up to global batches of 48
