"""What is a kind of what, by the Gaussians: entailment, traversal, HierarCaps, HierarImgs, inclusion by level."""

from prolip.utils.late import late

#: Public names by the module that has them.
PLACES = {
    "entailment": ("Entailment", "KindPairs", "evaluate_entailment", "format_entailment", "image_pairs", "text_pairs"),
    "hierarcaps": ("HierarCaps", "benchmark_metrics", "paper_metrics", "read_hierarcaps"),
    "scores": ("SCORES", "Items", "items_of"),
    "traversal": ("Traversal", "traverse"),
}
# Late, as the command line shows what can be chosen without any of it.
__getattr__ = late(__name__, {name: module for module, names in PLACES.items() for name in names})
