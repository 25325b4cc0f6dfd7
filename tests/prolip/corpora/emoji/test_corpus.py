"""The corpus reader: what is read, what a caption is true of, what is refused."""

import tarfile
from pathlib import Path

import numpy as np
import pytest
from drawn_shards import write_shard

from prolip.corpora.emoji import corpus as emoji

BUNDLED = Path(__file__).parents[4] / "data" / "emoji"
CAT = {"hexcode": "1", "name": "cat", "keywords": ["animal", "pet"], "subgroup": "mammal", "group": "nature"}
FACE = {"hexcode": "2", "name": "cat face", "keywords": ["cat", "pet"], "subgroup": "mammal", "group": "nature"}
HOTEL = {"hexcode": "3", "name": "hotel", "keywords": [], "subgroup": "hotel", "group": "places"}
LOVE = {"hexcode": "4", "name": "love hotel", "keywords": ["pet", "pet"], "subgroup": "hotel", "group": "places"}


@pytest.fixture
def corpus(tmp_path):
    a = write_shard(tmp_path / "a.tar", "a", [CAT, FACE, HOTEL, LOVE])
    b = write_shard(tmp_path / "b.tar", "b", [FACE, LOVE], colour=(0, 0, 255))
    return emoji.read([a, b])


def test_drawings_of_several_shards_share_their_concepts_also_when_selected(corpus):
    assert [c.hexcode for c in corpus.concepts] == ["1", "2", "3", "4"]
    assert corpus.drawing_concepts.tolist() == [0, 1, 2, 3, 1, 3]
    assert [d.key for d in corpus.drawings][-1] == "b-4"
    assert np.asarray(corpus.drawings[4].image())[0, 0].tolist() == [0, 0, 255]
    part = corpus.select("group=places; style=b")
    assert [c.name for c in part.concepts] == ["hotel", "love hotel"]
    assert [(d.key, d.concept) for d in part.drawings] == [("b-4", 1)]
    assert {c.name for c in corpus.select("keyword=cat|animal").concepts} == {"cat", "cat face"}


def test_a_caption_is_true_of_every_concept_that_carries_it(corpus):
    table = corpus.caption_table()
    rows = zip(table.level, table.text, table.relation)
    assert {(emoji.LEVELS[level], table.texts[text]): row.astype(int).tolist() for level, text, row in rows} == {
        ("group", "nature"): [1, 1, 0, 0],
        ("group", "places"): [0, 0, 1, 1],
        ("subgroup", "mammal"): [1, 1, 0, 0],
        ("subgroup", "hotel"): [0, 0, 1, 1],
        ("keyword", "animal"): [1, 0, 0, 0],
        ("keyword", "pet"): [1, 1, 0, 1],
        ("keyword", "cat"): [0, 1, 0, 0],
        ("name", "cat"): [1, 0, 0, 0],
        ("name", "cat face"): [0, 1, 0, 0],
        ("name", "hotel"): [0, 0, 1, 0],
        ("name", "love hotel"): [0, 0, 0, 1],
    }


def test_added_concepts_widen_the_gallery_without_moving_drawings(corpus):
    part = corpus.select("name=love hotel").with_concepts(corpus.concepts)
    assert len(part.concepts) == 4 and part.concepts[0].name == "love hotel"
    assert part.concepts[part.drawings[0].concept].hexcode == "4"
    assert part.caption_table().rows("name").size == 4


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("colour=red", "use one of group"),
        ("group", "field=value"),
        ("group=natur", "use one of nature"),
        ("group=nature; group=places", "exclude each other"),
        ("group=nature; name=hotel", "exclude each other"),
    ],
)
def test_a_rule_that_cannot_be_met_says_what_to_write(corpus, rule, message):
    with pytest.raises(ValueError, match=message):
        corpus.select(rule)


def test_bad_shards_are_refused_with_a_remedy(tmp_path):
    with pytest.raises(FileNotFoundError, match="no shard at"):
        emoji.read(tmp_path / "none.tar")
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    with pytest.raises(ValueError, match="no sample in"):
        emoji.read(tmp_path / "empty.tar")
    with pytest.raises(ValueError, match="lacks name"):
        emoji.read(write_shard(tmp_path / "c.tar", "c", [{**CAT, "name": ""}]))
    one, two = (write_shard(tmp_path / f"{s}.tar", s, [{**CAT, "name": s}]) for s in "xy")
    with pytest.raises(ValueError, match="rebuild all shards"):
        emoji.read([one, two])


def test_the_bundled_unseen_designer_has_its_known_counts():
    corpus = emoji.read(f"emoji:{BUNDLED}/emojione.tar")
    assert len(corpus.drawings) == len(corpus.concepts) == 1076
    wide = corpus.with_concepts(emoji.read(BUNDLED / "noto.tar").concepts)
    table = wide.caption_table()
    assert [table.rows(level).size for level in emoji.LEVELS] == [8, 95, 3352, 1644]
    group = table.relation[table.rows("group")]
    assert group.sum() == 1644 and (group.sum(0) == 1).all()
    assert corpus.drawings[0].image().size == (64, 64)
    part = corpus.select("group=animals nature|food drink|travel places")
    assert len(part.drawings) == 396
