"""The bundled corpus as a test set with complete labels: what else it can say than any other."""

from prolip.evaluation.suites.emoji.evaluate import evaluate_corpus, gallery, recall_by_trace
from prolip.evaluation.suites.emoji.result import CorpusResult, format_corpus, load

__all__ = ["CorpusResult", "evaluate_corpus", "format_corpus", "gallery", "load", "recall_by_trace"]
