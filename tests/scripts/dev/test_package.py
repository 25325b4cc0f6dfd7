"""The dependencies in pyproject.toml equal the imports of the code, and its commands lead to functions."""

import ast
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[3]
tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

#: Packages that come with a declared one, and optional ones whose import is guarded.
COMES_WITH = {"cycler": "matplotlib", "triton": "torch", "packaging": "pytest", "tokenizers": "clip-benchmark"}
COMES_WITH |= {"onnx_ir": "onnxscript"}
OPTIONAL = {"wandb", "torchcodec", "cosmic_ray"}


def declared(lines: list[str]) -> dict[str, Requirement]:
    """Requirements by their canonical name."""
    found = [Requirement(line.partition("#")[0].strip()) for line in lines if line.partition("#")[0].strip()]
    return {canonicalize_name(one.name): one for one in found}


REQUIREMENTS = declared((ROOT / "requirements.txt").read_text().splitlines())


def test_the_lowest_versions_are_the_bounds_of_the_requirements():
    def versions(requirements: dict[str, Requirement], operator: str) -> dict[str, list[Version]]:
        found = {name: [x for x in one.specifier if x.operator == operator] for name, one in requirements.items()}
        return {name: [Version(x.version) for x in some] for name, some in found.items()}

    lowest = declared((ROOT / "tests/lowest.txt").read_text().splitlines())
    assert all(len(one.specifier) == 1 for one in lowest.values())
    assert versions(lowest, "==") == versions(REQUIREMENTS, ">=")


def test_every_package_that_is_imported_is_declared():
    extras = declared([line for lines in PROJECT["optional-dependencies"].values() for line in lines])
    known = {*REQUIREMENTS, *extras, *COMES_WITH.values(), canonicalize_name(PROJECT["name"])}
    files = [path for root in ("src", "scripts", "slurm", "tests") for path in (ROOT / root).rglob("*.py")]
    imported = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            imported |= {module.split(".")[0] for module in modules}
    own = {name for path in files for name in (path.stem, path.parent.name)}
    imported -= {"", *sys.stdlib_module_names, *OPTIONAL, *COMES_WITH, *own}
    provided = packages_distributions()
    assert {name for name in imported if known.isdisjoint(map(canonicalize_name, provided.get(name, [])))} == set()


def test_every_folder_of_modules_is_a_package():
    for package in (ROOT / "src/prolip", ROOT / "src/training"):
        folders = {path.parent for path in package.rglob("*.py")}
        assert all((folder / "__init__.py").exists() for folder in folders)  # else no wheel would have it


def test_every_entry_point_leads_to_a_function():
    for place in PROJECT["scripts"].values():
        module, function = place.split(":")
        tree = ast.parse((ROOT / "src" / (module.replace(".", "/") + ".py")).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
