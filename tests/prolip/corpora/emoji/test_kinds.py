"""What is a kind of what, and what only looks like it, against sets."""

import pytest
from kinds_corpus import corpus_of, truth

from prolip.corpora.emoji.corpus import Concept, Corpus
from prolip.corpora.emoji.kinds import image_pairs, text_pairs

corpus = corpus_of()
table = corpus.caption_table()
sets, level = truth(corpus)


def test_true_pairs_are_proper_subsets_negatives_no_kinds_and_siblings_share_the_parent():
    wanted = {(a, b) for a in sets for b in sets if sets[a] < sets[b] and level[a] > level[b]}
    pairs = text_pairs(table, most=10**6)
    both = [(table.texts[a], table.texts[b]) for a, b in zip(pairs.inner, pairs.outer)]
    assert set(both) == wanted and len(pairs) == pairs.found == len(wanted)
    assert [tuple(row) for row in pairs.levels] == [(level[a], level[b]) for a, b in both]
    outers = {table.texts[b] for b in pairs.outer}
    assert (pairs.random >= 0).mean() > 0.9 and (pairs.sibling >= 0).mean() > 0.5
    for a, b, other, sibling in zip(pairs.inner, pairs.outer, pairs.random, pairs.sibling):
        a, b = table.texts[a], table.texts[b]
        if other >= 0:
            assert not sets[a] <= sets[table.texts[other]] and table.texts[other] in outers
        if sibling >= 0:
            c = table.texts[sibling]
            assert level[c] == level[a] and sets[c] < sets[b]
            assert not sets[a] <= sets[c] and not sets[c] <= sets[a]


def test_drawings_are_of_their_texts_and_of_no_sibling_s():
    pairs = image_pairs(corpus, table, most=10**6)
    of = corpus.drawing_concepts
    wanted = {(i, text) for i, k in enumerate(of) for text in sets if k in sets[text]}
    assert {(i, table.texts[b]) for i, b in zip(pairs.inner, pairs.outer)} == wanted
    assert pairs.negatives == ("random", "sibling") and (pairs.sibling >= 0).any()
    for i, b, other, sibling in zip(pairs.inner, pairs.outer, pairs.random, pairs.sibling):
        assert other < 0 or of[i] not in sets[table.texts[other]]
        if sibling >= 0:
            c = table.texts[sibling]
            assert of[i] not in sets[c] and level[c] == level[table.texts[b]]
            assert any(corpus.concepts[k].subgroup == corpus.concepts[of[i]].subgroup for k in sets[c])


def test_a_corpus_without_kinds_or_drawings_is_refused():
    one = Corpus((Concept("1", "a", (), "a", "a"),), ())
    with pytest.raises(ValueError, match="no text of this corpus is a kind of another"):
        text_pairs(one.caption_table())
    with pytest.raises(ValueError, match="no drawing"):
        image_pairs(one, one.caption_table())
    with pytest.raises(ValueError, match="0 pairs: give at least 1"):
        text_pairs(table, most=0)
