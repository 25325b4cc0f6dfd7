"""The counts of a run at scale: what a rank touches does not grow with their number, and every collective is named."""

from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts/bench/train/scale.py"


def tables_of(forked, *words: object) -> dict[str, list[dict[str, str]]]:
    """Run the script; returns title -> rows of cells by column."""
    assert forked.script(SCRIPT, *words) == 0, forked.err[-2000:]
    tables = {}
    for title, *lines in (part.splitlines() for part in forked.out.split("## ")[1:]):
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        tables[title] = [dict(zip(cells[0], row)) for row in cells[2:]]
    return tables


def number(row: dict[str, str], column: str) -> float:
    """Columns of zeros are left out."""
    return float(row.get(column, "0").replace(",", ""))


def test_a_rank_of_many_looks_up_and_opens_the_shard_that_it_reads(forked):
    for title, rows in tables_of(forked, "start", "--shards", 16, "--ranks", 2, 16).items():
        assert title == "Start on 16 shards" and len(rows) == 6
        for row in rows:
            if row["of"] == "rank 0":
                assert 16 < number(row, "looked up") < 120 and number(row, "received") == 0
            elif row["of"] == "another":
                assert [number(row, name) for name in ("looked up", "opened", "listed")] == [1, 1, 0]
                assert number(row, "received") > 0


@pytest.mark.slow
def test_a_step_a_stop_and_a_load_cost_a_rank_the_same_whatever_their_number(forked):
    """Formulas name what grows: texts gathered in a step, and places in the data on rank 0, which saves."""
    tables = tables_of(forked, "step", "stop", "save", "load", "--ranks", 2, 16)
    for who in ("rank 0", "another"):
        few, many = (
            {title: row for title, rows in tables.items() for row in rows if (row["ranks"], row["of"]) == (ranks, who)}
            for ranks in ("2", "16")
        )
        for title in tables:
            assert number(few[title], "collectives") == number(many[title], "collectives") > 0
        late = "steps until known"
        assert few["Stop"]["sent"] == many["Stop"]["sent"] and few["Stop"][late] == many["Stop"][late]
        assert number(many["Stop"], late) <= 6
        assert number(few["Save"], "received") <= number(many["Save"], "received") < 16 * 600
        assert abs(number(few["Load"], "mapped") - number(many["Load"], "mapped")) < 1000
        assert number(many["Load"], "received") < 1000
        assert who == "rank 0" or number(many["Save"], "received") == 0
