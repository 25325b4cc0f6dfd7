"""An archive, a wheel and a clone, installed into environments of their own and used where no sources are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKED = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE", "requirements.txt", "src")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
OFFLINE = ["--no-index", "--no-deps", "--no-build-isolation"]
RUN = """
train --model ProLIP-ViT-test --dataset-type synthetic --train-num-samples 64 --batch-size 16 --workers 0 --warmup 1
--max-steps 2 --name toy
"""
USED = """
import prolip, torch, training.main
place = prolip.__file__
model, _, preprocess = prolip.create_model_and_transforms("ProLIP-ViT-test", load_weights=False)
text = prolip.get_tokenizer("ProLIP-ViT-test")(["a cat", "a dog"])
print(place, tuple(model.eval().encode_text(text).mean.shape))
"""


def call(words: list[str | Path], place: Path) -> str:
    """Return the output of a command, which must succeed in this folder with only its environment on the path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(word) for word in words], cwd=place, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A copy of what is packed, where building leaves its traces."""
    place = tmp_path_factory.mktemp("sources")
    for name in PACKED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, place / name)
    for trace in [*(place / "src").rglob("__pycache__"), *(place / "src").glob("*.egg-info")]:
        shutil.rmtree(trace)
    return place


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory) -> Path:
    """Built from the clone."""
    place = tmp_path_factory.mktemp("wheel")
    call([*PIP, "wheel", *OFFLINE, "--wheel-dir", place, sources], place)
    return next(place.glob("*.whl"))


@pytest.fixture(scope="module")
def archive(sources, tmp_path_factory) -> Path:
    """The source archive."""
    place = tmp_path_factory.mktemp("archive")
    call([sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", place], sources)
    return next(place.glob("*.tar.gz"))


def environment_with(what: list[str | Path], place: Path) -> Path:
    """The programs of a fresh environment with this installed; what it requires is that of the running one."""
    venv.create(place / "env", with_pip=False)
    found = sysconfig.get_paths(vars={"base": str(place / "env"), "platbase": str(place / "env")})["purelib"]
    (Path(found) / "requirements.pth").write_text(sysconfig.get_paths()["purelib"])
    python = place / "env/bin/python"
    call([*PIP, "--python", python, "install", *OFFLINE, "--ignore-installed", *what], place)
    return python.parent


def use(programs: Path, place: Path) -> str:
    """Help, an import, a model, a run and its page; returns where the package lies."""
    assert "usage: prolip VERB" in call([programs / "prolip", "--help"], place)
    where, shape = call([programs / "python", "-c", USED], place).split(maxsplit=1)
    assert shape.startswith("(2, ")
    call([programs / "prolip", *RUN.split()], place)
    call([programs / "prolip", "report", "runs/toy"], place)
    assert "<html" in (place / "runs/toy/report.html").read_text()
    return where


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["wheel", "archive", "clone"])
def test_what_was_installed_trains_and_reports_in_a_folder_without_the_sources(kind, tmp_path, request):
    given = request.getfixturevalue({"clone": "sources"}.get(kind, kind))
    programs = environment_with(["--editable", given] if kind == "clone" else [given], tmp_path)
    (tmp_path / "elsewhere").mkdir()
    where = use(programs, tmp_path / "elsewhere")
    assert where.startswith(str(given / "src" if kind == "clone" else tmp_path / "env"))


def test_a_wheel_and_an_archive_have_every_file_of_the_packages(sources, wheel, archive):
    files = {path.relative_to(sources / "src").as_posix() for path in (sources / "src").rglob("*") if path.is_file()}
    files = {name for name in files if ".egg-info/" not in name and "/__pycache__/" not in name}
    assert files <= set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(archive) as opened:
        packed = {name.partition("/src/")[2] for name in opened.getnames()}
    assert files <= packed
