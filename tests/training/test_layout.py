"""How the packages stand to each other: what imports what, and how many modules lie beside each other."""
from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
MODULES = {".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
           for path in SOURCE.rglob("*.py")}  # fmt: skip
OWN = {name: path for name, path in MODULES.items() if name.split(".")[0] in ("training", "planner")}
MOST = 12


def imported(nodes: Iterable[ast.stmt]) -> Iterator[str]:
    """What is imported when a module is: not within functions, nor for type checkers alone."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            yield from imported(node.body)


def imports_of(path: Path) -> set[str]:
    return set(imported(ast.parse(path.read_text()).body))


def test_no_module_leads_back_to_itself():
    TopologicalSorter({name: imports_of(path) & OWN.keys() for name, path in OWN.items()}).prepare()


@pytest.mark.parametrize("package, above", [("prolip", {"training", "planner"}), ("training", {"planner"})])
def test_a_package_imports_none_above_it(package, above):
    for name, path in MODULES.items():
        if name.split(".")[0] == package:
            every = {found for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt)
                     for found in imported([node])}  # fmt: skip
            assert not {found.split(".")[0] for found in every} & above, path


def test_of_methods_training_imports_only_the_table_and_the_contract():
    for name, path in OWN.items():
        methods = {found for found in imports_of(path) if found.startswith("prolip.methods")}
        assert name.startswith("planner") or methods <= {"prolip.methods", "prolip.methods.base"}, path


@pytest.mark.parametrize("folder", sorted({path.parent for path in OWN.values()}), ids=lambda folder: folder.name)
def test_few_enough_modules_lie_beside_each_other_to_be_looked_through(folder):
    assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= MOST
