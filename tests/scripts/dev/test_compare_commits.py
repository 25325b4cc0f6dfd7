"""compare_commits: commits that spell flags, keys, files and modules in two ways, and what counts as the same."""

import pytest

from dev import compare_commits as compare


@pytest.fixture
def commit(tmp_path, monkeypatch):
    """A commit whose source has the flags --score and --max-steps, the module training.run and a recipe."""
    made = compare.Commit.__new__(compare.Commit)
    made.name, made.folder, made.flags = "before", tmp_path, []
    files = {"src/training/run.py": "    max_steps: int\n", "src/prolip/eval.py": 'flag("--score")\n'}
    for name, text in (files | {"recipes/demo.yaml": ""}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(compare, "RENAMED_FLAGS", {"--similarity": "--score", "--max-steps": "--steps"})
    monkeypatch.setattr(compare, "RENAMED_MODULES", {"training.main": "training.run"})
    monkeypatch.setattr(compare, "RENAMED_FILES", {"scripts/recipes/demo.yaml": "recipes/demo.yaml"})
    monkeypatch.setattr(compare, "RENAMED_KEYS", {"aurc": "area"})
    return made


def test_a_commit_gets_the_spelling_that_its_source_has(commit):
    words = ["-m", "training.main", "--config", "scripts/recipes/demo.yaml", "--similarity", "--max-steps", "20"]
    former = ["-m", "training.run", "--config", "recipes/demo.yaml", "--score", "--max-steps", "20"]
    assert [commit.spelled(word) for word in words] == former
    (commit.folder / "src/prolip/eval.py").write_text('flag("--similarity")\n')
    assert commit.spelled("--similarity") == "--similarity"


@pytest.mark.parametrize(
    ("part", "other", "said"),
    [
        ("tasks", {"acc1": 0.5 + 1e-16, "new": 1}, "same"),
        ("tasks", {"acc1": 0.6}, "DIFFERENT: /acc1: 0.5 and 0.6"),
        ("terms", {"acc1": 0.5 + 1e-15}, "DIFFERENT"),
        ("tasks", {}, "GONE: 1 of 1: acc1"),
    ],
)
def test_metrics_may_be_summed_in_another_order_and_nothing_else(part, other, said, capsys):
    same = compare.compare("title", iter([(part, {"acc1": 0.5})]), iter([(part, other)]))
    assert same is (said == "same") and said in capsys.readouterr().out
