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
        counts = r"\| (\d+) \| (\d+) \| (\d+) \| \S+ \| \S+ \| \S+ \| \S+ \| (\S+) \|"
        first, other = (re.search(rf"^\| {ranks} \| {who} {counts}", out, re.M) for who in ("rank 0", "another"))
        assert 64 < int(first[1]) < 200 and first[4] == "0"
        assert other.groups()[:3] == ("1", "1", "0") and other[4] != "0"


def test_more_ranks_than_shards_are_refused():
    done = subprocess.run([sys.executable, str(SCRIPT), "start", "--shards", "8"], capture_output=True, text=True)
    assert done.returncode == 2 and "give as many shards or more" in done.stderr


def test_a_step_a_stop_and_a_load_cost_a_rank_the_same_whatever_their_number():
    """Formulas name what grows: texts gathered in a step, and places in the data on rank 0, which saves."""
    words = [sys.executable, str(SCRIPT), "step", "stop", "save", "load", "--ranks", "8", "64"]
    out = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300).stdout
    tables = {text.split(",")[0]: text for text in re.split(r"\n(?=\w+, this commit)", out.strip())}
    counts = {}
    for phase, text in tables.items():
        for line in re.findall(r"^\| \d+ \| (?:rank 0|another) .*$", text, re.M):
            ranks, who, *cells = (cell.strip().replace(",", "") for cell in line.strip("|").split("|"))
            counts[phase, int(ranks), who] = [float(cell) for cell in cells]
    collectives, sent, received, mapped = 5, 6, 7, 4
    for who in ("rank 0", "another"):
        few, many = ({phase: counts[phase, ranks, who] for phase in tables} for ranks in (8, 64))
        for phase in tables:
            assert few[phase][collectives] == many[phase][collectives] > 0
        assert few["Stop"][sent] == many["Stop"][sent] and few["Stop"][-1] == many["Stop"][-1] <= 6
        assert few["Save"][received] <= many["Save"][received] < 64 * 600
        assert abs(few["Load"][mapped] - many["Load"][mapped]) < 1000 and many["Load"][received] < 1000
    assert counts["Save", 64, "another"][received] == 0
