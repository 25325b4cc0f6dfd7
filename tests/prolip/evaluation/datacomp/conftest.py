"""The 40 data sets in miniature and a model, which all tests of the suite read."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import miniatures
import pytest
from commands import datacomp
from datacomp_suite import Oracle, write_suite

from prolip.evaluation.suites.datacomp.catalogue import TASKS
from prolip.evaluation.suites.datacomp.run import Outcome


class Suite(NamedTuple):
    """The model, the folder of the data sets, each of them by key, and what a model must get on them."""

    model: str
    data: Path
    folders: dict[str, Path]
    oracle: Oracle

    def words(self, out, *more) -> list[str]:
        """The words of a command that writes to `out`; what is given in `more` counts in place of what is here."""
        words = ["--model", self.model, "--data", self.data, "--output", out, "--workers", 0, "--device", "cpu", *more]
        return [str(word) for word in words]

    def run(self, out, *more) -> Outcome:
        return datacomp(self.words(out, *more))


@pytest.fixture(scope="session")
def suite(tmp_path_factory) -> Suite:
    root = tmp_path_factory.mktemp("datacomp")
    model = miniatures.prolip_folder(root / "model")
    oracle = Oracle(model)
    return Suite(model, root / "data", write_suite(root / "data", TASKS, oracle), oracle)
