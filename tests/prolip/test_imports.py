"""Imports: Gaussians and metrics need no OpenCLIP, and every public name exists."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import prolip
from prolip.utils.moved import MOVED

SOURCE = str(Path(__file__).parents[2] / "src")


def test_what_needs_no_towers_does_not_import_them():
    modules = "prolip, prolip.measures, prolip.losses, prolip.methods, prolip.evaluation.datasets.coco_labels"
    heavy = ("open_clip", "torchvision", "faiss", "prolip.methods.prolip")
    code = f"import sys, {modules}; prolip.methods.find_score('csd')"
    code += f"; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": SOURCE})
    assert done.stdout.strip() == "[]", done.stderr


def test_every_public_name_is_there_and_no_other():
    assert set(prolip.__all__) <= set(dir(prolip))
    assert all(getattr(prolip, name) is not None for name in prolip.__all__)
    with pytest.raises(AttributeError, match="no attribute 'create_modell'"):
        prolip.create_modell  # noqa: B018


@pytest.mark.parametrize("old", sorted(MOVED))
def test_a_module_that_moved_says_where_it_is(old):
    import_module(MOVED[old])
    with pytest.raises(ImportError, match=re.escape(f"{old} is now {MOVED[old]}")):
        import_module(old)
