"""The bundled corpus as a test set with complete labels: what else it can say than any other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prolip.utils.moved import late

if TYPE_CHECKING:
    from prolip.corpora.emoji.evaluate import evaluate_corpus, gallery, recall_by_trace
    from prolip.corpora.emoji.result import CorpusResult, format_corpus, load

__all__ = ["CorpusResult", "evaluate_corpus", "format_corpus", "gallery", "load", "recall_by_trace"]

# Late, as `corpus` alone needs no evaluation.
__getattr__ = late(
    __name__,
    dict.fromkeys(("evaluate_corpus", "gallery", "recall_by_trace"), "evaluate")
    | dict.fromkeys(("CorpusResult", "format_corpus", "load"), "result"),
)
