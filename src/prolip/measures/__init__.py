"""Measures between Gaussians, paired and pairwise."""
from prolip.measures.paired import inclusion_test_per_dim

__all__ = ["inclusion_test_per_dim"]
