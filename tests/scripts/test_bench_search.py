"""The benchmark of search runs, prints every kind both ways, and draws them."""
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_kind_is_measured_both_ways_and_drawn(forked, tmp_path):
    words = ("--items", "700", "--dim", "8", "--queries", "20", "--clusters", "4", "--rounds", "1", "--threads", "1")
    code = forked.script(ROOT / "scripts/bench_search.py", *words, "--plot", str(tmp_path / "plot.png"))
    assert code == 0, forked.err[-2000:]
    for kind in ("ivf", "hnsw", "pq"):
        assert re.search(rf"^\| {kind}, build \| [\d.]+ \| [\d.]+ \| [\d.]+ \|$", forked.out, re.M), forked.out
        for way in ("ours", "two steps"):
            found = re.findall(rf"^\| {kind} \| {way} \| ([\d.]+) \| \d+ \| effort .+ \|$", forked.out, re.M)
            assert found and float(found[-1]) > 0.9, forked.out
        assert re.search(rf"^{kind}: ours at least as good .+: (yes|no)$", forked.out, re.M)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
