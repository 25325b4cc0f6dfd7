"""Commit subjects are imperative and at most 72 characters, from the commit that the script names."""

from __future__ import annotations

import shutil

import pytest

from dev import subjects


@pytest.mark.parametrize(
    ("subject", "wrong"),
    [
        ("Add a test of commit subjects", ""),
        ("Merge: the tour", ""),
        ("Address the review", ""),  # no form of "add"
        ("A" * 73, "73 characters"),
        ("Added a test", "imperative"),
        ("Fixes the reader", "imperative"),
        ("Dropping old flags", "imperative"),
        ("Renamed two flags", "imperative"),
        ("The reader closes its file", "imperative"),
        ("What a run leaves", "imperative"),
        ("add a test", "capital"),
        ("Add a test.", "full stop"),
        ("", "capital"),
    ],
)
def test_a_subject_is_imperative_short_and_without_a_full_stop(subject, wrong):
    found = subjects.problem(subject)
    assert wrong in found and bool(wrong) == bool(found)


def test_the_commits_since_the_rule_keep_it(capsys):
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    try:
        subjects.subjects(f"{subjects.SINCE}..HEAD")
    except OSError as error:
        pytest.skip(f"these are no commits to look at, or too few (a shallow clone, an archive): {error}")
    assert subjects.main([]) == 0, capsys.readouterr().out
