"""The counts of a start at scale are printed, and all ranks but the first touch what they read alone."""
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/bench/scale.py"


def test_a_rank_of_many_looks_up_and_opens_the_shard_that_it_reads():
    words = [sys.executable, str(SCRIPT), "start", "--shards", "64", "--ranks", "2", "64"]
    out = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300).stdout
    for ranks in (2, 64):
        first, other = (re.search(rf"^\| {ranks} \| {who} \| (\d+) \| (\d+) \| (\d+) \| \S+ \| (\S+) \|", out, re.M)
                        for who in ("rank 0", "another"))  # fmt: skip
        assert 64 < int(first[1]) < 200 and first[4] == "0"
        assert other.groups()[:3] == ("1", "1", "0") and other[4] != "0"


def test_more_ranks_than_shards_are_refused():
    done = subprocess.run([sys.executable, str(SCRIPT), "start", "--shards", "8"], capture_output=True, text=True)
    assert done.returncode == 2 and "give as many shards or more" in done.stderr
