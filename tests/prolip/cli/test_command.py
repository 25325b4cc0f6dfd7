"""What the groups of flags mean in every command."""

import pytest

from prolip.cli.command import part_of


@pytest.fixture
def array(monkeypatch):
    """Sets the environment of a task of sbatch --array=NUMBERS, as SLURM does."""

    def be(numbers, task):
        facts = {"ID": task, "MIN": min(numbers), "MAX": max(numbers), "COUNT": len(numbers)}
        for name, value in facts.items():
            monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))

    return be


@pytest.mark.parametrize("text", ["8/8", "x", "array", "1", "-1/2", "1/2/3"])
def test_a_wrong_part_says_what_to_give(text):
    with pytest.raises(ValueError, match="--part .* give I/N with I from 0"):
        part_of(text)


@pytest.mark.parametrize("numbers", [range(8), (1, 4, 7), (4,)], ids=str)
def test_the_tasks_of_an_array_take_all_parts_whatever_their_numbers(array, numbers):
    assert part_of(None) == part_of("0/1") == part_of("slurm") == (0, 1) and part_of("2/8") == (2, 8)
    parts = []
    for task in numbers:
        array(numbers, task)
        parts.append(part_of("slurm"))
    assert parts == [(i, len(numbers)) for i in range(len(numbers))]


@pytest.mark.parametrize("numbers, task", [((0, 3, 7), 0), ((0, 3, 7), 3), ((0, 1, 5, 6), 1)])
def test_an_array_with_gaps_is_told_what_to_submit(array, numbers, task):
    array(numbers, task)
    with pytest.raises(ValueError, match=f"have gaps.* submit --array=0-{len(numbers) - 1}$"):
        part_of("slurm")
