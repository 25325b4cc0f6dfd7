"""What is packed holds what it needs: a source archive what setup.py reads, a wheel every file beside the modules."""
import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETUP = (ROOT / "setup.py").read_text()


def keyword(name: str):
    """The value of one keyword of setup()."""
    calls = [node for node in ast.walk(ast.parse(SETUP)) if isinstance(node, ast.Call)]
    return next(ast.literal_eval(word.value) for call in calls for word in call.keywords if word.arg == name)


def test_a_source_archive_has_the_files_that_setup_reads():
    packed = {"README.md", "LICENSE", "setup.py", "setup.cfg"}  # setuptools takes these of itself
    packed |= set((ROOT / "MANIFEST.in").read_text().split()) - {"include"}
    assert set(re.findall(r'HERE / "([^"]+)"', SETUP)) <= packed
    assert all((ROOT / name).exists() for name in packed)


def test_a_wheel_has_every_file_that_is_no_module():
    for package in (ROOT / "src/prolip", ROOT / "src/training", ROOT / "src/planner"):
        packed = {path for pattern in keyword("package_data").get(package.name, []) for path in package.glob(pattern)}
        files = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
        assert files - packed == set()
        folders = {path.parent for path in package.rglob("*.py")}
        assert all((folder / "__init__.py").exists() for folder in folders)  # else find_packages passes it over


def test_every_entry_point_leads_to_a_function():
    for line in keyword("entry_points")["console_scripts"]:
        module, function = line.split("=")[1].split(":")
        tree = ast.parse((ROOT / "src" / (module.replace(".", "/") + ".py")).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
