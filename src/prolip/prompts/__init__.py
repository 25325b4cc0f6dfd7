"""Prompts of classes: templates, rules that choose them, and Bayesian re-weighting (ProLIP 3.4, A.5, C.5)."""

#: Templates for small drawings; "{}" is the bare name.
DRAWINGS = ("{}", "a drawing of {}", "a picture of {}", "an icon of {}")
