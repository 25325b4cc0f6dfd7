"""The bundled corpus as a test set with complete labels."""
