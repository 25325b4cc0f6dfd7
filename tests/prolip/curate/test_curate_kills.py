"""Curation that is killed, or meets a full disk, at any call: its results are the old or the new ones."""
import pytest

import faults


@pytest.mark.parametrize("commit", ["table", "selection", "shards"])
def test_a_kill_or_a_full_disk_leaves_the_old_or_the_new_state(tmp_path, commit):
    report = faults.check(f"commits_curate:{commit}", tmp_path)
    assert "the old state" in report and "the new state" in report


@pytest.mark.slow
@pytest.mark.parametrize("commit", ["table", "selection", "first_selection", "shards"])
def test_at_every_call(tmp_path, commit):
    faults.check(f"commits_curate:{commit}", tmp_path, every=True)
