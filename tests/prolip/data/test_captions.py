"""Captions of a sample in an epoch, their templates, and the selection of samples."""

import json
from collections import Counter
from pathlib import Path

import pytest

from prolip.data.captions import CaptionSampler, Selector, caption_id, drop_words, stable_hash
from prolip.data.faults import SampleFault
from prolip.utils.documents import read_yaml

GRAPES = 2968479360080881982
RECORD = {"name": "grapes", "keywords": ["fruit", "grape", "dionysus"], "group": "food drink", "empty": [" "]}


def frequencies(sampler, draws=6000, plain=None, record=RECORD):
    counts = Counter(sampler.draw(plain, record, stable_hash("draw", i)).caption for i in range(draws))
    return {caption: count / draws for caption, count in counts.items()}


def test_a_field_is_drawn_by_weight_then_a_caption_of_it_and_what_a_sample_lacks_is_left_out():
    found = frequencies(CaptionSampler.parse("name:2,keywords:1,group"))
    wanted = {"grapes": 0.5, "fruit": 1 / 12, "grape": 1 / 12, "dionysus": 1 / 12, "food drink": 0.25}
    assert found.keys() == wanted.keys()
    for caption, share in wanted.items():  # 6000 draws: five standard deviations
        assert abs(found[caption] - share) < 5 * (share * (1 - share) / 6000) ** 0.5
    assert frequencies(CaptionSampler.parse("absent:100,empty:100,name"), draws=50) == {"grapes": 1.0}
    drawn = CaptionSampler.parse("name,keywords,txt").draw("grape", RECORD, 3)
    assert drawn.all == ("grapes", "fruit", "grape", "dionysus") and drawn.caption in drawn.all
    with pytest.raises(SampleFault, match="no caption"):
        CaptionSampler.parse("empty,absent").draw(None, RECORD, 0)
    with pytest.raises(SampleFault, match="bad json: name"):
        CaptionSampler.parse("name").draw(None, {"name": {"en": "grapes"}}, 0)


def test_half_a_surrogate_pair_is_replaced_so_that_a_caption_can_be_encoded():
    record = json.loads(r'{"name": ["cat \ud83d", "\ud83d\ude00 grin", "caf\u00e9"], "bad": "\ude00"}')
    drawn = CaptionSampler.parse("name,bad").draw(None, record, 0)
    assert drawn.all == ("cat \ufffd", "\U0001f600 grin", "café", "\ufffd")
    assert all(caption_id(caption) for caption in drawn.all)
    assert Selector.parse("name=café")(record)


def test_unreadable_sampling_selection_templates_and_shares_are_refused_with_an_example():
    for text in ("", "name,,group", "name:x", "name:0", "name:-1", "name,name", "name:inf"):
        with pytest.raises(ValueError, match="name:2,keywords:1"):
            CaptionSampler.parse(text)
    for text in ("group", "group=", "=food", "group=a;style"):
        with pytest.raises(ValueError, match="field=value"):
            Selector.parse(text)
    for templates in (["a photo"], ["{}"], ["a {} {}"]):
        with pytest.raises(ValueError, match="one {}"):
            CaptionSampler.parse("name", templates, {"name": 0.5})
    wrong = [(["a {}"], shares) for shares in ({}, {"group": 0.5}, {"name": 1.0}, {"name": "half"})]
    for templates, shares in (*wrong, ([], {"name": 0.5})):
        with pytest.raises(ValueError, match="such as name=0.2"):
            CaptionSampler.parse("name", templates, shares)


def test_caption_ids_are_non_negative_int64_and_never_change():
    # written down, because ids of different processes, machines and years are compared
    assert caption_id("grapes") == GRAPES and 0 <= GRAPES < 2**63
    assert caption_id("grape") != GRAPES


def test_selection_wants_every_condition_and_any_of_its_values():
    select = Selector.parse("group=animals nature | food drink; keywords=fruit")
    assert select(RECORD)
    assert not select({**RECORD, "keywords": ["meat"]})
    assert not select({**RECORD, "group": "objects"})
    assert not select({"group": "food drink"})
    assert Selector.parse("year=2015")({"year": 2015})
    without = Selector.parse("group=food drink; keywords != meat|fish")
    assert without({"group": "food drink"}) and without({"group": "food drink", "keywords": ["fruit"]})
    assert not without({"group": "food drink", "keywords": ["fruit", "meat"]})
    assert Selector.parse(None) is None is Selector.parse("")


def test_the_demos_selection_has_a_name_that_joins_other_conditions():
    recipe = read_yaml(Path(__file__).parents[3] / "scripts/recipes/emoji-demo.yaml")
    assert Selector.parse("demo") == Selector.parse(recipe["data"]["select"])
    assert Selector.parse("demo; style=noto") == Selector.parse(recipe["data"]["select"] + ";style=noto")


def test_words_are_dropped_by_their_share_and_one_stays():
    words = [f"w{i}" for i in range(20)]
    kept = Counter(word for seed in range(2000) for word in drop_words("  ".join(words), 0.1, seed).split(" "))
    assert all(abs(kept[word] / 2000 - 0.9) < 0.03 for word in words)
    assert drop_words("a b c", 0.1, 5) == drop_words("a b c", 0.1, 5)
    alone = Counter(drop_words("a b c", 0.999, seed) for seed in range(300))
    assert alone.keys() == {"a", "b", "c"} and min(alone.values()) > 60
    assert drop_words("a  b", 0.0, 1) == "a  b" and drop_words("alone", 0.9, 1) == "alone"


def test_another_caption_is_drawn_where_there_is_one():
    sampler = CaptionSampler.parse("txt,name:3")
    plain, record = ["a", "b", "c"], {"name": "n"}
    for seed in range(50):
        assert sampler.draw(plain, record, seed, but=("a", "n")).caption in "bc"
        assert sampler.draw(plain, record, seed, but=("a", "b", "c")).caption == "n"
        assert sampler.draw(plain, record, seed, but=("a", "b", "c", "n")) == sampler.draw(plain, record, seed)


TEMPLATES = ("a photo of {}", "the {} icon")


def test_a_share_of_the_captions_of_named_fields_stands_in_templates():
    sampler = CaptionSampler.parse("name,group", TEMPLATES, {"name": 0.4})
    texts = Counter(sampler.draw(None, RECORD, stable_hash("draw", i)).text for i in range(6000))
    wanted = {"grapes": 0.3, "a photo of grapes": 0.1, "the grapes icon": 0.1, "food drink": 0.5}
    plain = CaptionSampler.parse("name,group")
    assert all(plain.draw(None, RECORD, seed)[:2] == sampler.draw(None, RECORD, seed)[:2] for seed in range(50))
    assert texts.keys() == wanted.keys()
    for text, share in wanted.items():
        assert abs(texts[text] / 6000 - share) < 5 * (share * (1 - share) / 6000) ** 0.5


def test_a_prompt_gets_no_template_and_one_template_stands_for_all_in_the_chances():
    sampler = CaptionSampler.parse("txt", TEMPLATES, {"txt": 0.99})
    for caption in ("A photo of a cat", "The cat icon"):
        assert {sampler.draw(caption, None, seed).text for seed in range(99)} == {caption}
        assert sampler.chances(caption, None) == {caption: 1.0}
    chances = CaptionSampler.parse("name,group", TEMPLATES, {"name": 0.4}).chances(None, RECORD)
    prompt = next(text for text in chances if "grapes" in text and text != "grapes")
    assert prompt in ("a photo of grapes", "the grapes icon")
    assert chances == pytest.approx({"grapes": 0.3, prompt: 0.2, "food drink": 0.5})
