"""Uncertainties by other authors, each on frozen embeddings and with one interface: what ours has to beat."""
