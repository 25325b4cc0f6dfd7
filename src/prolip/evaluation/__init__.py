"""Evaluation on test sets: `open_dataset`, `compute_features`, `evaluate_dataset`, `study_features`."""

from prolip.utils.moved import late

# Late: metrics need neither towers nor file readers.
__getattr__ = late(
    __name__,
    {"open_dataset": "datasets.registry"}
    | dict.fromkeys(("compute_features", "evaluate_dataset", "study_features"), "evaluate"),
    moved={"load_embedder": "prolip.Embedder.load(name, pretrained, tokenizer=...)"},
)
