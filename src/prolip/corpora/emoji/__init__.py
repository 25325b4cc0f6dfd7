"""The bundled corpus as a test set with complete labels: what else it can say than any other."""

from prolip.corpora.emoji.evaluate import evaluate_corpus, gallery, recall_by_trace
from prolip.corpora.emoji.result import CorpusResult, format_corpus, load

__all__ = ["CorpusResult", "evaluate_corpus", "format_corpus", "gallery", "load", "recall_by_trace"]
