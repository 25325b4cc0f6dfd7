"""What all tests share."""
from __future__ import annotations

import os

import torch

# Triton settles when it is imported whether kernels are compiled or interpreted; a machine without a GPU can only do
# the latter, and tests import everything into one process.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
