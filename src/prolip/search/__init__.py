"""Search among Gaussians: exact and approximate indexes, queries by text and image, and refusal by risk."""
