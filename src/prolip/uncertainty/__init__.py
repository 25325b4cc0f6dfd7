"""Uncertainty of embeddings: variances fitted to matched pairs, in units of information, and novelty."""
