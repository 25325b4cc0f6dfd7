"""The corpus as a task: every text once, every true pair kept, and clip_benchmark can read it."""

from dataclasses import replace

import pytest
from clip_benchmark.datasets.builder import build_wds_dataset
from report_stand_in import picture

from prolip.corpora.emoji import export as emoji
from prolip.corpora.emoji.corpus import LEVELS, Concept, Corpus, Drawing
from prolip.evaluation.datasets.webdataset import open_wds


def concept(number, name, keywords, subgroup, group):
    return Concept(f"1f{number:03x}", name, tuple(keywords), subgroup, group)


CONCEPTS = (
    concept(0, "cat face", ["cat", "face", "pet"], "animal mammal", "animals nature"),
    concept(1, "cat", ["pet", "cat"], "animal mammal", "animals nature"),
    concept(2, "cheese", ["food"], "food prepared", "food drink"),
    concept(3, "never drawn", ["ghost"], "nothing", "nowhere"),
)


@pytest.fixture
def corpus():
    """Two drawings of the first concept, one of each of the next two."""
    drawn = [("a", 0), ("a", 1), ("b", 0), ("a", 2)]
    names = [f"{style}-{CONCEPTS[k].hexcode}" for style, k in drawn]
    return Corpus(CONCEPTS, tuple(Drawing(n, *row, picture(i)) for i, (n, row) in enumerate(zip(names, drawn))))


def test_every_text_stands_once_and_every_true_pair_is_kept(tmp_path, corpus):
    drawn = [(drawing.key, corpus.concepts[drawing.concept]) for drawing in corpus.drawings]
    true = {(key, text) for key, concept in drawn for level in LEVELS for text in concept.captions(level)}
    dataset = open_wds(emoji.write_emoji(corpus, tmp_path / "wds_emoji"))
    samples = list(dataset.samples())
    gallery = [text for sample in samples for text in sample.captions]
    assert dataset.kind == "retrieval"
    assert sorted(gallery) == sorted({text for _, text in true})  # each once, and none that is not shown
    own = {(sample.key, text) for sample in samples for text in sample.captions}
    further = {(key, gallery[index]) for key, index in dataset.relevance}
    assert own | further == true and not own & further
    # "cat" is a keyword of the first drawing, too, and stands with its own
    assert "cat" in samples[1].captions and "cat face" in samples[0].captions and samples[2].captions == ()
    assert [sample.image for sample in samples] == [drawing.data for drawing in corpus.drawings]


@pytest.mark.parametrize("level", ["subgroup", "group"])
def test_drawings_are_classified_by_their_subgroup_or_group(tmp_path, corpus, level):
    dataset = open_wds(emoji.write_emoji_classes(corpus, tmp_path / "wds_classes", level))
    assert dataset.kind == "classification"
    shown = [getattr(corpus.concepts[drawing.concept], level) for drawing in corpus.drawings]
    assert [dataset.classnames[sample.label] for sample in dataset.samples()] == shown
    assert set(dataset.classnames) == set(shown) and "a drawing of {c}" in dataset.templates
    theirs = build_wds_dataset("wds/classes", lambda image: image, split="test", data_dir=str(tmp_path / "wds_classes"))
    assert [theirs.classes[label] for _, label in theirs] == shown


def test_nothing_is_overwritten_or_empty_and_a_damaged_drawing_is_named_first(tmp_path, corpus):
    emoji.write_emoji(corpus, tmp_path / "one")
    with pytest.raises(FileExistsError, match="already exists"):
        emoji.write_emoji(corpus, tmp_path / "one")
    with pytest.raises(ValueError, match="no drawing"):
        emoji.write_emoji(replace(corpus, drawings=()), tmp_path / "empty")
    first, second, *others = corpus.drawings
    damaged = replace(corpus, drawings=(first, replace(second, data=second.data[:40]), *others))
    with pytest.raises(ValueError, match=f"drawing '{second.key}': bad image"):
        emoji.write_emoji(damaged, tmp_path / "task")
    assert not (tmp_path / "task").exists()
