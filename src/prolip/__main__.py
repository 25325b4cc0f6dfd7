"""`python -m prolip VERB`, and `torchrun -m prolip train`, are `prolip VERB`."""

import os
import sys
from pathlib import Path

# `python -m` puts the working directory first on the path, and a user's project may have a folder called `training`.
# Processes started by multiprocessing inherit the path.
if Path.cwd() != Path(__file__).resolve().parents[1]:
    sys.path[:] = [folder for folder in sys.path if folder not in ("", os.getcwd())]

if __name__ == "__main__":
    from prolip.cli.main import script

    script()
