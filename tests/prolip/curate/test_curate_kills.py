"""Curation that is killed, or meets a full disk, at any call: its results are the old or the new ones."""

import pytest

import faults


def test_a_kill_or_a_full_disk_leaves_the_old_or_the_new_state(tmp_path):
    report = faults.check("commits_curate:table,selection,shards", tmp_path)
    assert report.count("the old state") > 2 and report.count("the new state") > 2


@pytest.mark.slow
@pytest.mark.parametrize("commit", ["table", "selection", "first_selection", "shards"])
def test_at_every_call(tmp_path, commit):
    faults.check(f"commits_curate:{commit}", tmp_path, every=True)
