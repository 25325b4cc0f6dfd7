"""Models on test sets: `open_dataset`, `compute_features`, `evaluate_dataset`, `study_features`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prolip.utils.moved import late

if TYPE_CHECKING:
    from prolip.evaluation.datasets.registry import open_dataset
    from prolip.evaluation.evaluate import compute_features, evaluate_dataset, study_features

__all__ = ["compute_features", "evaluate_dataset", "open_dataset", "study_features"]

# Late, as metrics alone need neither towers nor readers of files.
__getattr__ = late(
    __name__,
    {
        "open_dataset": "datasets.registry",
        "compute_features": "evaluate",
        "evaluate_dataset": "evaluate",
        "study_features": "evaluate",
    },
    moved={"load_embedder": "prolip.Embedder.load(name, pretrained, tokenizer=...)"},
)
