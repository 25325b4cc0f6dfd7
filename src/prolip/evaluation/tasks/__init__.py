"""Kinds of tasks by name, each in one module: its texts, metrics, their names, and what its uncertainty is worth."""

from prolip.evaluation.tasks import association, classification, multilabel, retrieval
from prolip.evaluation.tasks.base import Kind

KINDS: dict[str, Kind] = {
    "classification": classification.KIND,
    "multilabel": multilabel.KIND,
    "retrieval": retrieval.KIND,
    "association": association.KIND,
}

__all__ = ["KINDS", "Kind"]
