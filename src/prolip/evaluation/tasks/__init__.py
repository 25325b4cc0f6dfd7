"""Tasks by name, one per module: texts, metrics, and a study of how well uncertainty predicts errors."""

from prolip.evaluation.tasks import association, classification, multilabel, retrieval
from prolip.evaluation.tasks.base import Task

TASKS: dict[str, Task] = {
    "classification": classification.TASK,
    "multilabel": multilabel.TASK,
    "retrieval": retrieval.TASK,
    "association": association.TASK,
}
