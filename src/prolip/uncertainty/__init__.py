"""Uncertainty of embeddings: variances fitted to matched pairs, in nats, and novelty."""
