"""Bayesian prompt re-weighting: how much each prompt counts in its class, as images say (ProLIP 3.4, A.5, C.5)."""
