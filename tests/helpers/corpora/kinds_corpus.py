"""A made-up corpus whose kinds are known as sets."""

import numpy as np

from prolip.corpora.emoji.corpus import LEVELS, Concept, Corpus, Drawing


def corpus_of(count=24, seed=0, drawings=True):
    """Concepts of two groups of three subgroups each, with keywords of many and of few concepts."""
    rng = np.random.default_rng(seed)
    concepts = tuple(
        Concept(str(i), f"name{i}", tuple(f"key{k}" for k in np.unique(some)), f"sub{i % 6}", f"group{i % 2}")
        for i, some in enumerate(rng.integers(0, 9, (count, 3)))
    )
    shown = tuple(Drawing(f"a-{i}", "a", i % count, b"") for i in range(2 * count)) if drawings else ()
    return Corpus(concepts, shown)


def truth(corpus):
    """Return for every text the set of its concepts and its most general level."""
    sets, level = {}, {}
    for depth, name in enumerate(LEVELS):
        for k, concept in enumerate(corpus.concepts):
            for text in concept.captions(name):
                sets.setdefault(text, set()).add(k)
                level.setdefault(text, depth)
    return sets, level
