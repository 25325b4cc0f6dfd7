"""Hierarchies by Gaussians: entailment, traversal, HierarCaps, HierarImgs, inclusion by level."""

from prolip.utils.moved import late

#: Steps from the caption nearest to an image to its root: the most inclusive caption averaged with "", or only "".
STEPS, ROOTS = 50, ("included", "empty")
#: Measures of inclusion, and the name of the score of the model's method.
INCLUSIONS, OWN = ("log_inclusion", "inclusion_test"), "own"
#: Every segment of an image has more pixels than this.
LEAST = 5000
#: Public names by module.
PLACES = {
    "entailment": ("Entailment", "KindPairs", "format_entailment"),
    "hierarcaps": ("HierarCaps", "benchmark_metrics", "paper_metrics", "read_hierarcaps"),
    "scores": ("SCORES", "Items", "items_of"),
    "traversal": ("Traversal", "traverse"),
}
MOVED = {name: f"prolip.corpora.emoji.kinds.{name}" for name in ("evaluate_entailment", "image_pairs", "text_pairs")}
# Late, so that the command line shows the choices above without torch.
__getattr__ = late(__name__, {name: module for module, names in PLACES.items() for name in names}, MOVED)
