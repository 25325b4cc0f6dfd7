"""The bundled corpus as a test set with complete labels: what else it can say than any other."""
from prolip.evaluation.suites.emoji.evaluate import evaluate, gallery, recall_by_trace
from prolip.evaluation.suites.emoji.result import Result, load
from prolip.evaluation.suites.emoji.table import format_table

__all__ = ["Result", "evaluate", "format_table", "gallery", "load", "recall_by_trace"]
