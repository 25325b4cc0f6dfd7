"""The length of fits in tests, and the world of the fits."""

from __future__ import annotations

import pytest
from ambiguous_pairs import World, ambiguous_world

from studies.uncertainty.baselines import heads


@pytest.fixture
def small(monkeypatch):
    """Heads fitted in fewer steps of smaller batches: enough for few dimensions, in a tenth of the time."""
    monkeypatch.setattr(heads, "STEPS", 150)
    monkeypatch.setattr(heads, "BATCH", 64)


@pytest.fixture
def short(monkeypatch):
    """Heads fitted in a few steps, where it does not matter to what."""
    monkeypatch.setattr(heads, "STEPS", 4)


@pytest.fixture(scope="session")
def world() -> World:
    return ambiguous_world()
