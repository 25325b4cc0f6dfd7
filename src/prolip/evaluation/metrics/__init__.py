"""Metrics as pure functions of scores, ranks, labels and errors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray | Tensor


def as_array(values: Array | Sequence, dtype: type | None = None) -> np.ndarray:
    """Return values as a NumPy array: tensors of any device, with or without a graph; bfloat16 as float32."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asarray(values, dtype=dtype)
