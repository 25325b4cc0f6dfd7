"""The corpus's group "activities" in shards of its own: whole shards take a small run most of its time to read."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

CORPUS = Path(__file__).parents[1] / "data/emoji"
FOLDER = Path(os.environ["PROLIP_TEST_DRAWINGS"])  # conftest.py makes it, once for all processes of a session
SHARDS, UNSEEN = f"{FOLDER}/{{noto,twemoji}}.tar", str(FOLDER / "emojione.tar")
VALIDATION = ["--val-data", f"emoji:{UNSEEN}"]


def write(folder: Path) -> None:
    """The group's drawings of three designers; the folder is made."""
    folder.mkdir()
    for name in ("noto", "twemoji", "emojione"):
        with tarfile.open(CORPUS / f"{name}.tar") as every, tarfile.open(folder / f"{name}.tar", "w") as few:
            members = every.getmembers()
            keys = {
                Path(member.name).stem
                for member in members
                if member.name.endswith(".json") and json.load(every.extractfile(member))["group"] == "activities"
            }
            for member in members:
                if Path(member.name).stem in keys:
                    few.addfile(member, every.extractfile(member))
