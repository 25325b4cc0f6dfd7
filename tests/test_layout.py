"""The structure of src: allowed imports between modules, and the number of modules in a folder."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from prolip.methods import METHODS

SOURCE = Path(__file__).parents[1] / "src"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCE.rglob("*.py")
}
MOST = 12
#: From the ground up; a module is on the floor of its longest prefix here, and imports none of a higher floor.
FLOORS = [
    ["prolip.utils"],
    ["prolip.gaussian", "prolip.random", "prolip.views", "prolip.flops"],
    ["prolip.measures"],
    ["prolip.losses"],
    ["prolip.uncertainty", "prolip.scores", "prolip.embeddings"],
    ["prolip.data", "prolip.models", "prolip.ranks"],
    ["prolip.methods"],
    ["prolip.factory", "prolip.loading", "prolip.embedder"],
    ["prolip.fitting"],
    ["prolip.evaluation.metrics"],  # formulas of scores, which import no other part of the evaluation
    ["prolip.prompts"],
    ["prolip.evaluation"],
    ["prolip.search", "prolip.curate", "prolip.hierarchy"],
    ["prolip.classifiers"],  # which refuse as a search does
    ["prolip.corpora", "prolip.export", "prolip.hub", "prolip.plan", "prolip.explorer"],
    ["prolip"],  # the public names
    ["training"],
    ["prolip.cli", "prolip.__main__"],
]
FLOOR = {prefix: number for number, prefixes in enumerate(FLOORS) for prefix in prefixes}


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the imports in these nodes, except those for type checkers only."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from imported(ast.iter_child_nodes(node))


def imports_of(name: str) -> set[str]:
    return set(imported(ast.parse(MODULES[name].read_text()).body)) & MODULES.keys()


def floor_of(module: str) -> int:
    return FLOOR[max((prefix for prefix in FLOOR if f"{module}.".startswith(f"{prefix}.")), key=len)]


def packages_of(name: str) -> set[str]:
    return {package for package in MODULES if name.startswith(f"{package}.")}


def test_no_module_leads_back_to_itself():
    def run_by(name: str) -> set[str]:  # what is imported, and the packages that it is in
        found = imports_of(name)
        return found | {package for other in found for package in packages_of(other)} - packages_of(name) - {name}

    TopologicalSorter({name: run_by(name) for name in MODULES}).prepare()


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_imports_none_of_a_higher_floor(name):
    assert not {found for found in imports_of(name) if floor_of(found) > floor_of(name)}


def test_every_floor_has_modules():
    assert all(any(f"{module}.".startswith(f"{prefix}.") for module in MODULES) for prefix in FLOOR)


def test_methods_do_not_import_each_other_and_others_know_only_their_table():
    shared = {f"prolip.methods.{name}" for name in ("accumulate", "base", "gaussians")}
    rooms = {name for name in MODULES if name.startswith("prolip.methods.")} - shared
    for name in MODULES:
        allowed = {name} | (rooms if name == "prolip.methods" else set())
        assert not imports_of(name) & rooms - allowed, name


def test_generic_evaluation_imports_no_suite_and_names_no_method():
    words = {f"'{name}'" for name in METHODS} | {f'"{name}"' for name in METHODS}
    for name in MODULES:
        if name.startswith("prolip.evaluation") and ".suites" not in name and ".clip_benchmark" not in name:
            assert not {found for found in imports_of(name) if ".suites" in found}, name
            found = [word for word in words if word in MODULES[name].read_text()]
            assert not found, (name, found)


def files_of(top: str) -> list[Path]:
    return list((SOURCE.parent / top).rglob("*.py"))


def test_few_enough_modules_lie_beside_each_other_to_be_looked_through():
    files = [path for top in ("src", "scripts", "tests") for path in files_of(top) if path.name != "__init__.py"]
    assert {folder: count for folder, count in Counter(path.parent for path in files).items() if count > MOST} == {}


@pytest.mark.parametrize(("top", "most"), [("src", 400), ("tests", 500)])
def test_no_file_is_too_long_to_be_read_at_once(top, most):
    assert {path for path in files_of(top) if len(path.read_text().splitlines()) > most} == set()


def test_test_files_have_names_of_their_own():
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert {name for name in names if names.count(name) > 1} == set()  # pytest imports them by their names alone
