"""What is a kind of what, by the Gaussians: entailment, traversal, HierarCaps, HierarImgs, inclusion by level."""
from typing import TYPE_CHECKING

from prolip.utils.late import late

if TYPE_CHECKING:
    from prolip.hierarchy.entailment import Entailment, evaluate_entailment, format_entailment
    from prolip.hierarchy.hierarcaps import HierarCaps, benchmark_metrics, paper_metrics, read_hierarcaps
    from prolip.hierarchy.relations import KindPairs, image_pairs, text_pairs
    from prolip.hierarchy.scores import SCORES, Items, items_of
    from prolip.hierarchy.traversal import Traversal, traverse

__all__ = [
    "SCORES", "Entailment", "HierarCaps", "Items", "KindPairs", "Traversal", "benchmark_metrics", "evaluate_entailment",
    "format_entailment", "image_pairs", "items_of", "paper_metrics", "read_hierarcaps", "text_pairs", "traverse",
]  # fmt: skip

# Late, as the command line shows what can be chosen without any of it.
__getattr__ = late(__name__, {
    "Entailment": "entailment", "evaluate_entailment": "entailment", "format_entailment": "entailment",
    "HierarCaps": "hierarcaps", "benchmark_metrics": "hierarcaps", "paper_metrics": "hierarcaps",
    "read_hierarcaps": "hierarcaps", "KindPairs": "relations", "image_pairs": "relations", "text_pairs": "relations",
    "SCORES": "scores", "Items": "scores", "items_of": "scores", "Traversal": "traversal", "traverse": "traversal",
})  # fmt: skip
