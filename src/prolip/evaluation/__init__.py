"""Models on test sets: `load_embedder`, `open_dataset`, `compute_features`, `evaluate_dataset`, `study_features`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prolip.utils.late import late

if TYPE_CHECKING:
    from prolip.evaluation.datasets.registry import open_dataset
    from prolip.evaluation.task import compute_features, evaluate_dataset, study_features
    from prolip.loading import load_embedder

__all__ = ["compute_features", "evaluate_dataset", "load_embedder", "open_dataset", "study_features"]

# Late, as metrics alone need neither towers nor readers of files.
__getattr__ = late(
    __name__,
    {
        "load_embedder": "loading",
        "open_dataset": "datasets.registry",
        "compute_features": "task",
        "evaluate_dataset": "task",
        "study_features": "task",
    },
)
