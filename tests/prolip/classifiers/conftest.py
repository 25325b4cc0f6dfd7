"""A small model with a novelty, and drawings of two designers."""

from __future__ import annotations

from pathlib import Path

import pytest
from fitted_models import fitted_model

from prolip.corpora.emoji import corpus as emoji
from prolip.embedder import Embedder

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def drawings():
    """Bytes of flowers and vegetables by two designers, with their subgroups."""
    found = emoji.read([ROOT / "data/emoji/noto.tar", ROOT / "data/emoji/fluent-emoji-high-contrast.tar"])
    chosen = found.select("subgroup=plant flower|food vegetable|transport air")
    labels = [chosen.concepts[one.concept].subgroup for one in chosen.drawings]
    return [one.data for one in chosen.drawings], labels, [one.style for one in chosen.drawings]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """`local-dir:` address of a model with variances and novelty, fitted to random pairs."""
    return fitted_model(tmp_path_factory.mktemp("classifying"))


@pytest.fixture(scope="session")
def small(small_model):
    return Embedder.load(small_model)
