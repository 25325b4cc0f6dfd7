"""Tasks by name, each in one module: its texts, its metrics, and how well its uncertainty predicts errors."""

from prolip.evaluation.tasks import association, classification, multilabel, retrieval
from prolip.evaluation.tasks.base import Task

TASKS: dict[str, Task] = {
    "classification": classification.TASK,
    "multilabel": multilabel.TASK,
    "retrieval": retrieval.TASK,
    "association": association.TASK,
}
