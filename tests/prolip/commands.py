"""Commands in this process: what their work returned, and SystemExit where they end with another code than 0."""

from collections.abc import Callable, Iterable
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import pytest

from prolip.cli.main import main
from prolip.corpora.emoji.result import CorpusResult
from prolip.evaluation.evaluate import TaskResult
from prolip.evaluation.suites.datacomp.run import Outcome


def run(*words: object) -> None:
    """`prolip WORDS`."""
    if code := main([str(word) for word in words]):
        raise SystemExit(code)


def refusal(capsys: Any, command: Callable[[list[str]], object], *words: object) -> str:
    """The errors of a command that ends with code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        command([str(word) for word in words])
    assert ended.value.code == 2
    return capsys.readouterr().err


def returned(target: str, *words: object) -> Any:
    """Return what a function returned to `prolip WORDS`, None if it was not called."""
    work, found = resolve_name(target), []

    def kept(*args, **options):
        found.append(work(*args, **options))
        return found[-1]

    with patch(target, kept):
        run(*words)
    return found[-1] if found else None


def evaluate(words: Iterable[object]) -> list[TaskResult]:
    """The results of `prolip eval tasks`."""
    return returned("prolip.evaluation.evaluate.evaluate_all", "eval", "tasks", *words)


def evaluate_corpus(words: Iterable[object]) -> CorpusResult:
    """The result of `prolip eval emoji`."""
    return returned("prolip.corpora.emoji.evaluate.evaluate_corpus", "eval", "emoji", *words)


def datacomp(words: Iterable[object]) -> Outcome:
    """The outcome of `prolip eval datacomp`."""
    return returned("prolip.evaluation.suites.datacomp.run.run", "eval", "datacomp", *words)


def clip_benchmark(words: Iterable[object]) -> None:
    """`prolip eval clip-benchmark`."""
    run("eval", "clip-benchmark", *words)
