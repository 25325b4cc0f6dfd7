"""Models on test sets: `load_embedder`, `open_dataset`, `compute_features`, `evaluate_dataset`, `study_features`."""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prolip.evaluation.datasets.specs import open_dataset
    from prolip.evaluation.loading import load_embedder
    from prolip.evaluation.task import compute_features, evaluate_dataset, study_features

__all__ = ["compute_features", "evaluate_dataset", "load_embedder", "open_dataset", "study_features"]

# Late, as metrics alone need neither towers nor readers of files.
_LATE = {
    "load_embedder": "loading", "open_dataset": "datasets.specs", "compute_features": "task",
    "evaluate_dataset": "task", "study_features": "task",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first asked for."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
